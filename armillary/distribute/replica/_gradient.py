"""Gradients with respect to variables, with or without gradient accumulation."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from armillary._checks import check_callable, check_one_of, check_positive_int
from armillary._dataflow import Dataflow
from armillary._jaxpr import walk_equations
from armillary._traceback import hides_frames
from armillary.distribute._global_arrays import is_key
from armillary.distribute.analysis._marks import AVERAGE, DIVISOR
from armillary.distribute.replica._context import (
    get_replica_context,
    lifted_state,
    require_replica_context,
)
from armillary.errors import BatchSizeError, CapturedStateError
from armillary.state._adapters import is_variable, node_adapter
from armillary.state._lift import State, strong
from armillary.typing import PyTree
from armillary.xla._remat import Remat, find_policy, rematerialized


@dataclasses.dataclass
class _Step:
    """A step that is being traced, and the options for its gradients.

    Attributes:
        count: The number of parts of its batch.
        remat: The policy of rematerialization, or `None`.
        num_accumulated: The calls of `value_and_grad` so far that took a batch in
            parts.
        num_gradients: All calls of `value_and_grad` so far.
    """

    count: int
    remat: Remat | None
    num_accumulated: int = 0
    num_gradients: int = 0


class _Gradients(threading.local):
    """The options of the gradients that a thread computes now."""

    def __init__(self) -> None:
        # The steps of this thread, the innermost one last.
        self.steps: list[_Step] = []
        # The number of parts of the batch whose loss is being computed.
        self.num_parts = 1


_gradients = _Gradients()


@contextlib.contextmanager
def differentiating(count: int, remat: Remat | None, step_name: str) -> Iterator[None]:
    """Gives the gradients of a step their options.

    They are accumulated over `count` parts of its batch, and rematerialized by the
    policy `remat`.
    """
    step = _Step(count, remat)
    _gradients.steps.append(step)
    try:
        yield
    finally:
        _gradients.steps.pop()
    if remat is not None and step.num_gradients == 0:
        raise ValueError(
            f"`remat` is {remat!r:.60}, but `{step_name}` makes no gradient with "
            "`armillary.value_and_grad`, and the option changes no other gradient. "
            "Write `armillary.value_and_grad(loss_fn, model)`, or leave `remat` out "
            "and write `jax.checkpoint(loss_fn, policy=...)`."
        )
    if count > 1 and step.num_accumulated == 0:
        raise ValueError(
            f"`accumulate_steps` is {count}, but `{step_name}` makes no gradient that "
            "can be accumulated. Only `armillary.value_and_grad` accumulates, and not, "
            "for example, `nnx.grad`. Let the loss take its batch, and write "
            "`armillary.value_and_grad(loss_fn, model, batch=batch)`."
        )


def num_parts() -> int:
    """Returns the number of parts of the batch whose loss is being computed."""
    return _gradients.num_parts


@hides_frames
def value_and_grad(
    loss_fn: Callable[..., Any],
    variables: Any,
    *,
    batch: PyTree = None,
    accumulate_steps: int | None = None,
    op: str | None = None,
    has_aux: bool = False,
    remat: Remat | None = None,
) -> tuple[Any, Any]:
    """Returns a loss, and its gradients with respect to variables.

    It replaces `tf.GradientTape`, for variables of Keras and of Flax NNX::

        def loss_fn():
            predictions = model(images, training=True)
            return jnp.mean(loss_object(labels, predictions))

        loss, gradients = armillary.value_and_grad(loss_fn, model.trainable_variables)
        gradients = armillary.all_reduce("mean", gradients)
        optimizer.apply(gradients, model.trainable_variables)

    Inside `strategy.run`, the gradients belong to this replica, as with `jax.grad`. If
    `loss_fn` writes to variables (batch statistics, metrics, random state), they keep
    the new values.

    With `batch`, gradients can be accumulated: the parts of the batch are
    differentiated one after the other, which needs the memory of one part. The result
    is the loss and the gradients of this replica's whole share.
    `docs/train/gradient_accumulation.md` has an example. If `loss_fn` writes to
    variables, it writes once for each part, in order.

    Accumulation is correct if the loss is a mean over examples, with or without
    penalties, or a sum over examples. It is wrong for any loss that is not linear in
    its examples: for example, the root of a mean of squares, a contrastive loss, or a
    ratio of sums such as Dice. (`weighted_mean` is refused.)

    Args:
        loss_fn: Computes the loss, a scalar, from the variables. If `batch` is given,
            `loss_fn` is called with the batch, or with a part of it.
        variables: The variables to differentiate by: a list of them, or an NNX module
            for its parameters (`nnx.Param`).
        batch: The share of a replica, as the function given to `strategy.run` gets it:
            arrays whose first axis counts the examples.
        accumulate_steps: The number of parts of `batch`; a divisor of the examples of a
            replica. By default the value in the trainer's `StandardTrainerOptions`, or
            1.
        op: The way to combine the losses of the parts: `"mean"` or `"sum"`. It may be
            left out if `compute_average_loss` makes the loss, or for one part.
        has_aux: Whether `loss_fn` returns a pair of the loss and something else, as in
            `jax.value_and_grad`. With several parts, that something must have a value
            for each example, and the values of all parts are joined.
        remat: The values to keep for the backward pass, as in `StandardTrainerOptions`.
            By default the value there.

    Returns:
        The result of `loss_fn`, and one gradient for each variable, in the order of
        `variables`. For a module, the gradients have the form in which
        `nnx.value_and_grad` returns them.

    Raises:
        TypeError: If `loss_fn` cannot be called, one of `variables` is not a variable,
            or `remat` is neither a name nor a policy.
        ValueError: If `variables` is an empty list, `batch` is missing or has no such
            parts, `op` is neither `"mean"` nor `"sum"` or does not fit, `loss_fn`
            cannot be accumulated, or `remat` is not a policy of JAX.
        CapturedStateError: If the trainer does not reach one of the variables.
    """
    check_callable("loss_fn", loss_fn)
    check_one_of("has_aux", has_aux, (True, False))
    fix = "Use `op` for a mean or a sum over examples, or leave it out."
    check_one_of("op", op, (None, "mean", "sum"), fix)
    count = _count_parts(batch, accumulate_steps)
    policy = _find_policy(remat)

    wanted, treedef = _variables_of(variables)
    # In a step, the slots hold tracers already, and the step reads the new values.
    state = lifted_state() or State([(loss_fn, ""), (wanted, "variables")])
    ranges = [_find_range(state, variable) for variable in wanted]
    before = state.read()
    values = _take_values(before, ranges)

    def compute(traced: Sequence[Any], slots: dict[int, Any], part: PyTree) -> Any:
        start = _with_writes(before, slots)
        for (first, stop), value in zip(ranges, traced, strict=True):
            start[first:stop] = jax.tree.leaves(value)
        with state.swapped(start):
            result = loss_fn() if batch is None else loss_fn(part)
            after = state.read()

        loss, aux = split_aux(result, has_aux)
        return loss, (aux, _add_writes(slots, start, after))

    def differentiate(slots: dict[int, Any], part: PyTree) -> _LossAndGradients:
        kept = compute if policy is None else rematerialized(compute, policy)
        compute_both = jax.value_and_grad(kept, has_aux=True)
        (loss, (aux, new)), gradients = compute_both(values, slots, part)
        return _LossAndGradients(loss, aux, new, gradients)

    if count == 1:
        result = differentiate({}, batch)
    else:
        result = _accumulate(differentiate, before, batch, count, op)
    state.write(_with_writes(before, result.slots), set(result.slots))

    gradients = result.gradients
    if treedef is not None:
        gradients = _as_parameters(wanted, treedef, gradients)
    value = (result.loss, result.outputs) if has_aux else result.loss
    return value, gradients


def _count_parts(batch: PyTree, accumulate_steps: int | None) -> int:
    """Returns the number of parts to divide the batch into, and counts the call."""
    count = 1
    if _gradients.steps:
        step = _gradients.steps[-1]
        step.num_gradients += 1
        step.num_accumulated += batch is not None
        count = step.count
    if accumulate_steps is not None:
        count = accumulate_steps
    check_positive_int("accumulate_steps", count)

    # The trainer's option is for all gradients of a step. A gradient without a batch is
    # not divided, but if the call itself asks for parts, it is a mistake.
    if batch is None and accumulate_steps not in (None, 1):
        raise ValueError(
            f"`accumulate_steps` is {accumulate_steps}, but `value_and_grad` was given "
            "no `batch` to take in parts. Let the loss take it: `value_and_grad("
            "loss_fn, variables, batch=batch, ...)`."
        )
    return 1 if batch is None else count


def _take_values(leaves: Sequence[Any], ranges: Sequence[tuple[int, int]]) -> list[Any]:
    """Returns the value of each variable: an array, or a list of several arrays."""
    values: list[Any] = []
    for start, stop in ranges:
        is_one_array = start + 1 == stop  # as nearly every variable
        values.append(leaves[start] if is_one_array else list(leaves[start:stop]))
    return values


def _with_writes(leaves: Sequence[Any], writes: dict[int, Any]) -> list[Any]:
    """Returns the arrays of a state after some writes."""
    return [writes.get(i, leaf) for i, leaf in enumerate(leaves)]


def _add_writes(
    writes: dict[int, Any], before: Sequence[Any], after: Sequence[Any]
) -> dict[int, Any]:
    """Returns the writes so far, with the writes of one more call of the loss."""
    total = dict(writes)
    for i, leaf in enumerate(after):
        if leaf is not before[i]:
            total[i] = leaf
    return {i: strong(leaf) for i, leaf in total.items()}


def _as_parameters(variables: Sequence[Any], treedef: Any, gradients: Any) -> Any:
    """Returns the gradients of a module, in the form of its parameters."""
    replaced: list[Any] = []
    for variable, gradient in zip(variables, gradients, strict=True):
        replaced.append(variable.replace(gradient))
    return treedef.unflatten(replaced)


def _find_policy(remat: Remat | None) -> Callable[..., Any] | None:
    """Returns the policy of a gradient, by default the policy of the step."""
    if remat is None and _gradients.steps:
        remat = _gradients.steps[-1].remat
    return None if remat is None else find_policy(remat)


def _variables_of(variables: Any) -> tuple[list[Any], Any]:
    """Returns variables as a list, and the structure of a module's parameters."""
    adapter = node_adapter(type(variables))
    parameters = None if adapter is None else adapter.find_parameters(variables)
    if parameters is not None:
        return parameters

    # A value that is not iterable is reported below, as something in a list.
    wanted = list(variables) if np.iterable(variables) else [variables]
    if not wanted:
        raise ValueError(
            f"`variables` is {variables!r:.60}, but it must hold at least one variable "
            "to differentiate by. A model of Keras may make its variables in its first "
            "call. So before the first step, call it with one batch "
            "(`model(batch)`), and then write "
            "`optimizer.build(model.trainable_variables)`."
        )
    for variable in wanted:
        if not is_variable(variable):
            raise TypeError(
                f"`variables` holds {variable!r:.60} of type "
                f"{type(variable).__name__}, but it must be a list of variables of "
                "Keras or Flax NNX. Use `model.trainable_variables`, or "
                "`jax.value_and_grad` for arrays."
            )
    return wanted, None


def _find_range(state: State, variable: Any) -> tuple[int, int]:
    """Returns the first index of a variable's arrays in the state, and the end."""
    for slot, first, stop in state.ranges:
        if slot.key == id(variable):
            return first, stop
    name = getattr(variable, "path", type(variable).__name__)
    raise CapturedStateError(
        f"`variables` of `value_and_grad` holds a variable (`{name}`) that the step "
        "does not reach, so there is nothing to differentiate by. Assign the object "
        "that holds it to the trainer (`self.model = model` in `__init__`)."
    )


def split_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the loss and the other outputs in the result of a `loss_fn`."""
    if not has_aux:
        return result, None
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            f"`has_aux` is True, but `loss_fn` returned {result!r:.80}, which is not a "
            "pair. Return `loss, aux`, or leave `has_aux` out."
        )
    return result[0], result[1]


class _LossAndGradients(NamedTuple):
    """The results of a loss function; `slots` has its writes by index in the state."""

    loss: Any
    outputs: PyTree
    slots: dict[int, Any]
    gradients: Any


def _accumulate(
    differentiate: Callable[[dict[int, Any], PyTree], _LossAndGradients],
    before: Sequence[Any],
    batch: PyTree,
    count: int,
    op: str | None,
) -> _LossAndGradients:
    """Returns the loss and gradients of a batch, added up over its parts."""
    require_replica_context("value_and_grad", "leave `batch` out")
    size = _size_of_part(batch, count)
    parts = jax.tree.map(lambda rows: _divide(rows, count, size), batch)

    def run(slots: dict[int, Any], part: PyTree) -> _LossAndGradients:
        with _taking_parts(count):
            return differentiate(slots, part)

    # A loop needs all values that it carries from its beginning, so one part is traced
    # before it, for the types of the sums and the slots that the loss writes to.
    first = jax.tree.map(lambda rows: rows[0], parts)
    program, types = jax.make_jaxpr(run, return_shape=True)({}, first)
    _check_op(program, count, op)
    _check_outputs(types.outputs, size)

    def add_part(carry: Any, part: PyTree) -> Any:
        slots, totals = carry
        result = run(slots, part)
        totals = jax.tree.map(_add, totals, (result.loss, result.gradients))
        return (result.slots, totals), result.outputs

    # The first part may write to slots that the loop must carry from its beginning.
    slots = {i: strong(before[i]) for i in types.slots}
    sum_types = (types.loss, types.gradients)
    zeros = jax.tree.map(_zeros, sum_types)
    (slots, totals), outputs = jax.lax.scan(add_part, (slots, zeros), parts)

    divisor = 1 if op == "sum" else count

    def finish(kind: Any, total: jax.Array) -> jax.Array:
        return (total / divisor).astype(kind.dtype)

    loss, gradients = jax.tree.map(finish, sum_types, totals)
    outputs = jax.tree.map(_join_parts, outputs)
    return _LossAndGradients(loss, outputs, slots, gradients)


@contextlib.contextmanager
def _taking_parts(count: int) -> Iterator[None]:
    """Lets `num_parts` return the number of parts while a loss is computed."""
    outer = _gradients.num_parts
    _gradients.num_parts = count
    try:
        yield
    finally:
        _gradients.num_parts = outer


def _add(total: jax.Array, new: jax.Array) -> jax.Array:
    return total + new.astype(total.dtype)


def _join_parts(rows: jax.Array) -> jax.Array:
    return rows.reshape(-1, *rows.shape[2:])


def _divide(rows: Any, count: int, size: int) -> Any:
    """Returns the parts of one array of a batch, stacked.

    If XLA divides the step between devices, they share each part. Otherwise, XLA would
    give each device whole parts, which every device would then need.
    """
    parts = rows.reshape(count, size, *rows.shape[1:])
    context = get_replica_context()
    split = None if context is None else context.strategy.split
    if split is None or is_key(parts):
        return parts
    return jax.lax.with_sharding_constraint(parts, split(parts.shape, 1))


def _size_of_part(batch: PyTree, count: int) -> int:
    """Returns the number of examples in each of `count` parts of a batch."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = {shape[:1] for shape in shapes}
    has_scalar = () in sizes
    if len(sizes) != 1 or has_scalar:
        raise BatchSizeError(
            f"`batch` of `value_and_grad` has arrays of shapes {shapes}, but the first "
            "axis of all must count the same examples. Let the loss function use all "
            "other arrays by itself, for example from a closure."
        )
    ((size,),) = sizes
    if size % count:
        raise BatchSizeError(
            f"`accumulate_steps` is {count}, but `batch` has {size} examples on each "
            f"replica, which do not divide into {count} equal parts. Use a divisor of "
            f"{size}, or a global batch size that both the replicas and the parts "
            "divide."
        )
    return size // count


def _check_outputs(outputs: PyTree, size: int) -> None:
    """Raises if outputs of a part cannot be joined, because they are not examples."""
    for leaf in jax.tree.leaves(outputs):
        if leaf.shape[:1] != (size,):
            raise ValueError(
                f"`loss_fn` returned an array of shape {leaf.shape} next to the loss, "
                f"for a part of {size} examples, but only arrays with a value for each "
                "example can be joined. Update a metric of the trainer in `loss_fn` "
                "instead."
            )


def _zeros(kind: Any) -> jax.Array:
    """Returns the beginning of a sum, at least in float32.

    In half precision, a sum loses small numbers.
    """
    dtype = jnp.promote_types(kind.dtype, jnp.float32)
    return jnp.zeros(kind.shape, dtype)


class _FindAverage(Dataflow[bool]):
    """Finds values that are computed from a result of `compute_average_loss`."""

    nothing = False

    def join(self, facts: Iterable[bool]) -> bool:
        return any(facts)

    def transfer(self, equation: Any, operands: list[bool]) -> list[bool] | None:
        return [True] if equation.params.get("name") == AVERAGE else None


def _returns_average(program: core.ClosedJaxpr) -> bool:
    """Returns whether `compute_average_loss` makes the first result, the loss."""
    inputs = [False] * len(program.jaxpr.invars)
    loss, *_ = _FindAverage().run(program, inputs)
    return loss


def _check_op(program: core.ClosedJaxpr, count: int, op: str | None) -> None:
    """Raises if `op` is missing or wrong for the loss that a program computes."""
    if op is None and not _returns_average(program):
        raise ValueError(
            f"The loss of `value_and_grad` is accumulated over {count} parts of "
            "`batch`, but `op` is not given, and `compute_average_loss` did not make "
            'it. Pass `op="mean"` if the loss is a mean over the examples that it '
            'gets, or `op="sum"` if it is a sum over them, divided by any number.'
        )
    marks = [equation.params.get("name") for equation in walk_equations(program)]
    if op == "sum" and DIVISOR in marks:
        raise ValueError(
            '`op` of `value_and_grad` is "sum", but the loss uses '
            "`compute_average_loss`, which divides by the number of examples that it "
            "gets, or `scale_regularization_loss`, which each part would add again. "
            "Use `compute_average_loss` for the loss, and leave `op` out."
        )
