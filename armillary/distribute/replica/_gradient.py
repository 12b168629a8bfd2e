"""Gradients with respect to variables, with or without gradient accumulation."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from armillary._checks import check_callable, check_one_of, check_positive_int
from armillary._jaxpr import Dataflow, walk_equations
from armillary._traceback import hides_frames
from armillary.distribute.replica._context import lifted_state, require_replica_context
from armillary.distribute.replica._marks import AVERAGE, DIVISOR
from armillary.errors import BatchSizeError, CapturedStateError
from armillary.state._keras import is_variable as is_keras_variable
from armillary.state._lift import State, strong
from armillary.state._nnx import is_node
from armillary.state._nnx import is_variable as is_nnx_variable
from armillary.typing import PyTree


class _Local(threading.local):
    def __init__(self) -> None:
        # For each step, the number of parts of a batch, and the number of calls of
        # `value_and_grad` that took a batch in parts.
        self.steps: list[list[int]] = []
        # The number of parts of the batch whose loss is being computed.
        self.num_parts = 1


_local = _Local()


@contextlib.contextmanager
def accumulating(count: int, step_name: str) -> Iterator[None]:
    """Makes a step accumulate gradients over `count` parts of its batch."""
    _local.steps.append([count, 0])
    try:
        yield
        _, num_uses = _local.steps[-1]
    finally:
        _local.steps.pop()
    if count > 1 and not num_uses:
        raise ValueError(
            f"`accumulate_steps` is {count}, but `{step_name}` makes no gradient that "
            "can be accumulated. Only `armillary.value_and_grad` accumulates, and not, "
            "for example, `nnx.grad`. Let the loss take its batch, and write "
            "`armillary.value_and_grad(loss_fn, model, batch=batch)`."
        )


def num_parts() -> int:
    """Returns the number of parts of the batch whose loss is being computed."""
    return _local.num_parts


@hides_frames
def value_and_grad(
    loss_fn: Callable[..., Any],
    variables: Any,
    *,
    batch: PyTree = None,
    accumulate_steps: int | None = None,
    op: str | None = None,
    has_aux: bool = False,
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
    `docs/gradient_accumulation.md` has an example. If `loss_fn` writes to variables,
    it writes once for each part, in order.

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

    Returns:
        The result of `loss_fn`, and one gradient for each variable, in the order of
        `variables`. For a module, the gradients have the form in which
        `nnx.value_and_grad` returns them.

    Raises:
        TypeError: If `loss_fn` cannot be called, or one of `variables` is not a
            variable.
        ValueError: If `batch` is missing or has no such parts, `op` is neither `"mean"`
            nor `"sum"` or does not fit, or `loss_fn` cannot be accumulated.
        CapturedStateError: If the trainer does not reach one of the variables.
    """
    check_callable("loss_fn", loss_fn)
    check_one_of("has_aux", has_aux, (True, False))
    fix = "Use `op` for a mean or a sum over examples, or leave it out."
    check_one_of("op", op, (None, "mean", "sum"), fix)
    count = _count_parts(batch, accumulate_steps)
    wanted, treedef = _variables_of(variables)
    state = lifted_state() or State([(loss_fn, ""), (wanted, "variables")])
    ranges = [_find(state, variable) for variable in wanted]
    before = state.read()
    # Nearly every variable is one array.
    values = [
        before[i] if i + 1 == stop else list(before[i:stop]) for i, stop in ranges
    ]

    def compute(values: Sequence[Any], slots: dict[int, Any], part: PyTree) -> Any:
        start = [slots.get(i, leaf) for i, leaf in enumerate(before)]
        for (first, stop), value in zip(ranges, values, strict=True):
            start[first:stop] = jax.tree.leaves(value)
        with state.swapped(start):
            result = loss_fn() if batch is None else loss_fn(part)
            after = state.read()
        loss, aux = split_aux(result, has_aux)
        new = {i: leaf for i, leaf in enumerate(after) if leaf is not start[i]}
        # Changes of earlier parts are kept, unless this part changes the slot again.
        changed = {i: strong(leaf) for i, leaf in {**slots, **new}.items()}
        return loss, (aux, changed)

    def differentiate(slots: dict[int, Any], part: PyTree) -> _Found:
        compute_both = jax.value_and_grad(compute, has_aux=True)
        (loss, (aux, new)), gradients = compute_both(values, slots, part)
        return _Found(loss, aux, new, gradients)

    if count == 1:
        found = differentiate({}, batch)
    else:
        found = _accumulate(differentiate, before, batch, count, op)

    new = found.slots
    state.write([new.get(i, leaf) for i, leaf in enumerate(before)], set(new))
    gradients = found.gradients
    if treedef is not None:
        pairs = zip(wanted, gradients, strict=True)
        gradients = treedef.unflatten(
            variable.replace(gradient) for variable, gradient in pairs
        )
    value = (found.loss, found.outputs) if has_aux else found.loss
    return value, gradients


def _count_parts(batch: PyTree, accumulate_steps: int | None) -> int:
    count = accumulate_steps
    if _local.steps:
        _local.steps[-1][1] += batch is not None
        count = _local.steps[-1][0] if count is None else count
    count = 1 if count is None else count
    check_positive_int("accumulate_steps", count)
    if batch is None and accumulate_steps not in (None, 1):
        raise ValueError(
            f"`accumulate_steps` is {accumulate_steps}, but `value_and_grad` was given "
            "no `batch` to take in parts. Let the loss take it: `value_and_grad("
            "loss_fn, variables, batch=batch, ...)`."
        )
    return 1 if batch is None else count


def _variables_of(variables: Any) -> tuple[list[Any], Any]:
    if is_node(variables):
        from flax import nnx

        state = nnx.state(variables, nnx.Param)
        return jax.tree.flatten(state, is_leaf=is_nnx_variable)
    # A value that is not iterable is reported below, as something in a list.
    wanted = list(variables) if np.iterable(variables) else [variables]
    for variable in wanted:
        if not (is_keras_variable(variable) or is_nnx_variable(variable)):
            raise TypeError(
                f"`variables` holds {variable!r:.60} of type "
                f"{type(variable).__name__}, but it must be a list of variables of "
                "Keras or Flax NNX. Use `model.trainable_variables`, or "
                "`jax.value_and_grad` for arrays."
            )
    return wanted, None


def _find(state: State, variable: Any) -> tuple[int, int]:
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


class _Found(NamedTuple):
    """The results of a loss function; `slots` has its writes by index in the state."""

    loss: Any
    outputs: PyTree
    slots: dict[int, Any]
    gradients: Any


def _accumulate(
    differentiate: Callable[[dict[int, Any], PyTree], _Found],
    before: Sequence[Any],
    batch: PyTree,
    count: int,
    op: str | None,
) -> _Found:
    """Returns the loss and gradients of a batch, added up over its parts."""
    require_replica_context("value_and_grad", "leave `batch` out")
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
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
    size //= count
    parts = jax.tree.map(lambda rows: rows.reshape(count, size, *rows.shape[1:]), batch)

    def run(slots: dict[int, Any], part: PyTree) -> _Found:
        outer = _local.num_parts
        _local.num_parts = count
        try:
            return differentiate(slots, part)
        finally:
            _local.num_parts = outer

    first = jax.tree.map(lambda rows: rows[0], parts)
    program, kinds = jax.make_jaxpr(run, return_shape=True)({}, first)
    _check_op(program, count, op)
    for leaf in jax.tree.leaves(kinds.outputs):
        if leaf.shape[:1] != (size,):
            raise ValueError(
                f"`loss_fn` returned an array of shape {leaf.shape} next to the loss, "
                f"for a part of {size} examples, but only arrays with a value for each "
                "example can be joined. Update a metric of the trainer in `loss_fn` "
                "instead."
            )
    sums = kinds.loss, kinds.gradients

    def body(carry: Any, part: PyTree) -> Any:
        slots, total = carry
        found = run(slots, part)
        new = found.loss, found.gradients
        total = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, new)
        return (found.slots, total), found.outputs

    # In half precision, a sum loses small numbers, so it is at least float32.
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), sums
    )
    slots = {i: strong(before[i]) for i in kinds.slots}
    (slots, total), outputs = jax.lax.scan(body, (slots, zeros), parts)
    divisor = 1 if op == "sum" else count
    loss, gradients = jax.tree.map(
        lambda kind, sum_: (sum_ / divisor).astype(kind.dtype), sums, total
    )
    outputs = jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:]), outputs)
    return _Found(loss, outputs, slots, gradients)


class _FindAverage(Dataflow[bool]):
    """Finds values that are computed from a result of `compute_average_loss`."""

    nothing = False

    def join(self, facts: Iterable[bool]) -> bool:
        return any(facts)

    def transfer(self, equation: Any, operands: list[bool]) -> list[bool] | None:
        return [True] if equation.params.get("name") == AVERAGE else None


def _check_op(program: core.ClosedJaxpr, count: int, op: str | None) -> None:
    inputs = [False] * len(program.jaxpr.invars)
    # The first result of the program is the loss.
    if op is None and not _FindAverage().run(program, inputs)[0]:
        raise ValueError(
            f"The loss of `value_and_grad` is accumulated over {count} parts of "
            "`batch`, but `op` is not given, and `compute_average_loss` did not make "
            'it. Pass `op="mean"` if the loss is a mean over the examples that it '
            'gets, or `op="sum"` if it is a sum over them, divided by any number.'
        )
    names = (equation.params.get("name") for equation in walk_equations(program))
    if op == "sum" and DIVISOR in names:
        raise ValueError(
            '`op` of `value_and_grad` is "sum", but the loss uses '
            "`compute_average_loss`, which divides by the number of examples that it "
            "gets, or `scale_regularization_loss`, which each part would add again. "
            "Use `compute_average_loss` for the loss, and leave `op` out."
        )
