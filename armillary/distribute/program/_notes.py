"""Notes on errors in a user's step, and warnings, that JAX and Flax cannot give."""

import dis
import math
import sys
import types
from collections.abc import Iterable
from typing import Any

import jax

from armillary._jax_compat import read_number
from armillary._jaxpr import Dataflow
from armillary._logging import logger
from armillary._owners import Owner, owner_of_file
from armillary.distribute.program._traced_step import TracedStep
from armillary.distribute.replica._axis import explain_unbound_axis
from armillary.distribute.replica._context import get_strategy
from armillary.distribute.replica._policy import Policy, policies_of
from armillary.errors import ArmillaryError
from armillary.state._lift import State
from armillary.state._slots import describe, is_array
from armillary.typing import PyTree

_DRAWS = ("random_bits", "random_gamma", "rng_bit_generator")
_VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_READING = {
    "the trainer": "return it from `train_loop_end`, or as a metric of a pure step",
    "the evaluator": "return it from `eval_step`, for `eval_reduce`",
    "the function": "return it, and read it after the call",
}
_MOST_ARRAYS = 20
# Parts of error messages, and the note to add.
_MISTAKES = {
    "StepIterator": "The step gets an iterator, and takes each batch from it: "
    "`batch = next(iterator)`, or `x, y = next(iterator)`.",
    "PerReplica": "Outside `strategy.run`, a batch holds a `PerReplica`: a value for "
    "each replica. Put the code into a function, and call it with "
    "`strategy.run(replica_fn, args=(batch,))`.",
    # JAX's error for a loss that is not one number.
    "scalar-output functions. Output had shape": "A gradient needs one number, but the "
    "loss is an array, such as one number for each example. Return `loss.mean()` and "
    'write `armillary.all_reduce("mean", gradients)`, or return '
    "`armillary.compute_average_loss(loss)` and write "
    '`armillary.all_reduce("sum", gradients)`.',
    "scalar-output functions. Output was None": "The function of the loss returns "
    "nothing. End it with `return loss`.",
    "scalar-output functions. Output was (": "To return other values next to the loss, "
    "write `nnx.value_and_grad(loss_fn, has_aux=True)`: the function returns "
    "`loss, others`.",
    "different trace level": "Flax transforms the arguments of a function, but not the "
    "variables that it captures. Pass the model, as in "
    "`nnx.jit(fn)(self.model, batch)`.",
}

# Functions of libraries that raise for wrong arguments, and the note to add.
_ARGUMENTS = {
    "softmax_cross_entropy_with_integer_labels": "The labels of `optax."
    "softmax_cross_entropy_with_integer_labels` are the numbers of classes, in an "
    "array with one axis less than the logits: write `labels.astype(jnp.int32)`, and "
    "`labels[:, 0]` if there is an axis of length 1. For one-hot labels, write "
    "`optax.softmax_cross_entropy(logits, labels)`.",
}
_CALLED_STEP = (
    "`step` of an optimizer of Flax is its number of steps, not a method. Write "
    "`optimizer.update(model, gradients)`, after "
    '`gradients = armillary.all_reduce("mean", gradients)`.'
)


def add_notes(
    error: Exception, step_name: str, owner: str, arguments: tuple[PyTree, ...]
) -> None:
    if isinstance(error, ArmillaryError):
        return
    if isinstance(error, _VALUE_ERRORS):
        error.add_note(
            f"`{step_name}` uses the value of an array in Python, but in a compiled "
            "step, and on several replicas, an array has no value for Python. To "
            "choose by it, use `jnp.where` or `jax.lax.cond`. To print it, use "
            f"`jax.debug.print`. To read it, {_READING[owner]}. On one device, a "
            "trainer with `compile_step=False` in its options runs line by line."
        )
    elif note := explain_unbound_axis(error, get_strategy()):
        # `strategy.run` may already have added this note, for its own strategy.
        if not getattr(error, "__notes__", ()):
            error.add_note(note)
    elif notes := [note for key, note in _MISTAKES.items() if key in str(error)]:
        error.add_note(notes[0])
    elif (note := _explain_call(error)) is not None:
        error.add_note(note)
    elif arguments and owner != "the function":
        is_stacked = get_strategy().layout.stacked
        shown = []
        first = [batches[0] for batches in arguments]
        tree = first if len(first) > 1 else first[0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            shape = leaf.shape[1:] if is_stacked else leaf.shape
            array = describe(jax.ShapeDtypeStruct(shape, leaf.dtype))
            shown.append(f"{name}: {array}" if name else array)
        if len(shown) > _MOST_ARRAYS:
            shown[_MOST_ARRAYS:] = [f"and {len(shown) - _MOST_ARRAYS} more"]
        where = " on each replica" if is_stacked else ""
        error.add_note(
            f"The batch that `{step_name}` was traced with{where}: {', '.join(shown)}."
        )
        if (layer := _describe_layer(error)) is not None:
            error.add_note(layer)


def _entries_of(error: Exception) -> list[types.TracebackType]:
    """Returns the entries of an error's traceback, the last one first."""
    entries: list[types.TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.insert(0, entry)
        entry = entry.tb_next
    return entries


def _explain_call(error: Exception) -> str | None:
    """Returns a note on a wrong call of a library in the user's code, or `None`."""
    # Older releases of Optax use assertions of Chex.
    if not isinstance(error, AssertionError | TypeError | ValueError):
        return None
    for entry in _entries_of(error):
        code = entry.tb_frame.f_code
        if owner_of_file(code.co_filename) is Owner.USER:
            # Entries before the user's own line are functions that it calls.
            is_called = "is not callable" in str(error) and _last_name(entry) == "step"
            return _CALLED_STEP if is_called else None
        if code.co_name in _ARGUMENTS:
            return _ARGUMENTS[code.co_name]
    return None


def _last_name(entry: types.TracebackType) -> str | None:
    """Returns the last attribute that a line read before its error."""
    name = None
    for instruction in dis.get_instructions(entry.tb_frame.f_code):
        if instruction.offset > entry.tb_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = instruction.argval
    return name


def _describe_layer(error: Exception) -> str | None:
    """Names the layer of Flax that an error came from, by its plain attributes."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    for entry in _entries_of(error):
        names = entry.tb_frame.f_locals
        layer = names.get("self")
        if not isinstance(layer, nnx.Module):
            continue
        sizes = [
            f"{name}={value}"
            for name, value in vars(layer).items()
            if type(value) is int and not name.startswith("_")
        ]
        arrays = [
            describe(value)
            for name, value in names.items()
            if name in entry.tb_frame.f_code.co_varnames[1:2] and is_array(value)
        ]
        got = f", which got {arrays[0]}" if arrays else ""
        return f"It comes from `{type(layer).__name__}({', '.join(sizes)})`{got}."
    return None


def warn_of_draws(name: str, step: TracedStep) -> None:
    """Warns of random numbers that depend on neither state nor batch."""
    draws = _Draws()
    draws.run(step.program, [True] * len(step.program.in_avals))
    if draws.lines:
        logger.warning(
            f"`{name}` draws random numbers from a key that is a constant, so they are "
            f"the same in each step ({draws.lines[0]}). Draw from an `nnx.Rngs` that "
            "the trainer holds (`jax.random.normal(rngs(), shape)`). If you need a "
            "constant, make it before the step."
        )


class _Draws(Dataflow[bool]):
    """Finds draws from keys that are constants.

    The fact of a value is True if it is not a constant.
    """

    nothing = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def join(self, facts: Iterable[bool]) -> bool:
        return any(facts)

    def mix(self, equation: Any, operands: list[bool]) -> bool:
        if equation.primitive.name in _DRAWS and not operands[0]:
            self.lines.append(self.line(equation))
        return any(operands)


class MetricWarnings:
    """Warns once if a metric of a step has values that must not be added up."""

    def __init__(
        self, name: str, num_replicas: int, *, is_evaluation: bool = False
    ) -> None:
        self._name = name
        self._num_replicas = num_replicas
        self._is_evaluation = is_evaluation
        self._means: list[tuple[str, str]] = []
        self._batches: set[Any] = set()
        self._is_done = num_replicas == 1 and not is_evaluation

    def look(self, state: State, step: TracedStep, active: Any = None) -> None:
        """Checks a program of the step, for batches on the `active` replicas."""
        if self._is_done:
            return
        types = step.program.in_avals
        count = 2 if get_strategy().layout.stacked else 1
        sizes = [each.shape[:count] for each in types[len(state.paths) :]]
        self._batches.add((active, *sizes))
        policies = policies_of(state, types[: len(state.paths)])
        summed = {i for i in step.changed if policies[i] is Policy.SUM}
        if not summed:
            return
        inputs = [frozenset({_HELD} if i in summed else ()) for i in range(len(types))]
        extremes: list[tuple[str, str]] = []
        made = _Additions().run(step.program, inputs)
        for i, facts in zip(step.changed, made, strict=False):
            for kind, line in facts if i in summed else ():
                if kind == "extreme":
                    extremes.append((state.paths[i], line))
                elif kind == "mean":
                    self._means.append((state.paths[i], line))
        is_uneven = self._is_evaluation and len(self._batches) > 1
        if extremes and self._num_replicas == 1:
            return
        if extremes:
            metric, line = extremes[0]
            logger.warning(
                f"`{self._name}` keeps a maximum or minimum in the metric {metric} "
                f"({line}), and the values of {self._num_replicas} replicas are added "
                'up. Reduce it first (`armillary.all_reduce("max", value)`), in a '
                "variable of your own (`nnx.Variable`), or outside `run`."
            )
        elif self._means and is_uneven:
            metric, line = self._means[0]
            logger.warning(
                f"`{self._name}` adds the mean of a batch to the metric {metric} "
                f"({line}), but some batches have fewer examples on a replica, so each "
                "of these examples counts more than others. Update the metric with one "
                "value for each example."
            )
        self._is_done = bool(extremes or (self._means and is_uneven))


_HELD = ("held", "by a metric")


class _Additions(Dataflow[frozenset[tuple[str, str]]]):
    """Follows the values that are added to metrics.

    A fact is `held`, for the value of a metric, or `sum`, with the number of values in
    a sum. It is `mean` for a mean of examples, or `extreme` for the maximum or minimum
    of a metric and another value, each with its line.
    """

    nothing = frozenset()

    def join(
        self, facts: Iterable[frozenset[tuple[str, str]]]
    ) -> frozenset[tuple[str, str]]:
        return frozenset().union(*facts)

    def decide(
        self, equation: Any, decides: frozenset[tuple[str, str]]
    ) -> frozenset[tuple[str, str]]:
        del equation, decides
        return self.nothing

    def mix(
        self, equation: Any, operands: list[frozenset[tuple[str, str]]]
    ) -> frozenset[tuple[str, str]]:
        facts = self.join(operands)
        name = equation.primitive.name
        shapes = [getattr(each.aval, "shape", ()) for each in equation.outvars]
        if name in ("max", "min") and _HELD in facts:
            return facts | {("extreme", self.line(equation))}
        if max(map(math.prod, shapes), default=0) > 1:
            return frozenset(f for f in facts if f[0] in ("held", "extreme"))
        shape = equation.invars[0].aval.shape if name == "reduce_sum" else ()
        if shape and shape[0] > 1:  # With one example, the sum equals the mean.
            return facts | {("sum", str(float(math.prod(shape))))}
        divisor = read_number(equation.invars[1]) if name == "div" else ""
        if ("sum", divisor) in facts:
            return facts | {("mean", self.line(equation))}
        return facts
