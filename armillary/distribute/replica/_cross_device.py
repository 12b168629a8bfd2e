"""Ways to reduce over replicas: XLA's own, in groups, on one device, or the user's.

A strategy has one of them (`cross_device_ops`), and every `all_reduce` in its steps
calls it::

    strategy = armillary.MirroredStrategy(
        cross_device_ops=armillary.distribute.HierarchicalCopyAllReduce()
    )

Its `reduce` runs in every replica while a step is compiled. `_own_ops` proves that the
results are equal on all replicas.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from armillary._checks import check_not_negative_int, check_positive_int
from armillary.distribute.replica._context import get_replica_context
from armillary.distribute.replica._values import ReduceOp

_COLLECTIVES = {
    ReduceOp.SUM: jax.lax.psum,
    ReduceOp.MAX: jax.lax.pmax,
    ReduceOp.MIN: jax.lax.pmin,
}
_COMBINE = {
    ReduceOp.SUM: jnp.add,
    ReduceOp.MAX: jnp.maximum,
    ReduceOp.MIN: jnp.minimum,
}


class CrossDeviceOps:
    """The base of ways to reduce over replicas (`tf.distribute.CrossDeviceOps`).

    To reduce in a way of your own, override `reduce` and use the collectives of
    `jax.lax` over the axis of replicas: `"replica"`, or the `axis_name` of the strategy
    (`armillary.get_replica_context().axis_name`). For example, this class gathers the
    values, and adds them in the order of the replicas::

        class Gathered(armillary.distribute.CrossDeviceOps):
            def reduce(self, op, values):
                assert op is armillary.distribute.ReduceOp.SUM
                parts = [jax.lax.all_gather(value, "replica") for value in values]
                return [jnp.sum(each, axis=0) for each in parts]

        strategy = armillary.MirroredStrategy(cross_device_ops=Gathered())
    """

    def reduce(self, op: ReduceOp, values: Sequence[jax.Array]) -> Sequence[Any]:
        """Returns arrays combined over all replicas, on every replica.

        It runs in replica context, once for each `armillary.all_reduce`, while a step
        is compiled. Armillary proves that the results are equal on all replicas.
        Reductions such as `psum` and `all_gather` over all replicas make a value equal.
        Several rounds with `axis_index_groups` may do so together. The derivative of a
        sum is XLA's own sum.

        Args:
            op: `ReduceOp.SUM`, `MAX` or `MIN`. A mean is a sum, which `all_reduce`
                divides by the number of replicas with data.
            values: This replica's arrays. A replica without data has arrays that do not
                change the result, such as zeros for a sum.

        Returns:
            One array for each array of `values`, of the same shape and dtype.

        Raises:
            NotImplementedError: If a class does not override it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no `reduce`. Write `def reduce(self, op, "
            "values)`, which returns the arrays of `values` combined over replicas."
        )

    def _check_replicas(self, num_replicas: int) -> None:
        """Raises if it cannot reduce over this number of replicas."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _axis_name() -> str:
    """Returns the axis of replicas of the current strategy."""
    context = get_replica_context()
    assert context is not None
    return context.strategy.axis_name


class NcclAllReduce(CrossDeviceOps):
    """XLA's own all-reduce, which is NCCL on NVIDIA GPUs: the default.

    Args:
        num_packs: 1, as in TensorFlow by default. XLA joins the all-reduces of small
            arrays itself.

    Raises:
        TypeError: If `num_packs` is not an integer.
        ValueError: If `num_packs` is not 1.
    """

    def __init__(self, num_packs: int = 1) -> None:
        if check_positive_int("num_packs", num_packs) != 1:
            raise ValueError(
                f"`num_packs` is {num_packs!r}, but XLA decides how all-reduces are "
                "packed. Leave it out. On GPUs, `armillary.cluster."
                "CommunicationOptions(bytes_per_pack=...)` limits the packs."
            )

    def reduce(self, op: ReduceOp, values: Sequence[jax.Array]) -> Sequence[Any]:
        """Returns the arrays after XLA's all-reduce."""
        return _COLLECTIVES[op](list(values), _axis_name())


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Sums inside each host first, then across hosts.

    Use it if the devices of a host have faster links to each other than to other hosts.
    First, each device sums its part of the values inside its host (a reduce-scatter).
    Then the parts are summed across hosts (an all-reduce). At the end, the devices of a
    host exchange the parts (an all-gather). So only a part of the values travels
    between hosts: with 4 devices in each host, a quarter.

    By default, a group is the devices of one process. XLA's own all-reduce is used in a
    single process, because there is no slower link. It is also used for `"max"` and
    `"min"`, and for an uneven batch on replicas that do not form groups.

    Args:
        num_packs: The number of rounds for the arrays of one `all_reduce`; 0 for one
            round for each array.
        devices_per_group: The number of neighbors in `strategy.mesh` with fast links to
            each other. By default, the devices of one process.

    Raises:
        ValueError: If `num_packs` is not an integer from 0, or `devices_per_group` is
            not positive. The strategy also raises it if the groups would be uneven.
    """

    def __init__(
        self, num_packs: int = 1, devices_per_group: int | None = None
    ) -> None:
        self._num_packs = check_not_negative_int("num_packs", num_packs)
        if devices_per_group is not None:
            check_positive_int("devices_per_group", devices_per_group)
        self._devices_per_group = devices_per_group

    def _check_replicas(self, num_replicas: int) -> None:
        size = self._devices_per_group
        if size is not None and num_replicas % size:
            raise ValueError(
                f"`devices_per_group` is {size}, but the strategy has {num_replicas} "
                f"devices, which do not divide into groups of {size}. Use a divisor of "
                f"{num_replicas}, or leave it out for the devices of each process."
            )

    def reduce(self, op: ReduceOp, values: Sequence[jax.Array]) -> Sequence[Any]:
        """Returns the arrays summed in groups, and then across groups."""
        groups = self._find_groups()
        if op is not ReduceOp.SUM or groups is None:
            return NcclAllReduce().reduce(op, values)
        axis = _axis_name()

        def reduce(flat: jax.Array) -> jax.Array:
            return _sum_in_groups(flat, groups, axis)

        results: list[Any] = []
        for pack in _split(values, self._num_packs):
            results += _by_dtype(reduce, pack)
        return results

    def _find_groups(self) -> list[list[int]] | None:
        """Returns the replicas of each host; `None` if there is nothing to divide."""
        context = get_replica_context()
        assert context is not None
        mesh = context.strategy.mesh
        assert mesh is not None
        num_replicas = jax.lax.axis_size(_axis_name())
        # For an uneven batch, several devices are one replica.
        devices_per_replica = mesh.size // num_replicas

        hosts: list[int] = []  # of each replica
        if self._devices_per_group is not None:
            for replica in range(num_replicas):
                first_device = replica * devices_per_replica
                hosts.append(first_device // self._devices_per_group)
            return find_groups(hosts)
        if isinstance(mesh, jax.sharding.AbstractMesh):
            return None  # Abstract devices have no processes.
        for device in mesh.devices.flat[::devices_per_replica]:
            hosts.append(device.process_index)
        return find_groups(hosts)


def find_groups(hosts: Sequence[int]) -> list[list[int]] | None:
    """Returns the replicas of each host, given the host of each replica.

    Returns `None` if groups would not help: for a single host, hosts with one replica,
    or hosts with different numbers of replicas.
    """
    groups: dict[int, list[int]] = {}
    for replica, host in enumerate(hosts):
        groups.setdefault(host, []).append(replica)
    sizes = {len(replicas) for replicas in groups.values()}
    is_single = len(groups) == 1
    is_uneven = len(sizes) > 1
    if is_single or is_uneven or sizes == {1}:
        return None
    return list(groups.values())


class ReductionToOneDevice(CrossDeviceOps):
    """Adds all values on the first replica, which sends the sum to the others.

    The values are added one after the other, in the order of the replicas. So a sum of
    floats is exactly the sum that one device computes in this order. All values travel
    over the links of one device, so use it for few devices, or to compare results.
    """

    def __init__(self) -> None:
        super().__init__()

    def reduce(self, op: ReduceOp, values: Sequence[jax.Array]) -> Sequence[Any]:
        """Returns the arrays combined on the first replica."""
        axis = _axis_name()
        is_first = jax.lax.axis_index(axis) == 0
        num_replicas = jax.lax.axis_size(axis)
        combine = _COMBINE[op]
        totals = list(values)
        # ORDER: one replica after the other, so that the sum of floats is always equal.
        for other in range(1, num_replicas):
            to_first = [(other, 0)]
            received = jax.lax.ppermute(list(values), axis, to_first)
            totals = list(map(combine, totals, received))

        # A sum instead of a broadcast, which XLA lacks on some platforms. The zeros of
        # the other replicas change nothing except the sign of a zero.
        sent: list[Any] = []
        for total in totals:
            zeros = jnp.zeros_like(total)
            sent.append(jnp.where(is_first, total, zeros))
        return jax.lax.psum(sent, axis)


def _split(values: Sequence[Any], num_packs: int) -> list[list[Any]]:
    """Divides values into packs of about the same number of bytes, in order."""
    if num_packs == 0:
        return [[value] for value in values]
    num_bytes = sum(value.nbytes for value in values)
    packs: list[list[Any]] = [[] for _ in range(num_packs)]
    num_before = 0  # bytes of the values before this one
    for value in values:
        # The pack in which the middle of the value lies.
        middle = num_before + value.nbytes / 2
        index = int(middle * num_packs / num_bytes) if num_bytes else 0
        last = num_packs - 1  # An empty value may be at the very end.
        packs[min(index, last)].append(value)
        num_before += value.nbytes
    return [pack for pack in packs if pack]


def _by_dtype(
    reduce: Callable[[jax.Array], jax.Array], values: list[Any]
) -> list[jax.Array]:
    """Reduces the arrays of each dtype as one flat array."""
    # A dictionary keeps the order, which must be the same on all processes.
    places_of: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        places_of.setdefault(value.dtype, []).append(place)

    results: list[Any] = list(values)
    for places in places_of.values():
        flat = jnp.concatenate([jnp.ravel(values[place]) for place in places])
        rest = reduce(flat)
        for place in places:
            shape = values[place].shape
            size = math.prod(shape)
            results[place] = rest[:size].reshape(shape)
            rest = rest[size:]
    return results


def _sum_in_groups(flat: jax.Array, groups: list[list[int]], axis: str) -> jax.Array:
    """Returns a flat array summed over all replicas, by groups of equal size."""
    # The replicas at the same position of each group, which hold the same part.
    across = [list(column) for column in zip(*groups, strict=True)]
    # Two scatters divide the array by the size of a group, and by their number.
    num_parts = len(across) * len(groups)
    num_missing = -flat.size % num_parts
    padded = jnp.pad(flat, (0, num_missing))
    # Shapes: (n,), then (n / size of a group,), then (n / num_parts,), and back.
    part = jax.lax.psum_scatter(padded, axis, axis_index_groups=groups, tiled=True)
    # The two halves of an all-reduce, because not every JAX has a `psum` over groups.
    part = jax.lax.psum_scatter(part, axis, axis_index_groups=across, tiled=True)
    part = jax.lax.all_gather(part, axis, axis_index_groups=across, tiled=True)
    whole = jax.lax.all_gather(part, axis, axis_index_groups=groups, tiled=True)
    return whole[: flat.size]
