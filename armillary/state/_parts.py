"""The parts of a holder: the names and values that it holds in one way."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Contents: TypeAlias = tuple[list[Any], list[Any]]
"""The names of places, and the values there."""


def join(path: str, name: object) -> str:
    """Returns the path of `name` below `path`."""
    return f"{path}/{name}" if path else str(name)


class Way(NamedTuple):
    """One way in which objects hold others; without `put`, arrays are constants."""

    look: Callable[[Any], Contents]
    get: Callable[[Any, Any], Any] = operator.getitem
    put: Callable[[Any, Any, Any], None] | None = None
    join: Callable[[str, Any], str] = join


class Part(NamedTuple):
    """The names and values that an object held in one way when it was looked at.

    `source` is the object or its `__dict__`.
    """

    source: Any
    way: Way
    names: list[Any]
    values: list[Any]

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        return list(zip(self.names, self.values, strict=True))

    @property
    def held(self) -> dict[Any, Any]:
        return dict(self.pairs)
