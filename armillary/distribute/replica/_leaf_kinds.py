"""The kinds of a pure step's leaves, which decide how replicas' values are combined.

A leaf has the kind that `kinds` gives it. Otherwise, its library decides: by the type
of a variable in an `nnx.State`, by the place in a pytree of Linen or Equinox, or by the
Keras variable from which the leaf was taken. A kind is the `aggregation` of a variable
of Flax NNX.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import list_lines
from armillary.distribute.replica._policy import VariableAggregation
from armillary.state._adapters import (
    adapter_of,
    is_leaf_variable,
    loaded_adapters,
    value_of,
)
from armillary.state._slots import LeafKind, is_array
from armillary.state._tree import PURE_STATE, Leaf, is_object, kind_of, leaves_of
from armillary.state._walk import Walk

# The kinds by name, such as `"mean"`.
_KINDS = {member.name.lower(): member for member in VariableAggregation}
_FIX = 'Write `kinds={"batch_stats": "mean"}`.'


class _Rule(NamedTuple):
    """One entry of `kinds`: a test of leaves, and the kind for leaves that pass it."""

    key: str | type
    aggregation: VariableAggregation
    finds: Callable[[Leaf], bool]

    def fits(self, leaf: Leaf) -> bool:
        """Returns whether values of a leaf's dtype can be combined in this way."""
        dtype = _value_of(leaf).dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return self.aggregation is VariableAggregation.NONE
        adds_up = (VariableAggregation.SUM, VariableAggregation.MEAN)
        is_flag = jnp.issubdtype(dtype, jnp.bool_)
        return not is_flag or self.aggregation not in adds_up


class _VariableLeaf(NamedTuple):
    """A leaf that holds a variable: its kind, and its name in its library."""

    kind: LeafKind
    name: str
    library: str


class StateKinds:
    """The kinds of the leaves of one state.

    Args:
        kinds: A mapping to the names of kinds. A key is a regular expression, searched
            for in the paths of leaves, or the type of a node.
        state: The state as the user gave it.
        step: The step, which leads to the Keras model whose variables it uses.

    Raises:
        TypeError: If `kinds` is not a mapping, or a key is of another type.
        ValueError: If a kind does not exist or fits no leaf, or if a key finds no leaf.
    """

    def __init__(self, kinds: Any, state: Any, step: Any) -> None:
        leaves = [leaf for leaf in leaves_of(state, is_object) if _has_value(leaf)]
        self._variables = _find_variables(leaves, step)
        self._rules: list[_Rule] = []
        for key, kind in _check_mapping(kinds).items():
            self._rules.append(_make_rule(key, kind))
        for rule in self._rules:
            _check_found(rule, leaves)

    def find(self, leaf: Leaf) -> LeafKind:
        """Returns the kind of a leaf; the first rule that finds it counts."""
        known = self._variables.get(leaf.path(PURE_STATE))
        kind = kind_of(leaf) if known is None else known.kind
        for rule in self._rules:
            if rule.finds(leaf):
                if rule.fits(leaf):
                    return kind._replace(aggregation=rule.aggregation)
                return kind
        return kind

    def place_of(self, leaf: Leaf) -> str:
        """Returns the name of a leaf in messages, with its name in its library."""
        known = self._variables.get(leaf.path(PURE_STATE))
        place = leaf.expression(PURE_STATE)
        if known is None:
            return place
        return f"{place} ({known.name!r} of {known.library})"


def _check_mapping(kinds: Any) -> Mapping[Any, Any]:
    """Returns `kinds` as a mapping; raises if it is something else."""
    if kinds is None:
        return {}
    if not isinstance(kinds, Mapping):
        raise TypeError(
            f"`kinds` is {kinds!r:.80} of type {type(kinds).__name__}, but it must be "
            f"a mapping from paths or types to kinds. {_FIX}"
        )
    return kinds


def _make_rule(key: Any, kind: Any) -> _Rule:
    return _Rule(key, _check_kind(key, kind), _make_finder(key))


def _check_kind(key: Any, kind: Any) -> VariableAggregation:
    if isinstance(kind, VariableAggregation):
        return kind
    found = _KINDS.get(kind) if isinstance(kind, str) else None
    if found is None:
        near = difflib.get_close_matches(str(kind), _KINDS, n=1)
        meant = near[0] if near else "mean"
        known = ", ".join(f'"{name}"' for name in _KINDS)
        fix = f'Write `kinds={{{_shown(key)}: "{meant}"}}`.'
        raise ValueError(
            f"`kinds` has {kind!r:.60} for {_shown(key)}, but a kind is one of "
            f"{known}, or a member of `armillary.VariableAggregation`. {fix}"
        )
    return found


def _make_finder(key: Any) -> Callable[[Leaf], bool]:
    """Returns the test of leaves that a key stands for: by a node, or by the path."""
    if isinstance(key, type):
        return lambda leaf: any(isinstance(node, key) for node in leaf.above)
    if not isinstance(key, str):
        raise TypeError(
            f"`kinds` has the key {key!r:.60} of type {type(key).__name__}, but a key "
            "is a regular expression that is searched for in the paths of leaves, or "
            f"the type of a node. {_FIX}"
        )
    try:
        pattern = re.compile(key)
    except re.error as error:
        raise ValueError(
            f"`kinds` has {key!r}, which is not a regular expression: {error}. Escape "
            f"it: `kinds={{{re.escape(key)!r}: ...}}`."
        ) from error
    return lambda leaf: pattern.search(leaf.path(PURE_STATE)) is not None


def _check_found(rule: _Rule, leaves: list[Leaf]) -> None:
    """Raises if a rule finds no leaf, or only leaves that its kind does not fit."""
    found = [leaf for leaf in leaves if rule.finds(leaf)]
    if not found:
        noun = "types" if isinstance(rule.key, type) else "paths"
        names = list_lines(_names_near(rule.key, leaves)) or "  (there are none)"
        raise ValueError(
            f"`kinds` has {_shown(rule.key)}, found in none of these {noun}:\n"
            f"{names}\n"
            "Correct it, or leave it out. Variables of a module have the kind of their "
            "type, or of their `aggregation`."
        )
    if any(map(rule.fits, found)):
        return
    place = found[0].expression(PURE_STATE)
    dtype = _value_of(found[0]).dtype
    kind = rule.aggregation.name.lower()
    raise ValueError(
        f"`kinds` has {_shown(rule.key)}: {kind!r}, but {place} holds {dtype}, which "
        f"has no {kind}. Hold an array of integers or floats, or leave "
        f"{_shown(rule.key)} out."
    )


def _names_near(key: Any, leaves: Iterable[Leaf]) -> list[str]:
    """Returns the names that a key may have meant, the most similar names first."""
    if isinstance(key, type):
        wanted = key.__qualname__
        found = {type(node).__qualname__ for leaf in leaves for node in leaf.above}
    else:
        wanted = key
        found = {leaf.path(PURE_STATE) for leaf in leaves}

    def nearness(name: str) -> float:
        # The key may be one name of a long path.
        parts = [name, *name.split("/")]
        return max(_likeness(wanted, part) for part in parts)

    # Names that are equally near are in the order of the alphabet.
    return sorted(sorted(found), key=nearness, reverse=True)


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _shown(key: Any) -> str:
    return f"`{key.__qualname__}`" if isinstance(key, type) else repr(key)


def _has_value(leaf: Leaf) -> bool:
    """Returns whether a leaf is or becomes an array, so that it can have a kind."""
    value = leaf.value
    is_of_numpy = isinstance(value, np.ndarray | np.generic)
    is_integer = type(value) is int  # but not a flag
    return is_of_numpy or is_integer or is_array(value) or is_leaf_variable(value)


def _value_of(leaf: Leaf) -> Any:
    if is_leaf_variable(leaf.value):
        return value_of(leaf.value)
    return leaf.value if hasattr(leaf.value, "dtype") else jnp.asarray(leaf.value)


def _find_variables(leaves: Iterable[Leaf], step: Any) -> dict[str, _VariableLeaf]:
    """Returns the leaves that are variables, or values of variables of the step.

    Variables that are nodes of pytrees have leaves of their own below them.
    """
    if all(adapter.are_pytrees for adapter in loaded_adapters()):
        return {}
    # By identity, because `stateless_call` takes lists of arrays without names.
    known: dict[int, _VariableLeaf] = {}
    for slot in Walk([(step, "")]).slots.values():
        variable = slot.variable
        if is_leaf_variable(variable):
            adapter = adapter_of(variable)
            name = adapter.name_of(variable)
            entry = _VariableLeaf(LeafKind(slot.role), name, adapter.title)
            known[id(variable)] = entry
            known[id(adapter.value_of(variable))] = entry
    found = {}
    for leaf in leaves:
        if id(leaf.value) in known:
            found[leaf.path(PURE_STATE)] = known[id(leaf.value)]
    return found
