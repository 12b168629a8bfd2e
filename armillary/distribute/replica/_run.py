"""Runs a function once per replica: `jax.shard_map` with the state's policies around.

The function gets the lifted slots as their policies say, split batches, and everything
else as it is. All that it computes is the replica's own, and nothing is reduced that it
does not reduce. So its program is traced, looked at, and then bound as one call: state
that would differ between replicas is refused where it is written. An eager step stays
concrete, and what it leaves is compared.

Steps on fewer replicas than devices, for a batch that not all can share equally.

A batch of 42 examples on 4 devices is one step of 2 replicas, with 21 examples each.
The mesh gets a second axis, of devices that do the same work::

    device              0        1        2        3
    replica, copy       0, 0     0, 1     1, 0     1, 1

Everything over the axis `replica` (gradients, reductions, numbers of replicas) is then
what it is with 2 replicas, and nothing needs to be masked.
"""

import operator
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from armillary._checks import list_lines
from armillary._jaxpr import call_program, is_in_trace
from armillary.data._layout import Active
from armillary.distribute._global_arrays import is_array
from armillary.distribute.replica._collectives import ReplicaContext, is_argument
from armillary.distribute.replica._context import entered, write_changed
from armillary.distribute.replica._differences import BATCH, EQUAL, Facts, Kind, Label
from armillary.distribute.replica._policy import (
    Policy,
    aggregated_writes,
    enter,
    leave,
    policies_of,
)
from armillary.distribute.replica._proof import Proof
from armillary.distribute.replica._values import (
    AXIS_NAME,
    PerReplica,
    count_active,
    is_per_replica,
    other_count,
)
from armillary.errors import BatchSizeError, ReplicaMismatchError
from armillary.state._lift import State, as_array
from armillary.state._slots import Role
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy


_COPY_AXIS = "copy"


def narrow_mesh(mesh: Mesh, num_replicas: int | None) -> Mesh:
    """Returns the mesh on whose devices so many replicas run; `None` for all."""
    if num_replicas in (None, mesh.shape[AXIS_NAME]):
        return mesh
    devices = mesh.devices.reshape(num_replicas, -1)
    return Mesh(devices, (AXIS_NAME, _COPY_AXIS), axis_types=(AxisType.Auto,) * 2)


def take_first_copy(mesh: Mesh, values: PyTree) -> PyTree:
    """Returns what the first copy of this replica has computed.

    Devices may round differently where they do the same work, such as where a GPU adds
    in the order of arrival. What they keep must not differ.
    """
    if _COPY_AXIS not in mesh.shape:
        return values

    def take(value: Any) -> Any:
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        is_first = jax.lax.axis_index(_COPY_AXIS) == 0
        zero = jnp.zeros_like(value)
        total = jax.lax.psum(jnp.where(is_first, value, zero), _COPY_AXIS)
        return total.astype(value.dtype)

    return jax.tree.map(take, values)


def scale_message(name: str, context: "ReplicaContext") -> str:
    """Returns the message for a sum of gradients that may have another scale here."""
    return (
        f"`{name}` runs on {context.num_replicas_in_sync} of "
        f"{context.strategy.num_replicas_in_sync} replicas, since more cannot share "
        "its batch equally, and it sums gradients without asking how many there are. A "
        "loss that is divided by a number from elsewhere may have a gradient of "
        'another size in this step. Take the "mean" of the gradients, scale the loss '
        "with `armillary.compute_average_loss(losses)`, or read "
        "`strategy.num_replicas_in_sync` inside the function given to `strategy.run`."
    )


def run_in_replicas(
    strategy: "Strategy",
    mesh: Mesh,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: State,
) -> PyTree:
    """Maps `fn` over the replicas of `mesh`, and updates `state`."""
    call = _Call(strategy, fn, args, kwargs, state)
    mesh = narrow_mesh(mesh, call.num_replicas)
    is_traced = is_in_trace()
    body = call.trace_and_prove if is_traced else call.run_and_compare

    def replica(slots: list[Any], rows: list[Any], wholes: list[Any]) -> Any:
        return take_first_copy(mesh, body(slots, [row[0] for row in rows], wholes))

    whole, split = PartitionSpec(), PartitionSpec(AXIS_NAME)
    mapped = jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(whole, split, whole),
        out_specs=(whole, split, whole),
        # What varies is proved, or compared. JAX's types would also sum gradients.
        check_vma=False,
    )
    final, own, equal = mapped(call.before, call.rows, call.wholes)
    if not is_traced:
        call.check_compared(equal.pop())
    call.write(final)
    return call.wrap(own, equal)


class _Call:
    """One call of `Strategy.run`.

    Attributes:
        num_replicas: How many run it.
        before: The arrays of the state.
        rows: The arguments that are split between replicas.
        wholes: The arguments that are equal on all replicas.
    """

    def __init__(
        self,
        strategy: "Strategy",
        fn: Callable[..., PyTree],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: State,
    ) -> None:
        self._strategy, self._fn, self._state = strategy, fn, state
        self._name = getattr(fn, "__name__", "the step")
        self._leaves, self._treedef = jax.tree.flatten(
            (args, kwargs), is_leaf=is_argument
        )
        arrays = [leaf.array if is_per_replica(leaf) else leaf for leaf in self._leaves]
        self._is_split = [
            is_per_replica(leaf) and not leaf.is_shared for leaf in self._leaves
        ]
        # What is equal on all replicas stays so when it comes back in.
        self._is_whole = [
            is_array(array) and not is_split
            for array, is_split in zip(arrays, self._is_split, strict=True)
        ]
        self.rows = list(compress(arrays, self._is_split))
        self.wholes = list(compress(arrays, self._is_whole))
        self._active, self.num_replicas = _find_active(self._leaves, strategy)
        self.before = [as_array(leaf) for leaf in state.read()]
        self._policies = policies_of(state, self.before)
        self._changed: list[int] = []
        # What the function returned, with its arrays, and which of these are equal.
        self._result: tuple[list[Any], Any] = ([], None)
        self._is_equal: list[bool] = []

    def trace_and_prove(
        self, slots: list[Any], rows: list[Any], wholes: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Binds the function as one call, when its program is proved to be right."""
        context = self._make_context()

        def run(*inputs: list[Any]) -> list[Any]:
            start, after, values = self._run(context, *inputs)
            return [*start, *after, *values]

        inputs = (slots, rows, wholes)
        # JAX uses a trace of a user's `jit` again where axes are the same: which
        # replicas hold data must tell them apart.
        active = f"data on {self._active} of {self.num_replicas}"
        program = jax.make_jaxpr(run, axis_env=[(active, 1)])(*inputs)
        facts = [*self._facts_of_slots(), *[BATCH] * len(rows), *[EQUAL] * len(wholes)]
        counts = (self.num_replicas, count_active(self._active))
        is_narrow = self.num_replicas < self._strategy.num_replicas_in_sync
        proof = Proof(program, facts, counts, with_gradients=is_narrow)
        if proof.sums_gradients and not context.was_asked:
            raise BatchSizeError(scale_message(self._name, context))
        count = len(self._changed)
        proof.require_equal(self._mirrored_names(first=count), len(self._state.paths))
        results = call_program(program, jax.tree.leaves(inputs), self._name)
        final = self._leave(
            context, results[:count], results[count:], proof.is_equal[count:]
        )
        values, is_equal = results[2 * count :], proof.is_equal[2 * count :]
        self._is_equal = is_equal
        equal = list(compress(values, is_equal))
        own = compress(values, map(operator.not_, is_equal))
        return final, [value[None] for value in own], equal

    def run_and_compare(
        self, slots: list[Any], rows: list[Any], wholes: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Runs the function operation by operation; returns last what differs."""
        context = self._make_context()
        start, after, values = self._run(context, slots, rows, wholes)
        final = self._leave(context, start, after, [False] * len(after))
        differs = []
        for place, i in enumerate(self._changed):
            if self._policies[i] is Policy.MIRRORED:
                final[place], is_other = _compare(final[place])
                differs.append(is_other)
        self._is_equal = [False] * len(values)
        return final, [value[None] for value in values], [jnp.array(differs, bool)]

    def check_compared(self, differs: jax.Array) -> None:
        """Raises if mirrored state differs between replicas."""
        names = self._mirrored_names().values()
        wrong = list(compress(names, differs.tolist()))
        if wrong:
            raise ReplicaMismatchError(
                f"{len(wrong)} of {len(self._state.paths)} slots are mirrored, so they "
                "must be equal on all replicas, but `strategy.run` left values in them "
                "that differ:\n"
                f"{list_lines(wrong, most=10)}\n"
                'Reduce first (`armillary.all_reduce("mean", gradients)`). '
                "A compiled step (`compile_step=True`) names the line."
            )

    def write(self, final: Sequence[Any]) -> None:
        """Puts what the function left into the state."""
        write_changed(self._state, self._name, self._changed, final)

    def wrap(self, own: Sequence[Any], equal: Sequence[Any]) -> PyTree:
        """Returns what the function returned, with these arrays."""
        values, treedef = self._result
        rows, wholes, is_equal = iter(own), iter(equal), iter(self._is_equal)
        is_alone = self._strategy.num_replicas_in_sync == 1

        def wrap_one(value: Any) -> Any:
            if not is_array(value):
                return value
            is_shared = next(is_equal)
            array = next(wholes if is_shared else rows)
            if is_alone:
                return array if is_shared else array[0]
            return PerReplica(
                array, self._active, self.num_replicas if is_shared else None
            )

        return treedef.unflatten(map(wrap_one, values))

    def _make_context(self) -> ReplicaContext:
        return ReplicaContext(
            self._strategy, AXIS_NAME, self._active, self.num_replicas
        )

    def _run(
        self,
        context: ReplicaContext,
        slots: list[Any],
        rows: list[Any],
        wholes: list[Any],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Calls the function; returns what changed, before and after, and arrays."""
        state = self._state
        start = [enter(*pair) for pair in zip(self._policies, slots, strict=True)]
        own, whole = iter(rows), iter(wholes)
        args, kwargs = self._treedef.unflatten(
            next(own) if is_split else next(whole) if is_whole else leaf
            for leaf, is_split, is_whole in zip(
                self._leaves, self._is_split, self._is_whole, strict=True
            )
        )
        with state.swapped(start), entered(self._strategy, context):
            with aggregated_writes(state, context):
                result = self._fn(*args, **kwargs)
            after = state.collect(start, self._name)
        pairs = enumerate(zip(start, after, strict=True))
        self._changed = [i for i, (old, new) in pairs if old is not new]
        self._result = values, _ = jax.tree.flatten(result)
        old, new = ([some[i] for i in self._changed] for some in (start, after))
        return old, new, list(map(jnp.asarray, filter(is_array, values)))

    def _leave(
        self,
        context: ReplicaContext,
        start: Sequence[Any],
        after: Sequence[Any],
        is_equal: Sequence[bool],
    ) -> list[Any]:
        rows = zip(self._changed, start, after, is_equal, strict=False)
        return [
            leave(self._policies[i], old, new, context, is_equal=is_same)
            for i, old, new, is_same in rows
        ]

    def _facts_of_slots(self) -> list[Facts]:
        """Returns that arrays which may be keys of `jax.random.PRNGKey` are such."""
        facts = [EQUAL] * len(self.before)
        for slot, first, stop in self._state.ranges:
            if slot.role is not Role.PLAIN or slot.annotations.get("aggregation"):
                continue
            for i, is_of_optimizer in zip(
                range(first, stop), slot.is_of_optimizer(), strict=True
            ):
                if self.before[i].dtype == jnp.uint32 and not is_of_optimizer:
                    label = Label(Kind.RAW_KEY, self._state.paths[i])
                    facts[i] = Facts(labels=frozenset({label}))
        return facts

    def _mirrored_names(self, first: int = 0) -> dict[int, str]:
        """Returns what mirrored state that changed is called, by its place."""
        state = self._state
        return {
            place: f"{state.paths[i]} ({state.owners[i].role.value}, mirrored)"
            for place, i in enumerate(self._changed, first)
            if self._policies[i] is Policy.MIRRORED
        }


def _compare(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first replica's value, and whether another one has another."""
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(value) if is_key else value
    first, *others = jax.lax.all_gather(data, AXIS_NAME)
    # NaN is equal to NaN here.
    differs = [jnp.any((first != x) & ~((x != x) & (first != first))) for x in others]
    if is_key:
        first = jax.random.wrap_key_data(first, impl=jax.random.key_impl(value))
    return first, jnp.any(jnp.array(differs, bool))


def _find_active(leaves: list[Any], strategy: "Strategy") -> tuple[Active, int]:
    """Returns which replicas hold data, and how many run the step."""
    num_replicas = strategy.num_replicas_in_sync
    for leaf in filter(is_per_replica, leaves):
        if not leaf.is_shared and num_replicas % len(leaf.array):
            raise other_count(leaf, strategy)
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
