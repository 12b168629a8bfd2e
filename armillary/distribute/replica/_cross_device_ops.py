"""How sums over replicas are made: XLA's own way, or another one.

`ReplicaContext` asks it for each sum of `all_reduce` and of on-read state. What a step
sums with `jax.lax.psum` is left to XLA.
"""

from typing import Any

import jax
import jax.numpy as jnp

from armillary._checks import check_positive_int, is_positive_int
from armillary._jaxpr import mark
from armillary.distribute.replica._differences import BY_OPS, MADE_BY_OPS
from armillary.distribute.replica._values import AXIS_NAME


class CrossDeviceOps:
    """The base of ways to sum over replicas (`tf.distribute.CrossDeviceOps`).

    A way of your own overrides `all_reduce`::

        class Ring(armillary.distribute.CrossDeviceOps):
            def all_reduce(self, value, axis_name, num_replicas):
                ring = [(i, (i + 1) % num_replicas) for i in range(num_replicas)]
                total = value
                for _ in range(num_replicas - 1):
                    value = jax.lax.ppermute(value, axis_name, ring)
                    total = total + value
                return total
    """

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum of an array over replicas, on every replica.

        It runs in every replica, while a step is compiled. The result must be equal
        on all of them, which is not proved: `check_replicas_every` of a trainer
        compares what the step leaves. The ring above adds in another order on each
        replica, so that sums of floats differ there by rounding.

        Args:
            value: This replica's value.
            axis_name: What the functions of `jax.lax` call the axis of replicas.
            num_replicas: At least 2.
        """
        raise NotImplementedError

    def check(self, num_replicas: int) -> None:
        """Raises if so many replicas cannot be summed over.

        Raises:
            ValueError: If so.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class NcclAllReduce(CrossDeviceOps):
    """XLA's own all-reduce, which is NCCL on NVIDIA GPUs: what there is by default.

    Args:
        num_packs: Kept for programs that come from TensorFlow. XLA decides which
            values it sums together.
    """

    def __init__(self, num_packs: int = 1) -> None:
        check_positive_int("num_packs", num_packs)

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum, in one all-reduce."""
        del num_replicas
        return jax.lax.psum(value, axis_name)


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Sums inside groups of neighbours first, then over groups.

    For devices that reach their neighbours faster than others. Each replica of a group
    sums a part of the value over its group (a reduce-scatter), these parts are summed
    over groups (an all-gather and a sum), and an all-gather inside groups puts them
    together. Between groups, only a part of the value travels.

    Args:
        num_packs: Kept for programs that come from TensorFlow. XLA decides which
            values it sums together.
        group_size: Replicas of a group, a divisor of the number of replicas. By default
            the largest one below that number: two halves of an even number.

    Raises:
        ValueError: If `group_size` is not a positive integer.
    """

    def __init__(self, num_packs: int = 1, *, group_size: int | None = None) -> None:
        check_positive_int("num_packs", num_packs)
        if group_size is not None and not is_positive_int(group_size):
            raise ValueError(_group_message(group_size, "a positive integer"))
        self._group_size = group_size

    def check(self, num_replicas: int) -> None:
        """Raises if replicas cannot be divided into such groups.

        Raises:
            ValueError: If so.
        """
        if self._group_size is not None and num_replicas % self._group_size:
            rule = f"a divisor of the number of replicas, which is {num_replicas}"
            raise ValueError(_group_message(self._group_size, rule))

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum, made inside groups, over groups, and inside groups again."""
        size = self._group_size
        if size is None or num_replicas % size:  # fewer replicas share an uneven batch
            size = max(n for n in range(1, num_replicas) if num_replicas % n == 0)
        starts = range(0, num_replicas, size)
        inside = [list(range(start, start + size)) for start in starts]
        over = [[start + i for start in starts] for i in range(size)]
        flat = jnp.ravel(value)
        flat = jnp.pad(flat, (0, -flat.size % size))
        part = jax.lax.psum_scatter(
            flat, axis_name, axis_index_groups=inside, tiled=True
        )
        # Not `psum`, which takes no groups inside `shard_map`.
        parts = jax.lax.all_gather(part, axis_name, axis_index_groups=over)
        total = jax.lax.all_gather(
            jnp.sum(parts, 0), axis_name, axis_index_groups=inside, tiled=True
        )
        return total[: value.size].reshape(value.shape)


class ReductionToOneDevice(CrossDeviceOps):
    """Sums on the first replica, which then sends the sum to all others.

    Every value goes over the links of one device: for small values and few devices,
    and for comparison.

    Args:
        reduce_to_device: Nothing but `None`, for programs that come from TensorFlow.
        accumulation_fn: Likewise.

    Raises:
        ValueError: If one of them is anything else.
    """

    def __init__(
        self, reduce_to_device: None = None, accumulation_fn: None = None
    ) -> None:
        if reduce_to_device is not None:
            raise ValueError(
                f"`reduce_to_device` is {reduce_to_device!r}, but values go to the "
                "first replica. Leave it out, and put the device of your choice first: "
                "`MirroredStrategy(devices=[...])`."
            )
        if accumulation_fn is not None:
            raise ValueError(
                f"`accumulation_fn` is {accumulation_fn!r}, but values are added up. "
                "Leave it out, or derive from `armillary.distribute.CrossDeviceOps`, "
                "whose `all_reduce` is yours."
            )

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum, by sending values to the first replica and back."""
        is_first = jax.lax.axis_index(axis_name) == 0
        total = value
        for other in range(1, num_replicas):
            total = total + jax.lax.ppermute(value, axis_name, [(other, 0)])
        # Who gets nothing has zeros, so that the parts of the sum add up to it.
        result = jnp.where(is_first, total, jnp.zeros_like(total))
        for other in range(1, num_replicas):
            result = result + jax.lax.ppermute(
                jnp.where(is_first, total, jnp.zeros_like(total)),
                axis_name,
                [(0, other)],
            )
        return result


def _group_message(size: Any, rule: str) -> str:
    return (
        f"`group_size` is {size!r}, but it must be {rule}. Leave it out for the "
        "largest groups that there are."
    )


def sum_by(ops: CrossDeviceOps, value: jax.Array, num_replicas: int, op: str) -> Any:
    """Returns the sum over replicas that `ops` makes; `op` is what it is for."""

    @jax.custom_jvp
    def total(value: jax.Array) -> jax.Array:
        parts = mark(value, BY_OPS % op)
        result = ops.all_reduce(parts, AXIS_NAME, num_replicas)
        found = (jnp.shape(result), jnp.result_type(result))
        if found != (value.shape, value.dtype):
            raise ValueError(
                f"`all_reduce` of {ops!r} made {found[1]}{list(found[0])} of "
                f"{value.dtype}{list(value.shape)}, but a sum over replicas has the "
                "shape and dtype of its parts. Return one value of the same kind."
            )
        return mark(result, MADE_BY_OPS)

    @total.defjvp
    def derivative(values: Any, tangents: Any) -> Any:
        # Within a loss, as for statistics of a batch, its transpose is needed.
        return total(*values), jax.lax.psum(tangents[0], AXIS_NAME)

    return total(value)
