"""The plain values that differ between two walks, as sentences for a user.

Values are compared by path. A new object of the same type at the same path counts as
unchanged, such as a metric that every loop creates. A number that changed anywhere in a
nest counts as a change.
"""

from collections.abc import Collection
from typing import Any, NamedTuple, TypeAlias

import jax

from armillary.state._adapters import node_adapter
from armillary.state._slots import ABSENT, PLAIN, Slot, describe, is_equal
from armillary.state._walk import HolderFact, Walk

_LEAF = jax.tree.structure(0)

Facts: TypeAlias = dict[tuple[str, Any], Any]
"""The plain values that a walk found, by the path and the name of their place."""


class _SlotFact(NamedTuple):
    """A slot as walks compare it: its structure, and which of its leaves are arrays."""

    structure: Any
    is_dynamic: tuple[bool, ...]

    def describe(self) -> str:
        is_array = self.structure == _LEAF
        return "an array" if is_array else f"tree structure {self.structure}"


def find_facts(walk: Walk, names: Collection[str] | None) -> Facts:
    """Returns all plain values that a walk found, by path and name."""
    read = names or ()
    root = 0 if names is None else id(walk.first_root)
    facts: Facts = {(path, None): walk.fact(value) for value, path in walk.roots}
    for holder in walk.reached_from(names):
        node = walk.nodes[holder]
        adapter = node_adapter(type(node.value))
        is_root = holder == root
        for part in node.parts:
            for name, value in part.pairs:
                is_internal = adapter is not None and adapter.is_internal(name)
                is_unread = is_root and name not in read
                is_constant = (holder, name) in walk.globals
                if is_unread or is_constant or is_internal:
                    continue

                place = part.way.join(node.path, name)
                slot = walk.slots.get((id(part.source), name))
                if slot is not None:
                    facts |= _find_facts_of_slot(walk, slot, place, name)
                    continue

                # A dictionary may have an attribute and an item of the same name.
                is_taken = (place, name) in facts
                key = (name, part.way) if is_taken else name
                facts[place, key] = walk.fact(value)
    return facts


def _find_facts_of_slot(walk: Walk, slot: Slot, place: str, name: Any) -> Facts:
    """Returns the facts about a slot, whose arrays may change, and nothing else."""
    facts: Facts = {}
    facts[place, name] = _SlotFact(slot.treedef, tuple(slot.is_dynamic))
    for leaf_path, leaf in slot.others:
        facts[leaf_path, None] = walk.fact(leaf)
    return facts


def find_differences(
    old: Facts, new: Facts, fixed: Collection[int] = ()
) -> dict[str, str]:
    """Returns a sentence for each path whose value differs between two walks.

    A new object of the same type counts as unchanged, unless the `id` of the old object
    is in `fixed`.
    """
    found: dict[str, str] = {}
    for key in {**old, **new}:
        path, _ = key
        before = old.get(key, ABSENT)
        now = new.get(key, ABSENT)
        if not _is_alike(before, now, fixed):
            found[path] = _became(before, now)

    # The line of a holder is enough, so the lines below it are left out.
    top: dict[str, str] = {}
    for path, text in found.items():
        holder = path.rpartition("/")[0]
        if holder not in found:
            top[path] = text
    return top


def _is_alike(old: Any, new: Any, fixed: Collection[int]) -> bool:
    are_holders = isinstance(old, HolderFact) and isinstance(new, HolderFact)
    if not are_holders:
        return is_equal(old, new)

    may_be_new = id(old.value) not in fixed
    is_allowed = may_be_new or old.value is new.value
    is_alike = old.kind == new.kind and old.path == new.path
    return is_allowed and is_alike


def _became(old: Any, new: Any) -> str:
    """Returns a sentence on the old and the new value of a place."""
    if old is ABSENT:
        return f"{_describe(new)} was put there"
    if new is ABSENT:
        return f"{_describe(old)} was removed"

    before = _describe(old)
    now = _describe(new)
    if before == now:
        return f"{before} has changed"
    is_plain_of_same_type = type(old) is type(new) and type(old) in PLAIN
    if is_plain_of_same_type:
        now = repr(new)[:60]  # The sentence has named the type already.
    return f"{before} became {now}"


def _describe(fact: Any) -> str:
    if isinstance(fact, _SlotFact):
        return fact.describe()
    return describe(fact.value if isinstance(fact, HolderFact) else fact)
