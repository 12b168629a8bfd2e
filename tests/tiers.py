"""Chooses the cases of a test that `make test` runs, if all would take too long."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow_after_first(
    names: str | Sequence[str], cases: Iterable[Any], **options: Any
) -> pytest.MarkDecorator:
    """Is `pytest.mark.parametrize` with all cases but the first marked `slow`.

    `make test` touches every promise once; `make test-all` runs all cases. If a test
    has several such decorators, `make test` runs the case that comes first in all.

    Args:
        names: Names of the arguments, as `pytest.mark.parametrize` takes them.
        cases: Values of the arguments. The first case should show most of the promise.
        **options: Other arguments of `pytest.mark.parametrize`.

    Returns:
        The decorator.
    """
    num_names = len(names.split(",") if isinstance(names, str) else names)
    first, *others = cases
    slow = [_mark_slow(case, is_single=num_names == 1) for case in others]
    return pytest.mark.parametrize(names, [first, *slow], **options)


def _mark_slow(case: Any, *, is_single: bool) -> Any:
    is_marked = all(hasattr(case, name) for name in ("values", "marks", "id"))
    if is_marked:
        marks = [*case.marks, pytest.mark.slow]
        return pytest.param(*case.values, marks=marks, id=case.id)
    values = (case,) if is_single else case
    return pytest.param(*values, marks=pytest.mark.slow)
