"""Compares the tensors of files with the arrays of a model, by a table of names."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from armillary._checks import list_lines
from armillary.checkpoint._selection import find_differences, is_inside
from armillary.pretrained._links import Link, Numbers, link_files
from armillary.pretrained._names import Names, Pattern
from armillary.pretrained._views import Cast, Stacked, View

Tensors = Mapping[str, View]
"""The tensors of files, by name."""
Leaves = Mapping[str, Any]
"""The arrays of a model, by path."""


@dataclasses.dataclass
class Match:
    """The comparison of files with a model.

    Attributes:
        views: The values for the arrays of the model, by path.
        ties: Views of tensors that must be equal to the value of a path.
        used: The tensors that rows name, except rows for tensors of no use, each with
            the paths of its arrays.
        differences: A line for each array or tensor that does not fit, by its name.
    """

    views: dict[str, View]
    ties: list[tuple[str, str, View]]
    used: dict[str, tuple[str, ...]]
    differences: dict[str, str]


def match_files(names: Names, tensors: Tensors, arrays: Leaves, cast: bool) -> Match:
    """Returns the views for a model, and everything that differs."""
    match = Match(views={}, ties=[], used={}, differences={})
    ignored: set[str] = set()
    left: set[str] = set()
    for row in names.rows:
        if not row.models:
            ignored |= find_matching(row.files, tensors)
        elif not row.files:
            left |= find_matching(row.models, arrays)
        else:
            for link in link_files(row, tensors, arrays):
                _add_link(match, link, tensors, arrays)

    # A row with both sides counts more than a row with one.
    ignored -= match.used.keys()
    left -= match.views.keys()
    _refuse_loose_ties(match)

    saved: dict[str, str] = {}
    for path, view in match.views.items():
        if cast and path in arrays:
            view = cast_to(view, arrays[path])
        saved[path] = str(view)

    own: dict[str, str] = {}
    for path in arrays.keys() - left:
        own[path] = _spec(arrays[path])

    lines = find_differences(saved, own, "the file", "the model")
    for name in tensors.keys() - match.used.keys() - ignored:
        lines |= _describe_unnamed(name, tensors[name], match, own)
    # A line of a link says more about its array.
    match.differences = lines | match.differences
    return match


def _describe_unnamed(
    name: str, tensor: View, match: Match, own: Mapping[str, str]
) -> dict[str, str]:
    """Returns the line for a tensor that no row names.

    Its name may be the path of an array by accident, which loads nothing.
    """
    if name in match.views:
        # The array has its value from another tensor, so it keeps its own line, if any.
        return {f"{name} in the file": f"- {name}: {tensor}  only in the file"}
    if name in own:
        both = f"{tensor} in the file, {own[name]} in the model"
        return {name: f"~ {name}: {both}, but no row names them"}
    return {name: f"- {name}: {tensor}  only in the file"}


def check_rows(names: Names, arrays: Collection[str], files: Collection[str]) -> None:
    """Raises if two rows name one tensor or one array, except tied tensors."""
    in_files: dict[str, str] = {}
    in_model: dict[str, str] = {}
    for row in names.rows:
        if not (row.files and row.models):
            continue
        shown = f"({_show(row.files)}, {_show(row.models)})"
        _note(in_files, find_matching(row.files, files), shown)
        if not row.is_tied:
            _note(in_model, find_matching(row.models, arrays), shown)


def _note(seen: dict[str, str], found: Collection[str], row: str) -> None:
    for name in found:
        if name in seen:
            raise ValueError(
                f"`names` has two rows for {name!r}: {seen[name]} and {row}. Remove "
                "one of them, or mark a tensor that repeats another one with "
                "`pretrained.tied`."
            )
        seen[name] = row


def make_views(link: Link, tensors: Tensors) -> list[View]:
    """Returns a view for each array of a link."""
    # For each array, the view of each index along the stacked axes.
    layers: list[dict[Numbers, View]] = [{} for _ in link.paths]
    for index, names in link.files.items():
        views: Sequence[View] = [tensors[name] for name in names]
        for transform in link.row.transforms:
            views = transform.forward(views)
        for by_index, view in zip(layers, views, strict=True):
            by_index[index] = view
    return [_stack(by_index, link.counts) for by_index in layers]


def count_differences(differences: Collection[str]) -> str:
    one = len(differences) == 1
    return "1 array differs" if one else f"{len(differences)} arrays differ"


def list_differences(differences: Mapping[str, str]) -> str:
    """Returns the lines of all differences, for a message."""
    return list_lines(differences[name] for name in sorted(differences))


def find_left(may_differ: Collection[str], differences: Mapping[str, str]) -> set[str]:
    """Returns the parts of the model that stay, because they hold a difference."""
    left: set[str] = set()
    for part in may_differ:
        if any(is_inside(name, [part]) for name in differences):
            left.add(part)
    return left


def _refuse_loose_ties(match: Match) -> None:
    """Adds a line for each tied tensor that has no other tensor to be equal to."""
    for name, path, view in match.ties:
        if path not in match.views and path not in match.differences:
            match.differences[name] = (
                f"- {name}: {view}  tied to {path}, which no other row loads"
            )


def _add_link(match: Match, link: Link, tensors: Tensors, arrays: Leaves) -> None:
    """Adds the views of a link, or a line for each of its arrays that does not fit."""
    wanted = list(itertools.chain.from_iterable(link.files.values()))
    missing: list[str] = []
    for name in wanted:
        if name in tensors:
            match.used[name] = link.paths
        else:
            missing.append(name)

    # A file need not repeat a tensor that another one is equal to.
    is_absent = len(missing) == len(wanted)
    if is_absent and link.row.is_tied:
        return
    if missing or not wanted:
        shown = ", ".join(missing) or _show(link.row.files)
        for path in link.paths:
            spec = f": {_spec(arrays[path])}" if path in arrays else ""
            match.differences[path] = f"+ {path}{spec}  the file lacks {shown}"
        return

    try:
        views = make_views(link, tensors)
    except ValueError as error:
        for path in link.paths:
            match.differences[path] = f"~ {path}: {wanted[0]} does not fit: {error}"
        return
    for path, view in zip(link.paths, views, strict=True):
        if link.row.is_tied:
            match.ties.append((wanted[0], path, view))
        else:
            match.views[path] = view


def _stack(views: Mapping[Numbers, View], counts: Numbers) -> View:
    """Returns the view of all indices, one axis for each count."""
    if not counts:
        return views[()]

    # One axis at a time: the views of each index along the first axis.
    length, *others = counts
    below: list[dict[Numbers, View]] = [{} for _ in range(length)]
    for (place, *rest), view in views.items():
        below[place][tuple(rest)] = view
    stacks = [_stack(each, tuple(others)) for each in below]
    return Stacked(stacks)


def cast_to(view: View, leaf: Any) -> View:
    """Returns a view in the dtype of an array, if both may be cast."""
    may_cast = may_be_cast(view.dtype) and may_be_cast(leaf.dtype)
    if view.dtype != leaf.dtype and may_cast:
        return Cast(view, leaf.dtype)
    return view


def may_be_cast(dtype: Any) -> bool:
    """Returns whether a dtype is one of floats, but not of quantized values.

    Values in 8 bits mean something only with their scale, which is another tensor.
    """
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize > 1


def _spec(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype)} {tuple(leaf.shape)}"


def find_matching(patterns: Sequence[Pattern], names: Collection[str]) -> set[str]:
    """Returns the names that fit one of the patterns."""
    found: set[str] = set()
    for pattern in patterns:
        for name in names:
            if pattern.match(name) is not None:
                found.add(name)
    return found


def _show(patterns: Sequence[Pattern]) -> str:
    return ", ".join(repr(pattern.text) for pattern in patterns)
