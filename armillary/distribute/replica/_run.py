"""Runs a function once per replica, by `jax.shard_map` and the policies of the state.

The function's program is traced and checked first, and then evaluated. An error for
state that would differ names the line that writes it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from armillary._jaxpr import (
    call_program,
    is_in_trace,
)
from armillary.data._layout import Active, describe_active, first_replicas
from armillary.distribute._global_arrays import is_array_or_number, is_key, narrow_mesh
from armillary.distribute.analysis._labels import (
    BATCH,
    EQUAL,
    Facts,
    Label,
    LabelKind,
)
from armillary.distribute.analysis._proof import Proof
from armillary.distribute.replica._call import Call
from armillary.distribute.replica._policy import (
    Policy,
    VariableAggregation,
    leave_step,
    policies_of,
)
from armillary.distribute.replica._replica import ReplicaContext
from armillary.distribute.replica._values import (
    PerReplica,
    array_of,
    is_argument,
    is_per_replica,
    other_count,
)
from armillary.distribute.replica._warnings import ProgramInput, warn_of_step
from armillary.errors import (
    BatchSizeError,
)
from armillary.state._lift import State
from armillary.state._slots import Role
from armillary.state._tree import pure_path_of
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
    """Runs a function once per replica, by a `shard_map` over the mesh.

    If several devices are one replica, their results may round differently, so the
    result of the first device counts.
    """
    call = _MappedCall(strategy, fn, args, kwargs, state)
    mesh = narrow_mesh(mesh, call.num_replicas)
    is_traced = is_in_trace()

    def evaluate(program: core.ClosedJaxpr, inputs: list[Any]) -> list[Any]:
        if is_traced:
            return call_program(program, inputs, call.name)
        # An eager step runs operation by operation.
        return core.jaxpr_as_fun(program)(*inputs)

    def replica(slots: list[Any], arrays: list[Any]) -> Any:
        pairs = zip(arrays, call.is_split, strict=True)
        # The first axis of the part that a replica gets has length 1.
        own = [array[0] if is_split else array for array, is_split in pairs]
        results = call.trace_and_prove(evaluate, slots, own)
        return take_first_copy(mesh, results)

    whole = PartitionSpec()
    split = PartitionSpec(strategy.axis_name)
    argument_specs = [split if is_split else whole for is_split in call.is_split]
    mapped = jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(whole, argument_specs),
        # The new state, the results of each replica, and the results that are equal.
        out_specs=(whole, split, whole),
        # `_proof` finds the values that vary. JAX's own check would also sum gradients.
        check_vma=False,
    )
    final, own, equal = mapped(call.before, call.arrays)
    call.write(final)
    values = call.wrap(own, equal)
    return call.returned(values)


class _MappedCall(Call):
    """A call in several replicas, which share some of the arguments.

    Attributes:
        arrays: The arrays among the arguments.
        is_split: For each array, whether each replica gets a part of its own.
        num_replicas: The number of replicas that run the function.
    """

    def __init__(
        self,
        strategy: "Strategy",
        fn: Callable[..., PyTree],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: State,
    ) -> None:
        super().__init__(fn, state)
        self.policies = policies_of(state, self.before)
        self._strategy = strategy
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_argument)
        self._leaves = leaves
        self._structure = structure
        # The places of the arrays among the arguments.
        self._places: list[int] = []
        self.arrays: list[Any] = []
        self.is_split: list[bool] = []
        batches: list[PerReplica] = []
        for place, leaf in enumerate(leaves):
            array = array_of(leaf)
            if not is_array_or_number(array):
                continue
            # A value that is equal on all replicas is not split when it is passed
            # again.
            is_split = is_per_replica(leaf) and not leaf.is_shared
            self._places.append(place)
            self.arrays.append(array)
            self.is_split.append(is_split)
            if is_split:
                batches.append(leaf)

        active, self.num_replicas = _find_active(batches, strategy)
        self._context = ReplicaContext(
            strategy,
            strategy.axis_name,
            active,
            self.num_replicas,
            _find_share_size(batches),
        )
        # For each returned array, whether it is equal on all replicas, and whether it
        # is a part that was divided for a sum over replicas.
        self._is_equal: Sequence[bool] = ()
        self._is_part: Sequence[bool] = ()

    def trace_and_prove(
        self, evaluate: Callable[..., list[Any]], slots: list[Any], arrays: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Traces the function, proves that it is correct, and evaluates it."""

        def run(slots: list[Any], arrays: list[Any]) -> Any:
            leaves = list(self._leaves)
            for place, array in zip(self._places, arrays, strict=True):
                leaves[place] = array
            return self.run(self._context, slots, *self._structure.unflatten(leaves))

        # JAX reuses a trace of a user's `jit` if the axes have the same names. This
        # extra axis gives each set of active replicas a trace of its own.
        active = f"data on {self._context.active} of {self.num_replicas}"
        program = jax.make_jaxpr(run, axis_env=[(active, 1)])(slots, arrays)
        proof = self._prove(program)
        _, is_same, self._is_equal = self.split_outputs(proof.is_equal)
        _, _, self._is_part = self.split_outputs(proof.is_divided)

        results = evaluate(program, [*slots, *arrays])
        start, after, values = self.split_outputs(results)
        policies = [self.policies[i] for i in self.changed]
        final: list[Any] = []
        for row in zip(policies, start, after, is_same, strict=True):
            final.append(leave_step(*row, self._context))

        # A result of its own has an axis of replicas, with this replica's row.
        own: list[Any] = []
        equal: list[Any] = []
        for value, is_equal in zip(values, self._is_equal, strict=True):
            if is_equal:
                equal.append(value)
            else:
                own.append(value[None])
        return final, own, equal

    def _prove(self, program: core.ClosedJaxpr) -> Proof:
        """Returns the proof of the function's program.

        Raises:
            BatchSizeError: If fewer replicas than usual sum gradients, and the loss may
                be divided by the usual number.
            ReplicaMismatchError: If mirrored state may differ between replicas.
        """
        facts = self._facts_of_slots()
        facts += [BATCH if is_split else EQUAL for is_split in self.is_split]
        counts = (self.num_replicas, len(self._context.active))
        proof = Proof(program, facts, counts, self._strategy.axis_name)

        num_all = self._strategy.num_replicas_in_sync
        is_narrow = self.num_replicas < num_all
        if is_narrow and proof.sums_gradients and not self._context.was_asked:
            raise BatchSizeError(
                f"`{self.name}` runs on {self.num_replicas} of {num_all} replicas, "
                "because more cannot share its batch equally. But it sums gradients of "
                "a loss that may be divided by another number of replicas. Take the "
                '"mean" of the gradients, or scale the loss with '
                "`armillary.compute_average_loss(losses)`."
            )

        mirrored: dict[int, int] = {}
        kept: dict[int, tuple[int, bool]] = {}
        # The new values come after the values before the call.
        for result, index in enumerate(self.changed, start=len(self.changed)):
            policy = self.policies[index]
            if policy is Policy.MIRRORED:
                mirrored[result] = index
            if policy in (Policy.MIRRORED, Policy.MEAN):
                kept[result] = index, policy is Policy.MEAN
        proof.require_equal(mirrored, self._state)
        warn_of_step(
            program,
            self._inputs(),
            self._strategy,
            self._context,
            self._state.display_name,
            kept,
        )
        return proof

    def _inputs(self) -> list[ProgramInput]:
        """Returns for each input of the program whether it is a replica's own."""
        of_state = [
            ProgramInput(is_meant=kind.aggregation is VariableAggregation.NONE)
            for kind in self._state.kinds
        ]
        of_arguments = [ProgramInput(is_split=is_split) for is_split in self.is_split]
        return [*of_state, *of_arguments]

    def wrap(self, own: Iterable[Any], equal: Iterable[Any]) -> Iterable[Any]:
        """Yields the returned arrays in the form that users get."""
        rows = iter(own)
        wholes = iter(equal)
        is_alone = self._strategy.num_replicas_in_sync == 1
        for is_equal, is_part in zip(self._is_equal, self._is_part, strict=True):
            array = next(wholes if is_equal else rows)
            if is_alone:
                yield array if is_equal else array[0]
            else:
                shared_by = self.num_replicas if is_equal else None
                is_shared_part = is_equal and is_part
                yield PerReplica(array, self._context.active, shared_by, is_shared_part)

    def _facts_of_slots(self) -> list[Facts]:
        """Returns facts with a label for arrays that may be raw random keys."""
        facts = [EQUAL] * len(self.before)
        state = self._state
        for slot, first, _ in state.ranges:
            for i, is_of_optimizer in enumerate(slot.is_of_optimizer(), start=first):
                kind = state.kinds[i]
                is_plain = kind.role is Role.PLAIN and not kind.aggregation
                may_be_key = is_plain and self.before[i].dtype == jnp.uint32
                if not may_be_key or is_of_optimizer:
                    continue
                name = state.display_name(i)
                pure_path = pure_path_of(slot, state.paths[i])
                label = Label(LabelKind.RAW_KEY, name, pure_path)
                facts[i] = Facts(labels=frozenset({label}))
        return facts


def take_first_copy(mesh: Mesh, values: PyTree) -> PyTree:
    """Returns the results of the first device of this replica, on all its devices.

    Several devices compute the same replica, and may round differently.
    """
    copies = mesh.axis_names[1:]
    if not copies:
        return values

    def take(value: Any) -> Any:
        if is_key(value):
            return value
        # A sum to which all other devices of the replica add zeros.
        is_first = jax.lax.axis_index(copies) == 0
        own = jnp.where(is_first, value, jnp.zeros_like(value))
        return jax.lax.psum(own, copies).astype(value.dtype)

    return jax.tree.map(take, values)


def _find_active(
    batches: Sequence[PerReplica], strategy: "Strategy"
) -> tuple[Active, int]:
    """Returns the replicas with data, and the number of replicas that run."""
    num_replicas = strategy.num_replicas_in_sync
    counts: set[tuple[Active, int]] = set()
    for batch in batches:
        num_rows = len(batch.array)
        # An uneven batch may be on fewer replicas, but these use all devices.
        if num_replicas % num_rows:
            raise other_count(batch, strategy)
        counts.add((batch.active_replicas, num_rows))

    if not counts:
        return first_replicas(num_replicas), num_replicas
    if len(counts) > 1:
        shown = " and ".join(sorted(describe_active(active) for active, _ in counts))
        raise BatchSizeError(
            f"`args` of `strategy.run` hold data for {shown} replicas, but all batches "
            "must have data on the same replicas. Give the datasets the same number "
            'of examples, or set `InputOptions(remainder="drop")` on each.'
        )
    return counts.pop()


def _find_share_size(batches: Sequence[PerReplica]) -> int | None:
    """Returns the number of examples of each replica, if all arrays agree."""
    sizes = {batch.array.shape[1] for batch in batches if batch.array.ndim > 1}
    return sizes.pop() if len(sizes) == 1 else None
