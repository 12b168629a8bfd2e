"""Gradients of a large batch, made of one micro-batch after the other.

The share of a replica is cut into equal parts. A loop on the device differentiates the
loss of each and adds up, so that the activations of one part are there at a time. It is
the caller who asks for it (`value_and_grad`): what a step differentiates by other means
is a finished gradient before anyone could cut its batch.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from armillary._jaxpr import walk_programs
from armillary.distribute.replica._context import require_replica_context
from armillary.distribute.replica._differences import DIVISOR
from armillary.errors import BatchSizeError
from armillary.state._lift import strong
from armillary.typing import PyTree


class MicroBatch:
    """The part of a batch whose loss is being computed.

    Attributes:
        count: Parts of the batch.
    """

    def __init__(self, count: int) -> None:
        self.count = count


class Part(NamedTuple):
    """What a loss and its derivative give, for a part of a batch or all of it.

    Attributes:
        loss: The loss, a scalar.
        outputs: What else the loss function returned.
        slots: What it wrote to the state, by the index of the array.
        gradients: In the structure of what it was differentiated by.
    """

    loss: Any
    outputs: PyTree
    slots: dict[int, Any]
    gradients: Any


class _Local(threading.local):
    def __init__(self) -> None:
        self.wanted: list[list[int]] = []
        self.micro_batch: MicroBatch | None = None


_local = _Local()


@contextlib.contextmanager
def accumulating(count: int, step_name: str) -> Iterator[None]:
    """Lets a step accumulate gradients over so many parts of its batch."""
    _local.wanted.append([count, 0])
    try:
        yield
        _, num_uses = _local.wanted[-1]
    finally:
        _local.wanted.pop()
    if count > 1 and not num_uses:
        raise ValueError(
            f"`accumulate_steps` is {count}, but `{step_name}` makes no gradient that "
            "can be accumulated: what `nnx.grad` or `jax.grad` return is already that "
            "of the whole batch. Let the loss take its batch, and write `loss, "
            "gradients = armillary.value_and_grad(loss_fn, model, batch=batch)`."
        )


def wanted_count(*, is_used: bool) -> int:
    """Returns in how many parts the running step is to take a batch."""
    if not _local.wanted:
        return 1
    _local.wanted[-1][1] += is_used
    return _local.wanted[-1][0]


def current_micro_batch() -> MicroBatch | None:
    """Returns the part of a batch whose loss is being computed, if it is one."""
    return _local.micro_batch


def split_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the loss of a `loss_fn`, and what it returned besides."""
    if not has_aux:
        return result, None
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            f"`has_aux` is True, but `loss_fn` returned {result!r:.80}, and no pair of "
            "the loss and something else. Return `loss, aux`, or leave `has_aux` out."
        )
    return result[0], result[1]


def accumulate(
    differentiate: Callable[[Sequence[Any], dict[int, Any], PyTree], Part],
    values: Sequence[Any],
    before: Sequence[Any],
    batch: PyTree,
    count: int,
    op: str | None,
) -> Part:
    """Returns the loss and gradients of a batch from those of its parts."""
    require_replica_context("value_and_grad", "leave `batch` out")
    size = _part_size(batch, count)
    parts = jax.tree.map(lambda rows: rows.reshape(count, size, *rows.shape[1:]), batch)
    values = list(values)

    def run(slots: dict[int, Any], part: PyTree) -> Part:
        with _computing(MicroBatch(count)):
            return differentiate(values, slots, part)

    first = jax.tree.map(lambda rows: rows[0], parts)
    program, kinds = jax.make_jaxpr(run, return_shape=True)({}, first)
    _check_op(program, count, op)
    _check_outputs(kinds.outputs, size)

    def body(carry: Any, part: PyTree) -> Any:
        slots, total, sums = carry
        found = run(slots, part)
        sums = jax.tree.map(
            lambda sum_, one: sum_ + one.astype(sum_.dtype), sums, found.gradients
        )
        return (found.slots, total + found.loss, sums), found.outputs

    zeros = jax.tree.map(_zeros, [kinds.loss, values])
    slots = {i: strong(before[i]) for i in kinds.slots}
    (slots, total, sums), outputs = jax.lax.scan(body, (slots, *zeros), parts)

    divisor = 1 if op == "sum" else count

    def finish(value: Any, sum_: Any) -> Any:
        return (sum_ / divisor).astype(value.dtype)

    return Part(
        finish(kinds.loss, total),
        jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:]), outputs),
        slots,
        jax.tree.map(finish, values, sums),
    )


def _zeros(kind: Any) -> jax.Array:
    # A sum of many small numbers in half precision would lose them.
    return jnp.zeros(kind.shape, jnp.promote_types(kind.dtype, jnp.float32))


@contextlib.contextmanager
def _computing(part: MicroBatch) -> Iterator[None]:
    before, _local.micro_batch = _local.micro_batch, part
    try:
        yield
    finally:
        _local.micro_batch = before


def _check_op(program: core.ClosedJaxpr, count: int, op: str | None) -> None:
    """Raises if nothing tells how the loss is made of those of the parts.

    Raises:
        ValueError: If so, or if two things do.
    """
    is_scaled = any(
        equation.params.get("name") == DIVISOR
        for jaxpr, _ in walk_programs(program)
        for equation in jaxpr.eqns
    )
    if not is_scaled and op is None:
        raise ValueError(
            f"The loss of `value_and_grad` is accumulated over {count} parts of "
            "`batch`, but `op` is not given, and `compute_average_loss` did not make "
            'it. Pass `op="mean"` for a loss that is a mean over the examples that it '
            'gets (`jnp.mean(losses)`), `op="sum"` for a sum of them, whatever that '
            "is divided by."
        )
    if is_scaled and op == "sum":
        raise ValueError(
            '`op` of `value_and_grad` is "sum", but `compute_average_loss` made the '
            "loss, and divides by the number of examples that it gets. Leave `op` out."
        )


def _part_size(batch: PyTree, count: int) -> int:
    sizes = {jnp.shape(rows)[:1] for rows in jax.tree.leaves(batch)}
    if len(sizes) != 1 or sizes == {()}:
        shown = sorted(jnp.shape(rows) for rows in jax.tree.leaves(batch))
        raise BatchSizeError(
            f"`batch` has arrays of shapes {shown}, but to be taken in {count} parts, "
            "they must be arrays with the same number of examples as first axis. Pass "
            "what the function given to `strategy.run` gets, and let the loss close "
            "over anything else."
        )
    ((size,),) = sizes
    if size % count:
        raise BatchSizeError(
            f"`accumulate_steps` is {count}, but `batch` has {size} examples on each "
            f"replica, which are no {count} equal parts. Use a divisor of {size}, or "
            "a global batch size that both the replicas and the parts divide."
        )
    return size // count


def _check_outputs(outputs: PyTree, size: int) -> None:
    for leaf in jax.tree.leaves(outputs):
        if leaf.shape[:1] != (size,):
            raise ValueError(
                f"The loss returned an array of shape {leaf.shape} beside the loss, "
                f"for a part of {size} examples. Only values of each example can be "
                f"joined to those of the whole batch, shape ({size}, ...): update a "
                "metric of the trainer in the loss instead."
            )
