"""Writes files of safetensors, in the layout that `transformers` reads.

Each file is written by one process, tensor by tensor, under a temporary name. When all
files are on the disk, process 0 gives them their names. An index gets its name last, so
a folder without it is not complete.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from armillary.cluster._peers import Peers
from armillary.errors import CheckpointError
from armillary.pretrained._files import DTYPES, INDEX, UNFINISHED, WHOLE
from armillary.pretrained._views import View, naming_casts

CODES = {dtype: code for code, dtype in DTYPES.items()}
"""The names of the format, by dtype."""

_OWN_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class File(NamedTuple):
    """A file to write: its name, and its tensors in their order."""

    name: str
    tensors: dict[str, View]

    @property
    def unfinished(self) -> str:
        return f".{self.name}.incomplete"


def divide(place: Path, tensors: Mapping[str, View], most: int) -> list[File]:
    """Returns the files, each with as many tensors as fit into it."""
    if place.suffix == ".safetensors":
        return [File(place.name, _align(tensors))]

    groups: list[dict[str, View]] = [{}]
    size = 0
    for name, view in tensors.items():
        own = _count_bytes(view)
        is_full = size + own > most
        # A tensor that is larger than a file has a file of its own.
        if is_full and groups[-1]:
            groups.append({})
            size = 0
        groups[-1][name] = view
        size += own

    count = len(groups)
    if count == 1:
        return [File(WHOLE, _align(groups[0]))]
    files: list[File] = []
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05}-of-{count:05}.safetensors"
        files.append(File(name, _align(group)))
    return files


def _align(tensors: Mapping[str, View]) -> dict[str, View]:
    """Returns the tensors in an order in which each one begins at its alignment.

    A reader that maps a file into memory can use a tensor without a copy only if its
    offset is a multiple of the size of an item. So the tensors with the largest items
    come first, as `safetensors` itself writes them.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    return {name: tensors[name] for name in names}


def _count_bytes(view: View) -> int:
    return int(np.prod(view.shape, dtype=np.int64)) * view.dtype.itemsize


def prepare(folder: Path, files: Sequence[File], *, is_folder: bool) -> None:
    """Makes the folder, and removes the files of a save that was killed."""
    with _explaining(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if (folder / file.name).is_dir():
                raise IsADirectoryError(f"{file.name} is a folder")
            (folder / file.unfinished).unlink(missing_ok=True)

        # A folder belongs to one program at a time. A single file may be next to files
        # of other programs, which may write at this moment.
        if is_folder:
            for path in folder.glob(UNFINISHED):
                path.unlink(missing_ok=True)


class _Output:
    """A file to write, or none. After its first problem, it takes no more bytes."""

    def __init__(self, path: Path | None) -> None:
        self.problem = ""
        self._stream: BinaryIO | None = None
        if path is not None:
            with self._noting():
                self._stream = path.open("wb")

    def write(self, data: Any) -> None:
        if self._stream is not None and not self.problem:
            with self._noting():
                self._stream.write(data)

    def close(self) -> None:
        """Waits until the file is on the disk."""
        if self._stream is None:
            return
        with self._noting(), self._stream:
            if not self.problem:
                self._stream.flush()
                os.fsync(self._stream.fileno())

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or str(error)


def write_file(folder: Path, file: File, is_own: bool) -> str:
    """Writes a file, if it is this process's own; returns its problem, if any.

    All processes must take part to the end, because reading an array may need all.
    """
    output = _Output(folder / file.unfinished if is_own else None)
    with contextlib.closing(output):
        output.write(_make_header(file.tensors))
        for name, view in file.tensors.items():
            with naming_casts(name, "Nothing was saved."):
                flat = np.ascontiguousarray(view.read_whole()).reshape(-1)
            output.write(flat.view(np.uint8).data)
    return output.problem


def _make_header(tensors: Mapping[str, View]) -> bytes:
    """Returns the length of the header and the header, as the format has them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, view in tensors.items():
        end = offset + _count_bytes(view)
        header[name] = {
            "dtype": CODES[view.dtype],
            "shape": list(view.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def remove_unfinished(folder: Path, files: Sequence[File]) -> None:
    """Removes the files of a save that failed."""
    for file in files:
        with contextlib.suppress(OSError):
            (folder / file.unfinished).unlink(missing_ok=True)


def check_written(
    folder: Path, files: Sequence[File], problem: str, peers: Peers
) -> None:
    """Raises in all processes if one of them could not write."""
    problems = peers.gather("the files of safetensors", problem)
    failed = [index for index, text in enumerate(problems) if text]
    if not failed:
        return
    if peers.index == 0:
        remove_unfinished(folder, files)
    raise CheckpointError(
        f"`path` is {str(folder)!r}, to which process {failed[0]} of {peers.count} "
        f"could not write: {problems[failed[0]]}. Make room, or use a different "
        "folder. Earlier files were not changed."
    )


def finish(folder: Path, files: Sequence[File], *, is_folder: bool) -> None:
    """Gives the files their names, and removes the files of an earlier save."""
    names = {file.name for file in files}
    index = folder / INDEX
    has_index = len(files) > 1
    with _explaining(folder):
        # ORDER: the earlier save is complete until the new one is. Only if files of
        # both have the same names, there is no index between them, and so no model.
        has_equal_names = any((folder / name).exists() for name in names)
        if has_index and has_equal_names:
            index.unlink(missing_ok=True)

        for file in files:
            (folder / file.unfinished).replace(folder / file.name)
        if has_index:
            temporary = folder / f".{INDEX}.incomplete"
            temporary.write_text(_make_index(files))
            temporary.replace(index)
        if not is_folder:
            return

        # Readers prefer a whole file to an index, so that index counts no more.
        if not has_index:
            index.unlink(missing_ok=True)
        for path in folder.iterdir():
            if _OWN_FILE.fullmatch(path.name) and path.name not in names:
                path.unlink()


def _make_index(files: Sequence[File]) -> str:
    places: dict[str, str] = {}
    size = 0
    for file in files:
        places |= dict.fromkeys(file.tensors, file.name)
        size += sum(map(_count_bytes, file.tensors.values()))
    content = {"metadata": {"total_size": size}, "weight_map": places}
    return json.dumps(content, indent=2) + "\n"


@contextlib.contextmanager
def _explaining(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"`path` is {str(folder)!r}, which cannot be written: {error}. Use a "
            "folder that this process may write."
        ) from error
