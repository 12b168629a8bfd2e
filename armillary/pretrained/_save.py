"""Saves a model as files of safetensors, by the table that loads it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from armillary._checks import check_instance, check_positive_int
from armillary._traceback import hides_frames
from armillary.checkpoint._writer import agree_on, announcing_errors
from armillary.cluster._join import get_peers
from armillary.cluster._peers import Peers
from armillary.distribute.replica._program_mesh import without_program_mesh
from armillary.errors import CheckpointMismatchError
from armillary.pretrained._arrays import Arrays, ArrayView
from armillary.pretrained._files import as_local_path, import_safetensors
from armillary.pretrained._links import Link, link_model
from armillary.pretrained._match import (
    check_rows,
    count_differences,
    find_matching,
    list_differences,
    may_be_cast,
)
from armillary.pretrained._names import Names
from armillary.pretrained._views import Cast, Indexed, View
from armillary.pretrained._writer import (
    CODES,
    File,
    check_written,
    divide,
    finish,
    prepare,
    remove_unfinished,
    write_file,
)

MAX_FILE_BYTES = 5_000_000_000


@hides_frames
def save(
    model: Any,
    path: str | os.PathLike[str],
    names: Names,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: Any = None,
) -> list[str]:
    """Saves a model as files of safetensors, by the table that loads it.

    No process holds more than one tensor of a file. In a job, the processes share the
    files, and all raise an error if one of them cannot write. All processes must call
    it, with a folder that all see.

    Args:
        model: The model, as for `load`.
        path: A folder, which is created if necessary, or a path that ends with
            `.safetensors`, for one file. Files of an earlier save are replaced.
        names: The table of names.
        max_file_bytes: The most bytes of tensors in one file of a folder. A larger
            model becomes several files with an index. A larger tensor has a file of its
            own.
        dtype: The dtype for all floats of at least 16 bits in the files, such as
            `"bfloat16"`. By default, their own.

    Returns:
        The paths of the files.

    Raises:
        ImportError: If `safetensors` is not installed.
        TypeError: If an argument is of the wrong kind, or the model holds no arrays of
            JAX where the table names one.
        ValueError: If an argument has a wrong value, or two rows name one array or one
            tensor.
        CheckpointMismatchError: If the table does not name all arrays of the model, or
            a value does not fit into `dtype`.
        CheckpointError: If a file cannot be written.
    """
    check_instance("names", names, Names, "Use the table of `pretrained.load`.")
    check_positive_int("max_file_bytes", max_file_bytes)
    import_safetensors()  # Without it, nothing could be loaded again.
    place = as_local_path("path", path)
    peers = get_peers()
    floats = as_float_dtype("dtype", dtype)
    is_folder = place.suffix != ".safetensors"
    folder = place if is_folder else place.parent
    with without_program_mesh():
        tensors = _make_tensors(names, Arrays(model, names), floats)
        files = divide(place, tensors, max_file_bytes)
        agree_on(
            "a save of safetensors",
            lambda: prepare(folder, files, is_folder=is_folder),
            peers,
        )
        problem = _write_files(folder, files, peers)
        check_written(folder, files, problem, peers)
        agree_on(
            "the names of safetensors",
            lambda: finish(folder, files, is_folder=is_folder),
            peers,
        )
    return [str(folder / file.name) for file in files]


def _write_files(folder: Path, files: Sequence[File], peers: Peers) -> str:
    """Writes this process's share of the files; returns the first problem, if any."""
    problem = ""
    try:
        with announcing_errors():
            for number, file in enumerate(files):
                is_own = number % peers.count == peers.index
                found = write_file(folder, file, is_own)
                problem = problem or found
    except BaseException:
        remove_unfinished(folder, files)
        raise
    return problem


def as_float_dtype(name: str, value: Any) -> np.dtype | None:
    """Returns a dtype of floats that the format has, or raises."""
    if value is None:
        return None
    try:
        dtype = np.dtype(value)
    except TypeError:
        dtype = np.dtype(np.void)
    if dtype not in CODES or not may_be_cast(dtype):
        raise ValueError(
            f"`{name}` is {value!r}, but it must be a dtype of floats that safetensors "
            f'have, with at least 16 bits. Use `{name}="bfloat16"`.'
        )
    return dtype


def _make_tensors(
    names: Names, arrays: Arrays, dtype: np.dtype | None
) -> dict[str, View]:
    """Returns the tensors of the files, in the order of the table."""
    tensors: dict[str, View] = {}
    lines: dict[str, str] = {}
    named: set[str] = set()
    for row in names.rows:
        if not row.files:
            named |= find_matching(row.models, arrays.by_path)
        elif row.models and not row.is_tied:
            for link in link_model(row, arrays.shapes):
                named.update(link.paths)
                _add_tensors(link, arrays, tensors, lines)

    # With the names to write, because a second row would replace the first one's array.
    check_rows(names, arrays.by_path, tensors)

    for path, leaf in arrays.by_path.items():
        spec = f"{np.dtype(leaf.dtype)} {tuple(leaf.shape)}"
        if path not in named:
            lines[path] = f"+ {path}: {spec}  only in the model"
        elif np.dtype(leaf.dtype) not in CODES:
            lines[path] = f"~ {path}: {spec}, a dtype that safetensors do not have"
    if lines:
        raise CheckpointMismatchError(
            f"{count_differences(lines)} between the model and the table `names`:\n"
            f"{list_differences(lines)}\n"
            "Correct the table. `(None, path)` is a row for an array that is not "
            "saved. Nothing was saved."
        )
    if dtype is not None:
        for name, view in tensors.items():
            if may_be_cast(view.dtype):
                tensors[name] = Cast(view, dtype)
    return tensors


def _add_tensors(
    link: Link, arrays: Arrays, tensors: dict[str, View], lines: dict[str, str]
) -> None:
    """Adds the tensors of a link, or a line for an array that does not fit."""
    num_stacked = len(link.row.stacked)
    for path in link.paths:
        leaf = arrays.by_path.get(path)
        if leaf is None:
            lines[path] = f"- {path}: only in the table, which names it as a part"
            return
        found = tuple(leaf.shape[:num_stacked])
        has_axes = len(found) == num_stacked
        if found != link.counts or not has_axes:
            fields = ", ".join(f"{{{field}}}" for field in link.row.stacked)
            lines[path] = f"~ {path}: {tuple(leaf.shape)} has no such axes for {fields}"
            return

    try:
        for index, names in link.files.items():
            views: list[View] = []
            for path in link.paths:
                whole = ArrayView(arrays.by_path[path])
                views.append(_index(whole, index))
            # The last transform of a load is undone first.
            for transform in reversed(link.row.transforms):
                views = transform.backward(views)
            tensors |= zip(names, views, strict=True)
    except ValueError as error:
        for path in link.paths:
            lines[path] = f"~ {path}: it does not fit its row: {error}"


def _index(view: View, index: Sequence[int]) -> View:
    for place in index:
        view = Indexed(view, place)
    return view
