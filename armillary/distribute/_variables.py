"""What happens to each slot when a step runs on several replicas.

Every slot has a policy, from what it is for or from what the user set on the variable
with the enums of `tf.distribute`::

    nnx.Variable(jnp.zeros(()), aggregation=VariableAggregation.SUM)

    policy          entering `run`                      leaving `run`
    mirrored        the same value on all replicas      must be equal on all replicas
    sum             first replica: value, others: 0     summed over replicas
    mean            the same value on all replicas      averaged over replicas
    first replica   the same value on all replicas      the first replica's value
    random          the replica's number is folded in   the stored key, or its successor
"""

import enum
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from armillary.distribute._collectives import ReplicaContext
from armillary.distribute._retype import AXIS_NAME, varies
from armillary.state import Role, Slot

if TYPE_CHECKING:
    from flax import nnx

ON_READ_SCOPE = "armillary_on_read"


class VariableSynchronization(enum.Enum):
    """When replicas' copies of a variable are brought together.

    As in `tf.VariableSynchronization`: `ON_WRITE` keeps copies equal at all times,
    `ON_READ` lets them differ until `run` ends, `AUTO` lets the library choose.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """How replicas' values of a variable become one (`tf.VariableAggregation`)."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class Policy(enum.Enum):
    """The row of the table in the module docstring that holds for a slot."""

    MIRRORED = "mirrored"
    SUM = "sum"
    MEAN = "mean"
    FIRST_REPLICA = "first replica"
    RANDOM = "random"


_BY_ROLE = {
    Role.PLAIN: Policy.MIRRORED,
    Role.METRIC: Policy.SUM,
    Role.BATCH_STATISTIC: Policy.MEAN,
    Role.RANDOM_KEY: Policy.RANDOM,
}
_BY_AGGREGATION = {
    VariableAggregation.NONE: Policy.MIRRORED,
    VariableAggregation.SUM: Policy.SUM,
    VariableAggregation.MEAN: Policy.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA: Policy.FIRST_REPLICA,
}


def create_global_step(initial_value: int = 0) -> "nnx.Variable":
    """Returns a counter of training steps, for a loop that has no other.

    It is an integer variable with `VariableAggregation.ONLY_FIRST_REPLICA`: adding 1 to
    it inside `strategy.run` adds 1, whatever the number of replicas. After
    `orbit.utils.create_global_step`.

    Args:
        initial_value: The first value.

    Returns:
        A variable of shape `()`; the integer dtype is JAX's default.
    """
    from flax import nnx

    return nnx.Variable(
        jnp.asarray(initial_value, dtype=jnp.result_type(int)),
        aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
    )


def policy_of(slot: Slot, leaf: jax.Array) -> Policy:
    """Returns the policy of an array in a slot.

    Raises:
        ValueError: If the variable's `synchronization` or `aggregation` is not one of
            the enums' members, or the two cannot be had together.
    """
    aggregation = slot.annotations.get("aggregation")
    synchronization = slot.annotations.get("synchronization")
    for name, value, kind in (
        ("aggregation", aggregation, VariableAggregation),
        ("synchronization", synchronization, VariableSynchronization),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(
                f"`{name}` of {slot.path} is {value!r}, but it must be a member of "
                f"`armillary.{kind.__name__}`, such as {next(iter(kind))}. Set it "
                "where the variable is made."
            )
    if aggregation is None:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return Policy.RANDOM if is_key else _BY_ROLE[slot.role]
    on_read = synchronization is VariableSynchronization.ON_READ
    if on_read and aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"`aggregation` of {slot.path} is NONE and its `synchronization` is "
            "ON_READ, which leaves no single value to read outside `run`. Use "
            "`VariableAggregation.SUM`, `MEAN` or `ONLY_FIRST_REPLICA`."
        )
    return _BY_AGGREGATION[aggregation]


def enter(policy: Policy, value: jax.Array) -> jax.Array:
    """Returns what one replica sees of a slot when its step begins."""
    if policy is Policy.SUM:
        return jnp.where(_replica_id() == 0, value, jnp.zeros_like(value))
    if policy is Policy.RANDOM:
        # NNX splits a stream into an array of keys for layers that are scanned over.
        keys = jax.vmap(lambda key: jax.random.fold_in(key, _replica_id()))
        return keys(value.reshape(-1)).reshape(value.shape)
    return value


def leave(
    policy: Policy,
    before: jax.Array,
    entered: jax.Array,
    after: jax.Array,
    context: ReplicaContext,
) -> jax.Array:
    """Returns what a slot holds when the step ends.

    Args:
        policy: The slot's policy.
        before: The value outside `run`, before the step.
        entered: What `enter` made of it.
        after: What the step left.
        context: The replica, for its number and for which replicas hold data.

    Returns:
        The new value. It differs between replicas if the slot is mirrored and the step
        left it so.
    """
    with jax.named_scope(ON_READ_SCOPE):
        if policy is Policy.RANDOM:
            if after is entered:
                return before
            # A key that the step split and assigned differs between replicas: what is
            # stored moves on too, by a way that they share.
            return _advance(before) if varies(after) else after
        if policy is Policy.MIRRORED:
            return after
        if not varies(after):
            if policy is not Policy.SUM:
                return after
            after = jax.lax.pcast(after, AXIS_NAME, to="varying")
        is_first = policy is Policy.FIRST_REPLICA
        holds = context.is_first() if is_first else context.is_active()
        if policy is Policy.SUM:
            idle = (
                entered if context.num_active < context.num_replicas_in_sync else None
            )
            return jax.lax.psum(
                after if idle is None else jnp.where(holds, after, idle), AXIS_NAME
            )
        total = jax.lax.psum(jnp.where(holds, after, jnp.zeros_like(after)), AXIS_NAME)
        if policy is Policy.MEAN:
            return (total / context.num_active).astype(after.dtype)
        return total


def _advance(key: jax.Array) -> jax.Array:
    return jax.vmap(lambda k: jax.random.split(k, 1)[0])(key.reshape(-1)).reshape(
        key.shape
    )


def _replica_id() -> jax.Array:
    return jax.lax.axis_index(AXIS_NAME)
