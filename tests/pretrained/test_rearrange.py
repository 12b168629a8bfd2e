"""Tests that rearranged views read every part as NumPy computes it."""

import itertools
import math
import re

import numpy as np
import pytest

from armillary.pretrained import rearrange
from armillary.pretrained._views import View


class Counting(View):
    """An array that counts the elements that were read."""

    def __init__(self, array):
        self._array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.num_read = 0

    def read(self, box):
        part = self._array[box]
        self.num_read += part.size
        return part


def parts_of(size):
    """Returns the start and stop of every range of an axis, empty ones too."""
    bounds = itertools.combinations_with_replacement(range(size + 1), 2)
    return [slice(start, stop) for start, stop in bounds]


CASES = [
    ("a b -> b a", {}, (3, 4), lambda x: x.T),
    ("out in h w -> h w in out", {}, (2, 3, 1, 2), lambda x: x.transpose(2, 3, 1, 0)),
    (
        "(heads size) embed -> embed heads size",
        {"size": 3},
        (6, 2),
        lambda x: x.reshape(2, 3, 2).transpose(2, 0, 1),
    ),
    (
        "embed heads size -> (heads size) embed",
        {"heads": 3},
        (2, 3, 2),
        lambda x: x.transpose(1, 2, 0).reshape(6, 2),
    ),
    (
        "(heads three size) embed -> (three heads size) embed",
        {"three": 3, "size": 2},
        (12, 1),
        lambda x: x.reshape(2, 3, 2, 1).swapaxes(0, 1).reshape(12, 1),
    ),
    ("() n -> n", {}, (1, 3), lambda x: x[0]),
    ("n -> n ()", {}, (3,), lambda x: x[:, None]),
]


@pytest.mark.parametrize(("pattern", "sizes", "shape", "expected"), CASES)
def test_every_part_is_the_part_of_the_whole(pattern, sizes, shape, expected):
    array = np.arange(math.prod(shape)).reshape(shape)
    whole = expected(array)
    transform = rearrange(pattern, **sizes)
    (view,) = transform.forward([Counting(array)])
    assert view.shape == whole.shape
    for box in itertools.product(*map(parts_of, whole.shape)):
        np.testing.assert_array_equal(view.read(box), whole[box])

    (back,) = transform.backward([Counting(whole)])
    assert back.shape == shape
    for box in itertools.product(*map(parts_of, shape)):
        np.testing.assert_array_equal(back.read(box), array[box])


def test_a_part_of_divided_and_moved_axes_reads_no_other_element():
    array = np.arange(48).reshape(12, 4)
    inner = Counting(array)
    (view,) = rearrange("(heads size) embed -> embed heads size", size=4).forward(
        [inner]
    )
    # A part of each head, which is several ranges of the first axis.
    found = view.read((slice(1, 3), slice(0, 3), slice(1, 3)))
    assert found.size == inner.num_read == 12


@pytest.mark.parametrize(
    ("pattern", "sizes", "error", "parts"),
    [
        (3, {}, TypeError, ["`pattern` is 3", 'rearrange("out in -> in out")']),
        ("a b", {}, ValueError, ["'a b'", "two lists of names with `->`"]),
        ("a (b -> b a", {}, ValueError, ["is not a list of names"]),
        ("a a -> a", {}, ValueError, ["has a name twice"]),
        ("a b -> b c", {}, ValueError, ["the same names on both sides"]),
        ("a b -> b a", {"c": 2}, ValueError, ["each size must have one of"]),
        ("(a b) -> a b", {}, ValueError, ["the parts a and b of unknown", ", b=64)"]),
        ("a b -> b a", {"a": 0}, ValueError, ["`a` is 0", "positive integer"]),
    ],
)
def test_a_wrong_pattern_is_refused(pattern, sizes, error, parts):
    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts))):
        rearrange(pattern, **sizes)


@pytest.mark.parametrize(
    ("pattern", "sizes", "message"),
    [
        ("a b c -> c b a", {}, "has 2 axes instead of 3"),
        ("(a b) c -> c a b", {"b": 5}, "the axis of size 6 is no a x b"),
        ("a b -> b a", {"a": 5}, "the axis of size 6 is no a"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(pattern, sizes, message):
    with pytest.raises(ValueError, match=message):
        rearrange(pattern, **sizes).forward([Counting(np.zeros((6, 2)))])
