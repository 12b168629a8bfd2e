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
import numpy as np
from jax.extend import core, source_info_util
from jax.sharding import Mesh, PartitionSpec

from armillary._jaxpr import walk_programs
from armillary._typing import PyTree
from armillary.data import Active
from armillary.distribute._collectives import (
    ReplicaContext,
    double_reduction_message,
    varies,
)
from armillary.distribute._context import entered
from armillary.distribute._loop_carries import cast_loop_carries
from armillary.distribute._narrow import check_scale, narrow_mesh, take_first_copy
from armillary.distribute._values import PerReplica, is_per_replica
from armillary.distribute._variables import (
    AXIS_NAME,
    ON_READ_SCOPE,
    Policy,
    enter,
    leave,
    policy_of,
)
from armillary.errors import (
    BatchSizeError,
    DoubleReductionError,
    ReplicaMismatchError,
)
from armillary.state import State, as_array, is_claimed

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy


_COLLECTIVES = ("psum", "pmin", "pmax", "all_gather", "all_to_all", "ppermute")


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
        What `fn` returned, each array as a `PerReplica`.

    Raises:
        ReplicaMismatchError: If a mirrored slot ends with per-replica values.
        BatchSizeError: If two arguments hold data for different numbers of replicas.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_argument)
    split = [leaf.stacked for leaf in leaves if is_per_replica(leaf)]
    shared = [leaf for leaf in leaves if _is_array(leaf)]
    active, num_replicas = _find_active(leaves, strategy.num_replicas_in_sync)
    mesh = narrow_mesh(mesh, num_replicas)
    before = [as_array(leaf) for leaf in state.read()]
    policies = [policy_of(*pair) for pair in zip(state.owners, before, strict=True)]
    changed: list[int] = []
    outputs: list[Any] = []
    name = getattr(fn, "__name__", "the step")

    def replica_fn(
        slots: list[Any], split: list[Any], shared: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        context = ReplicaContext(strategy, AXIS_NAME, active, num_replicas)
        start = [enter(*pair) for pair in zip(policies, slots, strict=True)]
        rows, arrays = iter(split), iter(shared)
        call_args, call_kwargs = treedef.unflatten(
            next(rows)[0]
            if is_per_replica(leaf)
            else next(arrays)
            if _is_array(leaf)
            else leaf
            for leaf in leaves
        )
        with state.swapped(start), entered(strategy, context), cast_loop_carries():
            result = fn(*call_args, **call_kwargs)
            was_asked = context.was_asked
            after = state.collect(start, name)
        changed[:] = [
            i for i, (a, b) in enumerate(zip(start, after, strict=True)) if a is not b
        ]
        final = [
            leave(policies[i], slots[i], start[i], after[i], context) for i in changed
        ]
        differing = [
            i for i, value in zip(changed, final, strict=True) if value is None
        ]
        if differing:
            raise ReplicaMismatchError(_mismatch_message(state, policies, differing))
        values, result_tree = jax.tree.flatten(result)
        is_array = [_is_array(value) for value in values]
        is_shared = [
            array and not varies(value, AXIS_NAME)
            for value, array in zip(values, is_array, strict=True)
        ]
        outputs[:] = [result_tree, values, is_array, is_shared]
        if num_replicas < strategy.num_replicas_in_sync and not was_asked:
            mirrored = [
                value
                for i, value in zip(changed, final, strict=True)
                if policies[i] is Policy.MIRRORED
            ]
            check_scale(name, context, mirrored + list(compress(values, is_shared)))
        arrays = [jax.numpy.asarray(value) for value in compress(values, is_array)]
        final, arrays = take_first_copy(mesh, (final, arrays))
        return final, [array[None] for array in arrays]

    mapped = jax.shard_map(
        replica_fn,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(AXIS_NAME), PartitionSpec()),
        out_specs=(PartitionSpec(), PartitionSpec(AXIS_NAME)),
    )
    # Casting shared values to per-replica ones where they meet is what the checks read.
    with jax.auto_pcast(True):
        final, stacked = mapped(before, split, shared)
    after = list(before)
    for i, value in zip(changed, final, strict=True):
        after[i] = value
    state.write(after)
    result_tree, values, is_array, is_shared = outputs
    rows = iter(stacked)
    return result_tree.unflatten(
        PerReplica(next(rows), active, shared) if array else value
        for value, array, shared in zip(values, is_array, is_shared, strict=True)
    )


def check_reduced_once(program: core.ClosedJaxpr) -> None:
    """Raises if a program sums over replicas what is equal on all of them.

    Such a sum shows as a cast to "varying" whose only purpose is the sum. Casts that
    JAX makes while differentiating, and those of on-read state, are meant.

    Raises:
        DoubleReductionError: At the first such sum, with the line of the user's code.
    """
    for jaxpr, _ in walk_programs(program):
        casts: set[Any] = set()
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name == "pvary":
                casts.update(equation.outvars)
            elif name.startswith("psum") and not _is_meant(equation):
                operands = [
                    v for v in equation.invars if not isinstance(v, core.Literal)
                ]
                if not casts.isdisjoint(operands):
                    where = source_info_util.summarize(equation.source_info)
                    raise DoubleReductionError(
                        double_reduction_message("psum", f", at {where}")
                    )


def check_branches_agree(program: core.ClosedJaxpr) -> None:
    """Raises if replicas may take different ways to a collective.

    Some would wait in it for the others, for ever, or until XLA ends the process.

    Raises:
        ReplicaMismatchError: At the first such branch or loop, with its line.
    """
    for jaxpr, _ in walk_programs(program):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "cond":
                decides, bodies = equation.invars[0].aval, equation.params["branches"]
            elif equation.primitive.name == "while":
                decides = equation.params["cond_jaxpr"].out_avals[0]
                bodies = (equation.params["body_jaxpr"],)
            else:
                continue
            axes = getattr(decides, "manual_axis_type", None)
            if axes is None or AXIS_NAME not in axes.varying:
                continue
            if any(_has_collective(body) for body in bodies):
                where = source_info_util.summarize(equation.source_info)
                raise ReplicaMismatchError(
                    f"`{equation.primitive.name}` at {where} is decided by a value "
                    "that differs between replicas, and reduces over replicas inside "
                    "(gradients with respect to mirrored parameters do), so that some "
                    "replicas would wait there for ever. Reduce the value that decides "
                    "first (`get_replica_context().all_reduce`), compute gradients "
                    "outside, or choose with `jnp.where`."
                )


def _has_collective(program: core.ClosedJaxpr) -> bool:
    return any(
        equation.primitive.name.startswith(_COLLECTIVES)
        for jaxpr, _ in walk_programs(program)
        for equation in jaxpr.eqns
    )


def _is_meant(equation: Any) -> bool:
    stack = str(equation.source_info.name_stack)
    return ON_READ_SCOPE in stack or "transpose" in stack


def _is_argument(value: Any) -> bool:
    # NNX objects are pytrees too, but a copy of one would lose what `fn` writes.
    return is_per_replica(value) or is_claimed(value)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _find_active(leaves: list[Any], num_replicas: int) -> tuple[Active, int]:
    """Returns which replicas hold data, and how many run the step.

    Raises:
        BatchSizeError: If that differs between the leaves.
    """
    counts = {
        (leaf.active_replicas, len(leaf.stacked))
        for leaf in leaves
        if is_per_replica(leaf)
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


def _mismatch_message(state: State, policies: list[Policy], bad: list[int]) -> str:
    lines = "\n".join(
        f"  {state.paths[i]} ({state.owners[i].role.value}, {policies[i].value})"
        for i in bad
    )
    return (
        f"{len(bad)} of {len(state.paths)} slots are mirrored, so they must be equal "
        "on all replicas, but `strategy.run` left values in them that differ:\n"
        f"{lines}\n"
        "They were computed from one replica's share of the batch. Reduce first "
        "(`armillary.get_replica_context().all_reduce(ReduceOp.MEAN, value)`), or make "
        "the variable with `aggregation=armillary.VariableAggregation.MEAN`, `SUM` or "
        "`ONLY_FIRST_REPLICA`."
    )
