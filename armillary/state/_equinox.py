"""The state of Equinox modules, which a step uses up.

Equinox compares a new value with the old one, and refuses it if JAX knows the mesh of
only one of them. Inside `shard_map`, JAX 0.10 to 0.12 knows the mesh of results, but
not of constants, such as the flag that `eqx.nn.BatchNorm` sets. So a step on several
replicas gets its `eqx.nn.State` as a subclass, which makes each constant a result.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp


def is_state(value: Any) -> bool:
    """Returns whether a value is an `eqx.nn.State`."""
    return isinstance(value, _state_type())


def _state_type() -> Any:
    nn = getattr(sys.modules.get("equinox"), "nn", None)
    return getattr(nn, "State", ())


def as_replica_state(state: Any) -> Any:
    """Returns a copy of an `eqx.nn.State` that accepts constants as new values."""
    return _make(_replica_type(), state)


def as_state(state: Any) -> Any:
    """Returns the plain `eqx.nn.State` that a step left."""
    return _make(_state_type(), state)


def is_replica_state(value: Any) -> bool:
    return is_state(value) and type(value) is not _state_type()


def _make(kind: Any, state: Any) -> Any:
    values, names = state.tree_flatten()
    return kind.tree_unflatten(names, values)


@functools.cache
def _replica_type() -> Any:
    """Returns the class of replicas' states, made only if Equinox is used."""
    state_type = _state_type()

    @jax.tree_util.register_pytree_node_class
    class _ReplicaState(state_type):
        """An `eqx.nn.State` that gives each new value the mesh of the old one."""

        def set(self, item: Any, value: Any) -> Any:
            old = self.get(item)
            new = jax.tree.map(jnp.asarray, value)
            # Equinox refuses another structure itself.
            has_same_structure = jax.tree.structure(old) == jax.tree.structure(new)
            if has_same_structure:
                new = jax.tree.map(_with_mesh_of, old, new)
            changed = super().set(item, new)
            return _make(type(self), changed)

        def substate(self, pytree: Any) -> Any:
            part = super().substate(pytree)
            return _make(type(self), part)

        def update(self, substate: Any) -> Any:
            if is_replica_state(substate):
                substate = as_state(substate)
            changed = super().update(substate)
            return _make(type(self), changed)

    return _ReplicaState


def _with_mesh_of(old: Any, new: Any) -> Any:
    """Turns a constant into the result of an operation, which has a mesh."""
    before = _type_of(old)
    now = _type_of(new)
    is_alike = before.shape == now.shape and before.dtype == now.dtype
    has_other_mesh = is_alike and before != now
    if not has_other_mesh or not _is_real(now.dtype):
        return new

    # The maximum of a value and itself is an operation that changes no real value.
    return jax.lax.max(new, new)


def _type_of(value: Any) -> Any:
    """Returns the type of a value as JAX knows it, with its mesh."""
    return jax.eval_shape(lambda: value)


def _is_real(dtype: Any) -> bool:
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)
