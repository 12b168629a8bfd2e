"""A sequence of choices whose counts follow weights, with access to any place.

The choices are divided in two at each node of a binary tree, by rounded multiples. For
example, the weights 6, 3 and 1 are divided into 6 and the rest, and the rest into 3 and
1::

    row              0 1 2 3 4 5 6 7 8 9
    6 of 10          x   x   x x   x   x   floor(6/10 * n + 1/2) of n rows
    3 of other 4       x   x         x     floor(3/4 * n + 1/2) of n other rows
    1                            x

Each rounding is at most 1/2 away from its exact value, and passes only a share of that
to the choices below. The tree is Huffman's, whose shares are at most 1, 1, 1/2, 1/3,
1/5, ... (one divided by the Fibonacci numbers). So the count of each choice is always
within 1.7 of its exact value, for any number of choices, and within 1 for up to three.

Weights may follow other weights. Then a choice begins with the fraction of a row that
it is owed from before. Otherwise, weights that change at each step would be rounded in
each step, and a choice with a small share would never occur.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

_BITS = 40
_SCALE = 2**_BITS
"""The sum of all weights as integers: 2**40 rows are exact to half a row."""
_MAX_ROWS = 2**20
"""The rows of one computation, whose products then fit into 64 bits."""


@dataclass(frozen=True)
class _Node:
    """A node of a binary tree whose leaves are the choices."""

    weight: int
    owed: int  # in parts of a row, of which `_SCALE` are one
    choice: int | None = None  # of a leaf
    parts: tuple["_Node", "_Node"] | None = None


class Proportions:
    """An endless sequence of choices, in which each choice has its share.

    Args:
        weights: The weight of each choice, not negative, with a positive sum.
        owed: The result of `find_owed` of the weights before; by default, nothing.
    """

    def __init__(
        self, weights: Sequence[float], owed: Sequence[int] | None = None
    ) -> None:
        self.num_choices = len(weights)
        self._owed = list(owed or [0] * len(weights))
        exact = [Fraction(weight) for weight in weights]
        total = sum(exact)
        self._leaves: list[_Node] = []
        for choice, weight in enumerate(exact):
            if weight:
                scaled = round(weight / total * _SCALE)
                # A small weight must not become 0, or its choice would never occur.
                leaf = _Node(max(1, scaled), self._owed[choice], choice)
                self._leaves.append(leaf)
        self._root = _join(self._leaves)

    def count(self, num_rows: int) -> list[int]:
        """Returns how often each choice occurs in the first rows."""
        counts = [0] * self.num_choices
        nothing = np.zeros(1, np.int64)
        for choice, count, _ in _divide(self._root, num_rows, nothing):
            counts[choice] = count
        return counts

    def find_owed(self, num_rows: int) -> list[int]:
        """Returns what each choice is owed after the first rows, or is ahead (< 0).

        A choice with weight 0 is still owed the same.
        """
        owed = list(self._owed)
        counts = self.count(num_rows)
        for leaf in self._leaves:
            assert leaf.choice is not None
            share = num_rows * leaf.weight * _SCALE // self._root.weight
            owed[leaf.choice] += share - counts[leaf.choice] * _SCALE
        return owed

    def choose(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the choices of some rows, and how often each occurred before.

        Args:
            start: The first row.
            stop: The row after the last row.

        Returns:
            Two arrays of shape `(stop - start,)`: the choice of each row, and the
            number of earlier rows with the same choice.
        """
        # An empty part first, because nothing cannot be joined.
        choices = [np.zeros(0, np.int64)]
        before = [np.zeros(0, np.int64)]
        for first in range(start, stop, _MAX_ROWS):
            last = min(first + _MAX_ROWS, stop)
            own, counts = self._choose(first, last)
            choices.append(own)
            before.append(counts)
        return np.concatenate(choices), np.concatenate(before)

    def _choose(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        choices = np.empty(stop - start, np.int64)
        before = np.empty(stop - start, np.int64)
        passed = np.arange(stop - start + 1)
        for choice, count, more in _divide(self._root, start, passed):
            own = np.flatnonzero(np.diff(more))
            choices[own] = choice
            before[own] = count + more[own]
        return choices, before


def _join(leaves: list[_Node]) -> _Node:
    """Returns the root of Huffman's tree."""
    numbers = itertools.count()  # Equal weights keep their order.
    heap = [(leaf.weight, next(numbers), leaf) for leaf in leaves]
    heapq.heapify(heap)
    while len(heap) > 1:
        *_, small = heapq.heappop(heap)
        *_, large = heapq.heappop(heap)
        weight = small.weight + large.weight
        owed = small.owed + large.owed
        joined = _Node(weight, owed, parts=(large, small))
        heapq.heappush(heap, (weight, next(numbers), joined))
    (_, _, root) = heap[0]
    return root


def _divide(
    node: _Node, count: int, more: np.ndarray
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields each leaf with its part of `count` rows, and of `count + more` rows.

    Args:
        node: The node that has these rows.
        count: A number of rows, below 2**62.
        more: Further rows, at most `_MAX_ROWS`, in rising order.
    """
    if node.parts is None:
        assert node.choice is not None
        yield node.choice, count, more
        return

    left, right = node.parts
    # floor((n - owed) * share + owed to the left + 1/2), in integers. Only the first
    # product can exceed 64 bits.
    divisor = 2 * node.weight
    factor = 2 * left.weight
    extra = (left.owed * divisor - node.owed * factor) >> _BITS
    whole, rest = divmod(count * factor + extra + node.weight, divisor)
    own = whole + (rest + more * factor) // divisor
    if extra:
        # In the first rows, more may be owed than there are rows.
        whole = min(max(whole, 0), count)
        own = np.clip(own, 0, count + more)
    own -= whole
    yield from _divide(left, whole, own)
    yield from _divide(right, count - whole, more - own)
