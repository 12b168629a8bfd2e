"""Runs a function once per replica: `jax.shard_map` with the state's policies around.

The mapped function gets the lifted slots as its policies say, split batches, and
everything else as it is. JAX's types for values that vary between replicas stay on, and
turn three silent mistakes into errors while tracing: mirrored state that differs
between replicas, a sum over replicas taken twice, and a gradient that was not summed at
all.
"""

from collections.abc import Callable
from itertools import compress
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from armillary.data._layout import Active
from armillary.distribute._global_arrays import is_array
from armillary.distribute.replica._collectives import ReplicaContext, is_argument
from armillary.distribute.replica._context import check_same_trace, entered
from armillary.distribute.replica._keras_losses import check_keras_losses
from armillary.distribute.replica._narrow import (
    check_scale,
    narrow_mesh,
    take_first_copy,
)
from armillary.distribute.replica._policy import (
    Policy,
    enter,
    leave,
    policies_of,
)
from armillary.distribute.replica._proof import require_equal
from armillary.distribute.replica._retype import AXIS_NAME, varies
from armillary.distribute.replica._values import PerReplica, is_per_replica
from armillary.distribute.replica._varying import corrected_types
from armillary.distribute.replica._writes import aggregated_writes
from armillary.errors import (
    BatchSizeError,
)
from armillary.state._lift import State, as_array
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy


def run_in_replicas(
    strategy: "Strategy",
    mesh: Mesh,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: State,
) -> PyTree:
    """Maps `fn` over the replicas of `mesh`, and updates `state` with what it leaves.

    Args:
        strategy: The strategy, for the context that `fn` runs in.
        mesh: A mesh with the axis `replica`.
        fn: The user's function.
        args: Its positional arguments. Arrays of `PerReplica` values are split, other
            arrays are the same on all replicas, anything else is passed as it is.
        kwargs: Its keyword arguments, likewise.
        state: Slots that `fn` may read and write.

    Returns:
        What `fn` returned, each array as a `PerReplica` if there are several replicas.

    Raises:
        ReplicaMismatchError: If a mirrored slot ends with per-replica values.
        BatchSizeError: If two arguments hold data for different numbers of replicas.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_argument)
    arrays = [leaf.array if is_per_replica(leaf) else leaf for leaf in leaves]
    is_split = [is_per_replica(leaf) and not leaf.is_shared for leaf in leaves]
    # What is equal on all replicas stays so when it comes back in.
    is_whole = [
        is_array(array) and not is_cut
        for array, is_cut in zip(arrays, is_split, strict=True)
    ]
    active, num_replicas = _find_active(leaves, strategy.num_replicas_in_sync)
    mesh = narrow_mesh(mesh, num_replicas)
    name = getattr(fn, "__name__", "the step")
    check_keras_losses()
    before = [as_array(leaf) for leaf in state.read()]
    policies = policies_of(state, before)
    changed: list[int] = []
    outputs: list[Any] = []

    def replica_fn(
        slots: list[Any], split: list[Any], whole: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        context = ReplicaContext(
            strategy, AXIS_NAME, active, num_replicas, any(is_split)
        )
        start = [enter(*pair) for pair in zip(policies, slots, strict=True)]
        rows, wholes = iter(split), iter(whole)
        call_args, call_kwargs = treedef.unflatten(
            next(rows)[0] if is_cut else next(wholes) if is_one else leaf
            for leaf, is_cut, is_one in zip(leaves, is_split, is_whole, strict=True)
        )
        with state.swapped(start), entered(strategy, context), corrected_types():
            with aggregated_writes(state, context):
                result = fn(*call_args, **call_kwargs)
            was_asked = context.was_asked
            after = state.collect(start, name)
        changed[:] = [
            i for i, (a, b) in enumerate(zip(start, after, strict=True)) if a is not b
        ]
        final = [
            leave(policies[i], slots[i], start[i], after[i], context) for i in changed
        ]
        names = [
            f"{state.paths[i]} ({state.owners[i].role.value}, {policies[i].value})"
            for i in changed
        ]
        final = require_equal(final, names, len(state.paths))
        values, result_tree = jax.tree.flatten(result)
        own = [is_array(value) and varies(value) for value in values]
        shared = [
            is_array(value) and not is_own
            for value, is_own in zip(values, own, strict=True)
        ]
        outputs[:] = [result_tree, values, own, shared]
        equal = list(map(jnp.asarray, compress(values, shared)))
        names = ["what the step returns"] * len(equal)
        equal = require_equal(equal, names, len(state.paths))
        if num_replicas < strategy.num_replicas_in_sync and not was_asked:
            is_mirrored = [policies[i] is Policy.MIRRORED for i in changed]
            check_scale(name, context, [*compress(final, is_mirrored), *equal])
        rows = [value[None] for value in compress(values, own)]
        return take_first_copy(mesh, (final, rows, equal))

    whole_spec, split_spec = PartitionSpec(), PartitionSpec(AXIS_NAME)
    mapped = jax.shard_map(
        replica_fn,
        mesh=mesh,
        in_specs=(whole_spec, split_spec, whole_spec),
        out_specs=(whole_spec, split_spec, whole_spec),
    )
    # Casting shared values to per-replica ones where they meet is what the checks read.
    with jax.auto_pcast(True):
        final, stacked, equal = mapped(
            before, list(compress(arrays, is_split)), list(compress(arrays, is_whole))
        )
    if changed:
        check_same_trace(name, [state.paths[i] for i in changed])
    after = list(before)
    for i, value in zip(changed, final, strict=True):
        after[i] = value
    state.write(after)
    result_tree, values, own, shared = outputs
    rows, wholes = iter(stacked), iter(equal)

    def wrap(value: Any, is_own: bool, is_shared: bool) -> Any:
        if not (is_own or is_shared):
            return value
        array = next(rows if is_own else wholes)
        if strategy.num_replicas_in_sync == 1:
            return array[0] if is_own else array
        return PerReplica(
            array, active, None if is_own else num_replicas, any(is_split)
        )

    return result_tree.unflatten(map(wrap, values, own, shared))


def _find_active(leaves: list[Any], num_replicas: int) -> tuple[Active, int]:
    """Returns which replicas hold data, and how many run the step.

    Raises:
        BatchSizeError: If that differs between the leaves.
    """
    counts = {
        (leaf.active_replicas, len(leaf.array))
        for leaf in leaves
        if is_per_replica(leaf) and not leaf.is_shared
    }
    if len(counts) > 1:
        shown = sorted((active for active, _ in counts), key=str)
        raise BatchSizeError(
            f"`args` of `strategy.run` hold data for {shown} replicas, but "
            "all arguments of one call must have data on the same replicas. Give the "
            "data sets the same number of examples, or set "
            '`InputOptions(remainder="drop")` on each.'
        )
    return counts.pop() if counts else (num_replicas, num_replicas)
