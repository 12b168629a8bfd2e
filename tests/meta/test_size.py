"""Tests of the figures of `make size`."""

from tests.meta.size import measure

SOURCE = '''\
"""Says what it is."""

# A comment.
a, b = 1, 2  # unrelated
a, b = b, a


def f(x):
    """Returns a number."""
    return x
'''


def test_the_figures_of_a_file():
    size = measure(SOURCE)

    assert size.lines == 10
    assert size.code_lines == 4
    assert size.tokens == 7 + 7 + 6 + 2
    assert size.tuples == 1
    assert size.comments == 1
    assert size.whats == 1
