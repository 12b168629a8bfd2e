"""Loads a model from files of safetensors: compare, read everything, then replace."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from armillary._checks import check_instance, check_one_of
from armillary._traceback import hides_frames
from armillary.checkpoint._leaves import as_restored, stored_sharding
from armillary.checkpoint._selection import (
    Paths,
    RestoreReport,
    as_paths,
    is_inside,
)
from armillary.checkpoint._writer import announcing_errors
from armillary.cluster._join import get_peers
from armillary.distribute._global_arrays import place_parts
from armillary.distribute.replica._program_mesh import without_program_mesh
from armillary.errors import CheckpointError, CheckpointMismatchError
from armillary.pretrained._arrays import Arrays
from armillary.pretrained._files import Opened, check_dtypes, open_tensors
from armillary.pretrained._match import (
    Match,
    cast_to,
    check_rows,
    count_differences,
    find_left,
    list_differences,
    match_files,
)
from armillary.pretrained._names import Names
from armillary.pretrained._views import View, naming_casts

_NOTHING = "Nothing was loaded."
_USE_NAMES = 'Use `names=pretrained.Names([("wte.weight", "embed/embedding"), ...])`.'


@hides_frames
def load(
    model: Any,
    path: str | os.PathLike[str] | Mapping[str, Any],
    names: Names,
    *,
    cast: bool = False,
    may_differ: Paths = (),
) -> RestoreReport:
    """Loads a model from files of safetensors, in place.

    Each array keeps its sharding, and each process reads only the parts of its own
    devices. The files and the model must fit completely, or nothing is loaded. Random
    keys, metrics and optimizers are not loaded. All processes must call it.

    Args:
        model: The model, such as an `nnx.Module`, a Keras model, a dictionary of
            parameters, or a dictionary that holds an Equinox model. If memory has no
            room for its old and new arrays at once, about an eighth of them is replaced
            at a time, and an error in between deletes those that were replaced.
        path: The folder of a model, the index of several files
            (`model.safetensors.index.json`), or one file. Every process must see it. A
            dictionary of NumPy arrays by name is possible, too, for other formats. The
            model does not share memory with them.
        names: The table of names.
        cast: Whether a float of another dtype is cast to the model's dtype. By default,
            it is a difference. A value that does not fit is an error. Floats in 8 bits
            are never cast, because they have a scale in another tensor.
        may_differ: Paths in the model, such as `"classifier"`. Each of these parts is
            loaded completely, or is left as it is.

    Returns:
        A report: the paths that were loaded and left, and the tensors that were not
        used.

    Raises:
        ImportError: If `safetensors` is not installed.
        TypeError: If `names` is not a `Names`, the model holds no arrays of JAX where
            the table names one, or a dictionary of tensors holds something else.
        ValueError: If an argument has a wrong value, or two rows name one tensor.
        FileNotFoundError: If there is no such file.
        CheckpointDamageError: If a file is damaged, or one of several is missing.
        CheckpointMismatchError: If the files and the model differ.
        CheckpointError: If processes see different files.
    """
    check_instance("names", names, Names, _USE_NAMES)
    check_one_of("cast", cast, (True, False))
    parts = as_paths("may_differ", may_differ)
    peers = get_peers()
    arrays = Arrays(model, names)
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_program_mesh())
        # Opening may fail in one process alone, and the others must not wait for it.
        with announcing_errors():
            opened = stack.enter_context(open_tensors(path))
        digest = "" if peers.is_alone else opened.digest
        digests = peers.gather("the safetensors to load", digest)

        # From here to the reading, an error is the same in all processes.
        _check_same(digests, opened)
        match = _compare(opened, names, arrays, cast, parts)
        left = find_left(parts, match.differences)
        taken: dict[str, View] = {}
        for name, view in match.views.items():
            if not is_inside(name, left):
                taken[name] = view

        def read(names: Sequence[str]) -> dict[str, Any]:
            new: dict[str, Any] = {}
            # In parts, an earlier part may have replaced arrays. A note says so.
            outcome = _NOTHING if len(names) == len(taken) else ""
            with announcing_errors():
                for name in names:
                    leaf = arrays.by_path[name]
                    with naming_casts(name, outcome):
                        new[name] = _read(cast_to(taken[name], leaf), leaf)
            # No process may keep its old values if the others have the new ones.
            peers.gather("the values of safetensors", json.dumps(len(new)))
            return new

        with announcing_errors():
            _check_ties(match, arrays)
        arrays.replace([*taken], read)

    kept = arrays.by_path.keys() - taken.keys()
    return RestoreReport(
        path=opened.path,
        restored=tuple(sorted(taken)),
        kept=tuple(sorted(kept)),
        unused=_find_unused(opened, match, left),
        differences=tuple(match.differences.values()),
    )


def _find_unused(opened: Opened, match: Match, left: set[str]) -> tuple[str, ...]:
    """Returns the tensors that no row uses, or that belong only to parts that stay."""
    unused: list[str] = []
    for name in sorted(opened.tensors):
        paths = match.used.get(name, ())
        if all(is_inside(path, left) for path in paths):
            unused.append(name)
    return tuple(unused)


def _check_same(digests: list[str], opened: Opened) -> None:
    others = [i for i, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(
            f"`path` is {opened.path!r}, whose tensors are not the same in process "
            f"{others[0]} of {len(digests)} as in process 0. Put the files into a "
            f"directory that all processes see. {_NOTHING}"
        )


def _compare(
    opened: Opened, names: Names, arrays: Arrays, cast: bool, parts: tuple[str, ...]
) -> Match:
    """Returns the views for the model; raises if it differs outside of `parts`."""
    check_rows(names, arrays.by_path, opened.tensors)
    match = match_files(names, opened.tensors, arrays.by_path, cast)

    refused: dict[str, str] = {}
    for name, line in match.differences.items():
        if not is_inside(name, parts):
            refused[name] = line
    if refused:
        raise CheckpointMismatchError(
            f"`path` is {opened.path!r}, and {count_differences(refused)} between it "
            f"and the model, by the table `names`:\n{list_differences(refused)}\n"
            "Build the model in the size of the file, or correct the table. "
            "`(name, None)` is a row for a tensor of no use, and `(None, path)` a row "
            "for an array that no file has. "
            f"{_advise(match, arrays, cast)}{_NOTHING}"
        )
    check_dtypes(opened, match.used)
    return match


def _advise(match: Match, arrays: Arrays, cast: bool) -> str:
    """Returns a hint if dtypes differ."""
    advice: set[str] = set()
    for name, view in match.views.items():
        leaf = arrays.by_path.get(name)
        if leaf is None or name not in match.differences:
            continue
        if not cast and cast_to(view, leaf) is not view:
            advice.add("`cast=True` casts floats to the model's dtypes. ")
        if "float8" in view.dtype.name and view.dtype != leaf.dtype:
            advice.add(
                "Floats in 8 bits have a scale in another tensor, so they are not "
                "cast: compute the values, and pass a dictionary of arrays. "
            )
    return "".join(sorted(advice))


def _check_ties(match: Match, arrays: Arrays) -> None:
    """Raises if a tied tensor differs from the other one, where this process reads."""
    for name, path, view in match.ties:
        other = match.views.get(path)
        leaf = arrays.by_path.get(path)
        if other is None or leaf is None:
            continue  # The array differs, and `may_differ` leaves it as it is.
        if not _are_equal(view, other, leaf):
            raise CheckpointMismatchError(
                f"`names` marks {name!r} as tied to `{path}`, but their values differ "
                "in the file. Build the model with an array of its own for it, and "
                f"name that array in the row. {_NOTHING}"
            )


def _are_equal(first: View, second: View, leaf: Any) -> bool:
    """Returns whether two views are equal in the parts of an array on our devices."""
    if first.shape != second.shape:
        return False
    for index in _own_indices(leaf):
        # A number that is not a number is equal to itself here.
        if not np.array_equal(first[index], second[index], equal_nan=True):
            return False
    return True


def _own_indices(leaf: Any) -> list[Any]:
    """Returns the index of each different part on the devices of this process."""
    shape = tuple(leaf.shape)
    if not isinstance(leaf, jax.Array):
        return [(slice(None),) * len(shape)]
    indices = leaf.sharding.addressable_devices_indices_map(shape)
    return list({str(index): index for index in indices.values()}.values())


def _read(view: View, leaf: Any) -> Any:
    """Returns the values of a view as an array like the one of the model."""
    sharding = stored_sharding(leaf)
    if sharding is None:
        return as_restored(view.read_whole(), leaf)
    return place_parts(view, sharding)
