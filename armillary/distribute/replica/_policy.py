"""Policies: how a slot enters and leaves a step that runs on several replicas.

Every slot has a policy. It follows from the role of the slot, or from the enums of
`tf.distribute` that the user set on the variable::

    nnx.Variable(jnp.zeros(()), aggregation=VariableAggregation.SUM)

    policy          entering `run`                      leaving `run`
    mirrored        the same value on all replicas      must be equal on all replicas
    sum             first replica: value, others: 0     summed over replicas
    mean            the same value on all replicas      averaged over replicas
    first replica   the same value on all replicas      the first replica's value
    random          first replica: the stored key,      the first replica's key
                    others: their number folded in

With `VariableSynchronization.ON_WRITE`, the values are combined at each write instead
(`_writes`), and the slot is mirrored.
"""

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import check_not_negative_int
from armillary.distribute._global_arrays import on_data
from armillary.distribute.replica._replica import ReplicaContext
from armillary.state._lift import State
from armillary.state._slots import LeafKind, Role, Slot

if TYPE_CHECKING:
    from flax import nnx


class VariableSynchronization(enum.Enum):
    """The time when copies of a variable become one (`tf.VariableSynchronization`).

    `ON_READ` lets copies differ until `run` ends, and combines them then. It needs an
    aggregation. `ON_WRITE` combines the replicas' values at each write, so copies are
    equal at every read; without an aggregation, the step must write equal values.
    `AUTO`, the default, is `ON_READ` with an aggregation and `ON_WRITE` without one.
    `NONE` is refused, because a variable under a strategy needs one value.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """The way to combine copies of a variable (`tf.VariableAggregation`)."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class Policy(enum.Enum):
    """The row of the table above that applies to a slot."""

    MIRRORED = NONE = "mirrored"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "first replica"
    RANDOM = "random"


_BY_ROLE = {
    Role.METRIC: VariableAggregation.SUM,
    Role.BATCH_STATISTIC: VariableAggregation.MEAN,
    Role.FIRST_REPLICA: VariableAggregation.ONLY_FIRST_REPLICA,
}
# Folded into the key of every replica except the first, before the replica's number.
# A step may fold small numbers into its key, as NNX does, or split it. The result must
# not be the key of another replica.
_OTHER_REPLICAS = np.uint32(0xA5B111A2)


def create_global_step(initial_value: int = 0) -> "nnx.Variable":
    """Returns a counter of training steps, for a loop that has no other.

    It is an integer variable with `VariableAggregation.ONLY_FIRST_REPLICA`: adding 1 to
    it inside `strategy.run` adds 1, for any number of replicas. It replaces
    `orbit.utils.create_global_step`.

    Args:
        initial_value: The first value.
    """
    from flax import nnx

    dtype = jnp.result_type(int)
    most = int(jnp.iinfo(dtype).max)
    initial_value = check_not_negative_int("initial_value", initial_value, most)
    return nnx.Variable(
        jnp.asarray(initial_value, dtype=dtype),
        aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
    )


def policies_of(state: State, leaves: Sequence[jax.Array]) -> list[Policy]:
    """Returns the policy of each array of a state."""
    check_annotations(state)
    policies: list[Policy] = []
    for slot, start, stop in state.ranges:
        indices = range(start, stop)
        for i, is_of_optimizer in zip(indices, slot.is_of_optimizer(), strict=True):
            policy = _policy_of(slot, state.kinds[i], leaves[i], is_of_optimizer)
            policies.append(policy)
    return policies


def check_annotations(state: State) -> None:
    """Raises if the enums on a variable are wrong, or do not go together."""
    for slot, start, stop in state.ranges:
        given = [leaf_kind.aggregation for leaf_kind in state.kinds[start:stop]]
        _check_annotation(slot, "aggregation", VariableAggregation, given)
        when = slot.annotations.get("synchronization")
        _check_annotation(slot, "synchronization", VariableSynchronization, [when])
        _check_synchronization(slot)


def _check_annotation(
    slot: Slot,
    name: str,
    kind: type[enum.Enum],
    values: Sequence[object],
) -> None:
    """Raises if one of some values is not a member of an enum."""
    for value in values:
        if value is not None and not isinstance(value, kind):
            raise ValueError(
                f"`{name}` of {slot.path} is {value!r}, but it must be a member of "
                f"`armillary.distribute.{kind.__name__}`. Set it where the variable is "
                "made."
            )


def _check_synchronization(slot: Slot) -> None:
    """Raises if a variable's synchronization and aggregation do not go together."""
    when = slot.annotations.get("synchronization")
    if when is VariableSynchronization.NONE:
        raise ValueError(
            f"`synchronization` of {slot.path} is NONE, but the values that replicas "
            "write to a variable must become one value. Use "
            "`VariableSynchronization.ON_READ` with an `aggregation`, use `ON_WRITE`, "
            "or leave it out."
        )
    kind = LeafKind(slot.role, slot.annotations.get("aggregation"))
    has_none = _aggregation_of(kind) is VariableAggregation.NONE
    is_random = slot.role is Role.RANDOM_KEY
    if when is VariableSynchronization.ON_READ and has_none and not is_random:
        raise ValueError(
            f"`synchronization` of {slot.path} is ON_READ and its `aggregation` is "
            "NONE, which leaves no single value to read outside `run`. Add "
            "`aggregation=VariableAggregation.SUM`, `MEAN` or `ONLY_FIRST_REPLICA`."
        )


def _aggregation_of(kind: LeafKind) -> VariableAggregation:
    """Returns the aggregation of the user, or else the aggregation of the role."""
    if kind.aggregation is not None:
        return kind.aggregation
    return _BY_ROLE.get(kind.role, VariableAggregation.NONE)


def written_policy_of(slot: Slot) -> Policy | None:
    """Returns the policy that combines the replicas' values at each write, if any."""
    if slot.annotations.get("synchronization") is not VariableSynchronization.ON_WRITE:
        return None
    kind = LeafKind(slot.role, slot.annotations.get("aggregation"))
    policy = Policy[_aggregation_of(kind).name]
    return None if policy is Policy.MIRRORED else policy


def _policy_of(
    slot: Slot,
    kind: LeafKind,
    leaf: jax.Array,
    is_of_optimizer: bool,
) -> Policy:
    """Returns the policy of one array; raises if its aggregation does not fit it."""
    given = kind.aggregation
    policy = Policy[_aggregation_of(kind).name]
    is_typed_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    is_raw_key = kind.role is Role.RANDOM_KEY and leaf.dtype == jnp.uint32
    is_key = is_typed_key or is_raw_key

    # Keys cannot be combined, and flags cannot be added up.
    is_combined_key = is_key and policy is not Policy.MIRRORED
    is_flag = leaf.dtype == bool and policy in (Policy.SUM, Policy.MEAN)
    if given is not None and (is_flag or is_combined_key):
        raise ValueError(
            f"`aggregation` of {slot.path} is {given.name}, but it holds {leaf.dtype}, "
            f"which has no {policy.value}. Use `VariableAggregation.NONE`, or hold an "
            "array of integers or floats."
        )
    if is_flag:
        return Policy.MIRRORED  # a flag of a metric
    if written_policy_of(slot) is not None:
        return Policy.MIRRORED  # because each write makes the copies equal
    # An optimizer adds its random numbers to parameters that are mirrored, so its key
    # must be equal on all replicas.
    is_own_key = is_key and given is None and not is_of_optimizer
    return Policy.RANDOM if is_own_key else policy


def enter_step(policy: Policy, value: jax.Array, context: ReplicaContext) -> jax.Array:
    """Returns the value of a slot on a replica when the step begins."""
    if policy is Policy.SUM:
        return jnp.where(_replica_id(context) == 0, value, jnp.zeros_like(value))
    if policy is Policy.RANDOM:
        return _fold_replica_in(value, context)
    return value


def leave_step(
    policy: Policy,
    entered: jax.Array,
    after: jax.Array,
    is_equal: bool,
    context: ReplicaContext,
) -> jax.Array:
    """Returns the value of a slot when the step ends.

    `is_equal` says that the step left the same value on all replicas.
    """
    if policy is Policy.MIRRORED:
        return after
    # A sum of equal values is not one of them. Any other combination is.
    if is_equal and policy is not Policy.SUM:
        return after
    if policy is Policy.RANDOM:
        return _key_of_first(after, context)
    # A replica without data adds only the value that it entered with.
    idle = entered if policy is Policy.SUM else None
    return combine(policy, after, context, idle)


def combine(
    policy: Policy,
    value: jax.Array,
    context: ReplicaContext,
    idle: jax.Array | None = None,
) -> jax.Array:
    """Returns the combined value of all replicas.

    Args:
        policy: `SUM`, `MEAN` or `ONLY_FIRST_REPLICA`.
        value: This replica's value.
        context: The replica.
        idle: The value that a replica without data adds to a sum; by default 0.
    """
    if policy is Policy.ONLY_FIRST_REPLICA:
        # A sum to which all other replicas add zeros.
        first = _masked(context.is_first(), value)
        return _sum(first, context)
    if context.num_active < context.num_replicas_in_sync:
        value = _masked(context.is_active(), value, idle)
    if policy is Policy.SUM:
        return _sum(value, context)
    return _mean(value, context)


def _masked(
    holds: jax.Array, value: jax.Array, other: jax.Array | None = None
) -> jax.Array:
    """Returns a value on replicas where a condition holds, and `other` elsewhere.

    By default, `other` is zero, which changes no sum.
    """
    if other is None:
        other = jnp.zeros_like(value)
    return jnp.where(holds, value, other)


def _sum(value: jax.Array, context: ReplicaContext) -> jax.Array:
    """Returns the sum over all replicas, in the dtype of the value."""
    wide = value.astype(int) if value.dtype == bool else value
    total = jax.lax.psum(wide, context.strategy.axis_name)
    return total.astype(value.dtype)


def _mean(value: jax.Array, context: ReplicaContext) -> jax.Array:
    """Returns the mean over the replicas with data, in the dtype of the value."""
    count = context.num_active
    if not jnp.issubdtype(value.dtype, jnp.integer):
        # In half precision the sum may overflow.
        wide_dtype = jnp.promote_types(value.dtype, jnp.float32)
        total = _sum(value.astype(wide_dtype), context)
        return (total / count).astype(value.dtype)

    # The sum of integers may overflow, and floats may not hold them. So sum the
    # quotients, and the rests, which are small.
    wide = value if value.dtype.itemsize >= 4 else value.astype(jnp.int32)
    quotient = wide // count
    rest = wide - quotient * count
    mean = _sum(quotient, context) + _sum(rest, context) // count
    return mean.astype(value.dtype)


def _fold_replica_in(value: jax.Array, context: ReplicaContext) -> jax.Array:
    """Returns the keys of this replica. The first replica uses the stored keys."""
    keys = as_keys(value)
    replica = _replica_id(context)

    def fold(key: jax.Array) -> jax.Array:
        of_others = jax.random.fold_in(key, _OTHER_REPLICAS)
        other = jax.random.fold_in(of_others, replica)
        other_data = jax.random.key_data(other)

        def choose(own_data: jax.Array) -> jax.Array:
            return jnp.where(replica == 0, own_data, other_data)

        return on_data(choose, key)

    # NNX splits a stream into an array of keys for layers that are scanned over.
    folded = jax.vmap(fold)(keys.reshape(-1)).reshape(keys.shape)
    return as_before(folded, value)


def _key_of_first(value: jax.Array, context: ReplicaContext) -> jax.Array:
    """Returns the keys that the first replica left, as with a single replica."""
    is_first = _replica_id(context) == 0

    def take_first(data: jax.Array) -> jax.Array:
        return _sum(_masked(is_first, data), context)

    first = on_data(take_first, as_keys(value))
    return as_before(first, value)


def as_keys(value: jax.Array) -> jax.Array:
    """Returns typed keys (`jax.random.key`), also for keys of `jax.random.PRNGKey`."""
    return jax.random.wrap_key_data(value) if value.dtype == jnp.uint32 else value


def as_before(keys: jax.Array, value: jax.Array) -> jax.Array:
    """Returns keys in the form of `value`, which `as_keys` was given."""
    return jax.random.key_data(keys) if value.dtype == jnp.uint32 else keys


def _replica_id(context: ReplicaContext) -> jax.Array:
    return jax.lax.axis_index(context.strategy.axis_name)
