"""Which arrays of the state a program changes, and which it takes over for that."""

from collections.abc import Sequence
from typing import Any

import jax

from armillary.state._access import Access, make_picker


class Use:
    """How one kind of program uses the arrays: which it changes, which it reads.

    Args:
        changed: Indices of the arrays that it changes.
        is_scalar: For every array, whether it is a scalar.
        access: Writes the slots.

    Attributes:
        read: The indices of the other arrays.
        donated: Those of `changed` that it takes over. Nobody else holds their buffers.
        values: The arrays of `changed`.
        write: Puts new arrays of `changed` into their slots; see `Access.writer`.
    """

    def __init__(
        self, changed: tuple[int, ...], is_scalar: Sequence[bool], access: Access
    ) -> None:
        self.changed = changed
        large, self.read, small = _divide(changed, is_scalar)
        self.donated = frozenset(large)
        self.values: list[Any] = []
        self.write = access.writer(changed)
        self._is_scalar = is_scalar
        self._kept: list[Any] = []
        self._kept_ids: frozenset[int] | None = None
        self._positions = {i: position for position, i in enumerate(changed)}
        self._kept_positions = {i: position for position, i in enumerate(self.read)}
        self._pick_large = make_picker([self._positions[i] for i in large])
        self._pick_small = make_picker([self._positions[i] for i in small])

    def copy_for(self, changed: tuple[int, ...], access: Access) -> "Use":
        """Returns the same arrays for another kind of program."""
        use = Use(changed, self._is_scalar, access)
        use.take(self.all())
        for i in use.donated - self.donated:
            # A step that is traced again may change what the last one only read.
            array = use.get(i)
            if array is not None:
                use.set(i, array.copy())
        return use

    def take(self, arrays: Sequence[Any]) -> None:
        """Takes all arrays, in the order of the slots."""
        self.values = [arrays[i] for i in self.changed]
        self._kept = [arrays[i] for i in self.read]
        self._kept_ids = None

    def all(self) -> list[Any]:
        """Returns all arrays, in the order of the slots."""
        return [self.get(i) for i in range(len(self._is_scalar))]

    def divide(self) -> tuple[list[Any], list[Any]]:
        """Returns the arrays that are donated, and the others; see `join`."""
        small = self._pick_small(self.values)
        return self._pick_large(self.values), [*self._kept, *small]

    def get(self, index: int) -> Any:
        """Returns the array at an index among all."""
        if index in self._positions:
            return self.values[self._positions[index]]
        return self._kept[self._kept_positions[index]]

    def set(self, index: int, array: jax.Array) -> None:
        """Replaces the array at an index among all."""
        if index in self._positions:
            self.values[self._positions[index]] = array
        else:
            self._kept[self._kept_positions[index]] = array
            self._kept_ids = None

    def has_shared_buffers(self) -> bool:
        """Returns whether an array that is donated stands in two places."""
        ids = set(map(id, self.values))
        return len(ids) < len(self.values) or not ids.isdisjoint(self._find_kept())

    def _find_kept(self) -> frozenset[int]:
        if self._kept_ids is None:
            self._kept_ids = frozenset(
                id(self._kept[position])
                for i, position in self._kept_positions.items()
                if not self._is_scalar[i]
            )
        return self._kept_ids


def join(
    changed: Sequence[int],
    is_scalar: Sequence[bool],
    donated: Sequence[Any],
    others: Sequence[Any],
) -> list[Any]:
    """Returns arrays that `Use.divide` divided, in the order of the slots."""
    large, read, small = _divide(changed, is_scalar)
    order = [*large, *read, *small]
    arrays = dict(zip(order, [*donated, *others], strict=True))
    return [arrays[i] for i in range(len(is_scalar))]


def _divide(
    changed: Sequence[int], is_scalar: Sequence[bool]
) -> tuple[list[int], list[int], list[int]]:
    """Returns which arrays are donated, only read, and changed without donating."""
    changes = set(changed)
    return (
        [i for i in changed if not is_scalar[i]],
        [i for i in range(len(is_scalar)) if i not in changes],
        [i for i in changed if is_scalar[i]],
    )
