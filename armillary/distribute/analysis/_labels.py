"""Facts about a value of a step: why it may differ between replicas, and its labels.

The labels show whether a sum or a mean over replicas would be wrong::

    label        is put on                          is kept by
    DIVISOR,     the number that divides a loss     copies
      WEIGHT
    DIVIDED,     a value divided by such a number   linear operations; a product of two
      WEIGHED                                       losses, or with the count, loses it
    REDUCED      the result of a reduction          linear operations of equal values
    OF_REDUCED   a gradient of a reduced loss       linear operations; a sum keeps it if
                                                    all its differing operands have it
    AVERAGED     the gradient of a mean of Keras    the backward pass, copies and sums
    GRADIENT     a differing value in a backward    differing values
                 pass
    RAW_KEY      a key of `jax.random.PRNGKey`      parts of arrays
    KEY          a typed key made from a raw key    equal keys
    DRAWN        random numbers                     equal values, and functions of draws
    NOISED       a gradient plus random numbers     linear operations
"""

import enum
from collections.abc import Iterable
from typing import NamedTuple


class LabelKind(enum.Enum):
    """The name of a label: a row of the table above."""

    DIVISOR = enum.auto()
    WEIGHT = enum.auto()
    DIVIDED = enum.auto()
    WEIGHED = enum.auto()
    REDUCED = enum.auto()
    OF_REDUCED = enum.auto()
    AVERAGED = enum.auto()
    GRADIENT = enum.auto()
    RAW_KEY = enum.auto()
    KEY = enum.auto()
    DRAWN = enum.auto()
    NOISED = enum.auto()


class Label(NamedTuple):
    """A kind of label, and the line or the place where a value got it.

    If the place is a leaf of a pure step's state, `pure_path` is the path of the leaf.
    """

    kind: LabelKind
    origin: str
    pure_path: str | None = None


class Facts(NamedTuple):
    """The reasons why a value may differ between replicas, and its labels.

    A value without reasons is equal on all replicas.
    """

    reasons: frozenset[str] = frozenset()
    labels: frozenset[Label] = frozenset()

    def find(self, kind: LabelKind) -> str | None:
        """Returns the place where the value got a label; `None` without the label."""
        label = self.find_label(kind)
        return None if label is None else label.origin

    def find_label(self, kind: LabelKind) -> Label | None:
        found = [label for label in self.labels if label.kind is kind]
        return min(found, key=lambda label: label.origin, default=None)

    def only(self, *kinds: LabelKind) -> set[Label]:
        """Returns the labels of these kinds."""
        return {label for label in self.labels if label.kind in kinds}

    def explain(self) -> str:
        return f"computed from {' and '.join(sorted(self.reasons))}"


EQUAL = Facts()
BATCH = Facts(frozenset({"one replica's share of the batch"}))


def join_facts(facts: Iterable[Facts]) -> Facts:
    """Returns the facts about a value that may come from several places."""
    several = set(facts)
    if len(several) < 2:
        return several.pop() if several else EQUAL
    reasons, labels = zip(*several, strict=True)
    return Facts(frozenset().union(*reasons), frozenset().union(*labels))
