"""Runs a function once per replica, by `jax.shard_map` and the policies of the state.

With a single replica, the axis of replicas exists, too, with length 1. So a step that
names the axis is the same code under every strategy. The function's program is traced
and checked first, and then evaluated. An error for state that would differ names the
line that writes it.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

from armillary._jax_compat import get_mapped_axes
from armillary._jaxpr import (
    call_program,
    is_in_trace,
    named_axes,
    programs_in,
    source_line,
)
from armillary.data._layout import Active
from armillary.distribute._global_arrays import is_array, is_key, narrow_mesh
from armillary.distribute.replica._context import (
    Scope,
    is_in_inner_trace,
)
from armillary.distribute.replica._labels import (
    BATCH,
    EQUAL,
    Facts,
    Label,
    LabelKind,
)
from armillary.distribute.replica._policy import (
    Policy,
    VariableAggregation,
    enter,
    leave,
    policies_of,
)
from armillary.distribute.replica._proof import Proof
from armillary.distribute.replica._replica import ReplicaContext
from armillary.distribute.replica._values import (
    PerReplica,
    array_of,
    count_active,
    is_argument,
    is_per_replica,
    other_count,
)
from armillary.distribute.replica._warnings import Input, warn_of_step
from armillary.distribute.replica._writes import combined_writes
from armillary.errors import (
    BatchSizeError,
    ReplicaContextError,
    StateStructureError,
)
from armillary.state._holders import is_claimed
from armillary.state._lift import State, as_array
from armillary.state._slots import Role
from armillary.state._tree import pure_path_of
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy


class Call:
    """A call of a function that changes state, with its changes and its results."""

    def __init__(self, fn: Callable[..., PyTree], state: State) -> None:
        self._fn, self._state = fn, state
        self.name = getattr(fn, "__name__", "the step")
        self.before = [as_array(leaf) for leaf in state.read()]
        self.policies = [Policy.MIRRORED] * len(self.before)
        self.changed: list[int] = []
        self._values: list[Any] = []
        self._treedef: Any = None

    def run(
        self, context: ReplicaContext, slots: list[Any], args: Any, kwargs: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Calls the function.

        Returns:
            The changed arrays before the call and after it, and the arrays that the
            function returned.
        """
        state = self._state
        pairs = zip(self.policies, slots, strict=True)
        start = [enter(policy, slot, context) for policy, slot in pairs]
        with (
            state.swapped(start),
            Scope(context.strategy, context),
            combined_writes(state, context),
        ):
            result = self._fn(*args, **kwargs)
            # Objects that hold state are leaves, because they must not be copied.
            self._values, self._treedef = jax.tree.flatten(result, is_leaf=state.holds)
            after = state.collect(start, self.name)
        pairs = enumerate(zip(start, after, strict=True))
        self.changed = [i for i, (old, new) in pairs if old is not new]
        old, new = ([some[i] for i in self.changed] for some in (start, after))
        return old, new, list(map(jnp.asarray, filter(is_array, self._values)))

    def split(self, outputs: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """Divides the outputs of a traced `run` into its three results."""
        count = len(self.changed)
        return outputs[:count], outputs[count : 2 * count], outputs[2 * count :]

    def write(self, values: Sequence[Any]) -> None:
        if not self.changed:
            return
        if is_in_inner_trace():
            paths = [self._state.paths[i] for i in self.changed]
            shown = ", ".join(paths[:3]) + (" and more" if len(paths) > 3 else "")
            raise ReplicaContextError(
                f"`strategy.run` of `{self.name}` was called inside `jax.jit`, "
                "`nnx.jit` or another transformation of JAX, and changes state of the "
                f"step ({shown}). Call it without the transformation, because the step "
                "is compiled already. Or decorate its caller with "
                "`@armillary.function`."
            )
        after = self._state.read()
        for i, value in zip(self.changed, values, strict=True):
            after[i] = value
        self._state.write(after, set(self.changed))

    def returned(self, arrays: Iterable[Any]) -> PyTree:
        """Returns the result of the function, with `arrays` in place of its arrays."""
        rest = iter(arrays)
        return self._treedef.unflatten(
            next(rest) if is_array(value) else value for value in self._values
        )


def run_in_replicas(
    strategy: "Strategy",
    mesh: Mesh,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: State,
) -> PyTree:
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
        own = [array[0] if is_split else array for array, is_split in pairs]
        return take_first_copy(mesh, call.trace_and_prove(evaluate, slots, own))

    whole = PartitionSpec()
    split = PartitionSpec(strategy.axis_name)
    mapped = jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(whole, [split if own else whole for own in call.is_split]),
        out_specs=(whole, split, whole),
        # `_proof` finds the values that vary. JAX's own check would also sum gradients.
        check_vma=False,
    )
    final, own, equal = mapped(call.before, call.arrays)
    call.write(final)
    return call.returned(call.wrap(own, equal))


class _MappedCall(Call):
    """A call in several replicas, which share some of the arguments."""

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
        self._places = [i for i, x in enumerate(leaves) if is_array(array_of(x))]
        given = [leaves[i] for i in self._places]
        self.arrays = list(map(array_of, given))
        # A value that is equal on all replicas is not split when it is passed again.
        self.is_split = [is_per_replica(leaf) and not leaf.is_shared for leaf in given]
        batches = list(itertools.compress(given, self.is_split))
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
        _, is_same, self._is_equal = self.split(proof.is_equal)
        _, _, self._is_part = self.split(proof.is_divided)
        results = evaluate(program, [*slots, *arrays])
        start, after, values = self.split(results)
        policies = [self.policies[i] for i in self.changed]
        final = [
            leave(*row, self._context)
            for row in zip(policies, start, after, is_same, strict=True)
        ]
        is_own = [not is_equal for is_equal in self._is_equal]
        own = [value[None] for value in itertools.compress(values, is_own)]
        return final, own, list(itertools.compress(values, self._is_equal))

    def _prove(self, program: core.ClosedJaxpr) -> Proof:
        facts = [
            *self._facts_of_slots(),
            *(BATCH if is_split else EQUAL for is_split in self.is_split),
        ]
        num_all = self._strategy.num_replicas_in_sync
        counts = (self.num_replicas, count_active(self._context.active))
        proof = Proof(program, facts, counts, self._strategy.axis_name)
        is_narrow = self.num_replicas < num_all
        if is_narrow and proof.sums_gradients and not self._context.was_asked:
            raise BatchSizeError(
                f"`{self.name}` runs on {self.num_replicas} of {num_all} replicas, "
                "because more cannot share its batch equally. But it sums gradients of "
                "a loss that may be divided by another number of replicas. Take the "
                '"mean" of the gradients, or scale the loss with '
                "`armillary.compute_average_loss(losses)`."
            )
        mirrored = {
            place: i
            for place, i in enumerate(self.changed, start=len(self.changed))
            if self.policies[i] is Policy.MIRRORED
        }
        proof.require_equal(mirrored, self._state)
        warn_of_step(
            program,
            self._inputs(),
            self._strategy,
            self._context,
            self._state.place_of,
        )
        return proof

    def _inputs(self) -> list[Input]:
        """Returns for each input of the program whether it is a replica's own."""
        of_state = [
            Input(is_meant=kind.aggregation is VariableAggregation.NONE)
            for kind in self._state.kinds
        ]
        of_arguments = [Input(is_split=is_split) for is_split in self.is_split]
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
            for i, is_out in enumerate(slot.is_of_optimizer(), start=first):
                role, given = state.kinds[i]
                is_plain = role is Role.PLAIN and not given
                if self.before[i].dtype == jnp.uint32 and is_plain and not is_out:
                    pure_path = pure_path_of(slot, state.paths[i])
                    label = Label(LabelKind.RAW_KEY, state.place_of(i), pure_path)
                    facts[i] = Facts(labels=frozenset({label}))
        return facts


def take_first_copy(mesh: Mesh, values: PyTree) -> PyTree:
    """Returns the results of the first device of this replica, on all its devices.

    Several devices compute the same replica, and may round differently.
    """
    copies = mesh.axis_names[1:]

    def take(value: Any) -> Any:
        if is_key(value):
            return value
        is_first = jax.lax.axis_index(copies) == 0
        own = jnp.where(is_first, value, jnp.zeros_like(value))
        return jax.lax.psum(own, copies).astype(value.dtype)

    return jax.tree.map(take, values) if copies else values


def _find_active(
    batches: Sequence[PerReplica], strategy: "Strategy"
) -> tuple[Active, int]:
    num_replicas = strategy.num_replicas_in_sync
    for batch in batches:
        if num_replicas % len(batch.array):
            raise other_count(batch, strategy)
    counts = {(batch.active_replicas, len(batch.array)) for batch in batches}
    if len(counts) > 1:
        shown = sorted((active for active, _ in counts), key=str)
        raise BatchSizeError(
            f"`args` of `strategy.run` hold data for {shown} replicas, but all batches "
            "must have data on the same replicas. Give the data sets the same number "
            'of examples, or set `InputOptions(remainder="drop")` on each.'
        )
    return counts.pop() if counts else (num_replicas, num_replicas)


def _find_share_size(batches: Sequence[PerReplica]) -> int | None:
    """Returns the number of examples of each replica, if all arrays agree."""
    sizes = {batch.array.shape[1] for batch in batches if batch.array.ndim > 1}
    return sizes.pop() if len(sizes) == 1 else None


def run_alone(
    strategy: "Strategy",
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: State | None = None,
) -> PyTree:
    """Calls `fn` on a single replica.

    In a trace with `state`, its program becomes one operation. Otherwise, it runs in
    place.
    """
    context = ReplicaContext(strategy, None, active=1)
    if state is None or not is_in_trace():
        return _run_in_place(context, fn, args, kwargs)
    call = Call(fn, state)
    axis = strategy.axis_name
    program = jax.make_jaxpr(
        lambda slots: call.run(context, slots, args, kwargs), axis_env=[(axis, 1)]
    )(call.before)

    def evaluate(*_: Any) -> list[Any]:
        return call_program(program, call.before, call.name)

    if _names_axis(program, axis):
        rows = jax.vmap(evaluate, axis_name=axis)(jnp.zeros(1))
        outputs = [row[0] for row in rows]
    else:
        outputs = evaluate()
    _, after, values = call.split(outputs)
    call.write(after)
    return call.returned(values)


def _names_axis(program: core.ClosedJaxpr, axis: str) -> bool:
    """Returns whether a program needs the axis of replicas.

    Raises:
        ReplicaContextError: If the axis cannot exist, or its name has a second meaning.
    """
    named: list[Any] = []
    hiding: list[Any] = []
    pending: list[Any] = [program]
    while pending:
        current = pending.pop()
        for equation in getattr(current, "jaxpr", current).eqns:
            is_map = equation.primitive.name == "shard_map"
            if is_map and axis in get_mapped_axes(equation):
                # Inside, the name is an axis of the user's mesh.
                hiding.append(equation)
                continue
            if axis in named_axes(equation):
                named.append(equation)
            pending.extend(programs_in(equation))

    if named and hiding:
        raise ReplicaContextError(
            f"`shard_map` at {source_line(hiding[0])} is over an axis {axis!r} of its "
            f"mesh, but the axis of replicas has this name too, and the step uses it "
            f"at {source_line(named[0])}. Give the axis of the mesh another name, or "
            "the axis of replicas (`axis_name=...` of the strategy)."
        )
    for equation in named:
        name = equation.primitive.name
        if name.endswith("all_to_all"):  # Its result would have a different shape.
            raise ReplicaContextError(
                f"`{name}` at {source_line(equation)} exchanges parts of one "
                "replica, which JAX cannot do. Leave it out where "
                "`strategy.num_replicas_in_sync` is 1."
            )
    return bool(named)


def _bring_to(device: Any, state: State) -> None:
    """Moves arrays that are on other devices, such as on a mesh of the program."""
    leaves = state.read()
    elsewhere: set[int] = set()
    for i, leaf in enumerate(leaves):
        is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        if is_placed and leaf.committed and leaf.devices() != {device}:
            elsewhere.add(i)
            leaves[i] = jax.device_put(leaf, SingleDeviceSharding(device))
    if elsewhere:
        state.write(leaves, elsewhere)


def _run_in_place(
    context: ReplicaContext,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """Calls `fn` without a trace of its own, so values stay concrete or traced."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_argument)
    roots = [(root, "") for root in (fn, *filter(is_claimed, leaves))]
    state = State(roots)
    device = context.strategy.default_device
    if device is not None:
        _bring_to(device, state)
    result: list[Any] = []

    def run(_: Any) -> list[Any]:
        move()
        with Scope(context.strategy, context):
            result[:] = jax.tree.flatten(fn(*args, **kwargs), is_leaf=is_claimed)
        # Only values that depend on the number of the replica have the mapped axis.
        held = itertools.chain(result[0], *map(_read_slot, state.slots))
        return list(filter(_has_axis, held))

    with state.moved() as move:
        axis = context.strategy.axis_name
        outputs = iter(jax.vmap(run, axis_name=axis)(jnp.zeros(1)))

    def without_axis(leaf: Any) -> Any:
        return next(outputs)[0] if _has_axis(leaf) else leaf

    values = list(map(without_axis, result[0]))
    for slot in state.slots:
        held = _read_slot(slot)
        if any(map(_has_axis, held)):
            slot.write(list(map(without_axis, held)))
    if any(map(is_claimed, values)):  # objects that may be new
        State([*roots, (values, "")]).move_new(state)
    return result[1].unflatten(values)


def _read_slot(slot: Any) -> list[Any]:
    # Outside a step, a slot may have a new structure, and then has no arrays to read.
    try:
        return slot.read()
    except StateStructureError:
        return []


def _has_axis(leaf: Any) -> bool:
    return isinstance(leaf, Tracer) and hasattr(leaf, "batch_dim")
