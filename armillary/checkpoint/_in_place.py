"""Puts restored arrays into the dictionaries and lists that a program already holds.

A restore makes a new tree for each place. If a program names a dictionary of parameters
inside another dictionary, it reads its own dictionary afterwards, and not the new tree.
"""

import collections
from collections.abc import Iterable
from typing import Any


def find_containers(roots: Iterable[Any]) -> dict[int, int]:
    """Counts the places of each dictionary and list, by `id`, in plain containers."""
    counts: collections.Counter[int] = collections.Counter()
    pending = list(roots)
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            counts[id(value)] += 1
            if counts[id(value)] > 1:
                continue
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
    return counts


def put_in_place(old: Any, new: Any, counts: dict[int, int]) -> Any:
    """Moves the arrays of a tree into the containers of an old tree of this structure.

    A container that has several places is left alone, because each place has arrays of
    its own in `new`.

    Returns:
        The value for the place: `old`, if all of its arrays could be replaced.
    """
    if old is new or type(old) is not type(new):
        return new
    if isinstance(old, tuple):
        is_plain = type(old) is tuple or hasattr(old, "_fields")
        if not is_plain:
            return new
        pairs = zip(old, new, strict=True)
        children = [put_in_place(*pair, counts) for pair in pairs]
        if all(child is held for child, held in zip(children, old, strict=True)):
            return old
        return tuple(children) if type(old) is tuple else type(old)(*children)

    is_alone = counts.get(id(old)) == 1
    if not (isinstance(old, dict | list) and is_alone):
        return new
    keys = list(old) if isinstance(old, dict) else range(len(old))
    for key in keys:
        old[key] = put_in_place(old[key], new[key], counts)
    return old
