"""Finds and reads files of safetensors: one file, or several with an index.

The library `safetensors` checks a file when it is opened. Then the file is mapped into
memory, so a part of a tensor is read without the rest of it. The library can do that,
too, but not for the dtypes that only `ml_dtypes` has, such as `float8_e4m3fn`.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from armillary._checks import check_path, list_lines
from armillary._optional import import_optional
from armillary.errors import CheckpointDamageError, CheckpointError
from armillary.pretrained._views import Box, View, lengths_of

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
UNFINISHED = ".model*.safetensors.incomplete"
"""The names of files that a save has not completed."""
SHARDS = "model-*-of-*.safetensors"
"""The names of the files of a large model, which an index completes."""

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
"""The names of the format for dtypes that NumPy has, with `ml_dtypes`."""


class TensorView(View):
    """A tensor in an open file.

    Args:
        data: The bytes of the tensor.
        kind: The name of its dtype in the format.
        shape: Its shape.
    """

    def __init__(self, data: np.ndarray, kind: str, shape: Sequence[int]) -> None:
        self._data = data
        self.kind = kind
        self.shape = tuple(shape)
        # A tensor of another dtype can be in the file, if nothing uses it.
        self.dtype = DTYPES.get(kind, np.dtype(np.void))

    def read(self, box: Box) -> np.ndarray:
        lengths = lengths_of(box)
        if 0 in lengths:
            return np.empty(lengths, self.dtype)
        mapped = self._data.view(self.dtype).reshape(self.shape)
        return read_slice(mapped, box)

    def ends(self) -> bytes:
        """Returns the first and the last bytes."""
        return self._data[:16].tobytes() + self._data[-16:].tobytes()

    def __str__(self) -> str:
        dtype = self.dtype if self.kind in DTYPES else self.kind
        return f"{dtype} {self.shape}"


class HostView(View):
    """An array of the program, such as one that another reader has read."""

    def __init__(self, name: Any, array: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(
                f"`path` is a dictionary with the key {name!r}, but each key must be "
                "the name of a tensor, a string."
            )
        self._array = _as_numpy(name, array)
        self.shape = self._array.shape
        self.dtype = self._array.dtype

    def read(self, box: Box) -> np.ndarray:
        # A copy, because an array of JAX on a CPU can share the memory of an array of
        # NumPy. The user may change or reuse that memory.
        return np.array(self._array[box])

    def ends(self) -> bytes:
        """Returns the first and the last values."""
        flat = self._array.flat
        return flat[:4].tobytes() + flat[-4:].tobytes()


def _as_numpy(name: str, array: Any) -> np.ndarray:
    problem: Exception | None = None
    try:
        converted = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        # Such as a tensor of PyTorch in bfloat16, which NumPy alone does not have.
        problem = error
    else:
        if converted.dtype != object:
            return converted
    why = f": {problem}" if problem is not None else ""
    raise TypeError(
        f"`path` is a dictionary in which {name!r} is of type {type(array).__name__}, "
        f"but each value must be an array that NumPy can hold{why}. Use an array of "
        "NumPy, such as `tensor.float().numpy()` for a tensor of PyTorch."
    ) from problem


def read_slice(mapped: np.ndarray, box: Box) -> np.ndarray:
    """Returns a part of a tensor in memory. Every byte of a tensor comes from here."""
    return np.array(mapped[box])


class Opened(NamedTuple):
    """The tensors of a model in files, while these are open."""

    path: str
    tensors: Mapping[str, "TensorView | HostView"]

    @property
    def digest(self) -> str:
        """A text that differs if names, shapes, dtypes or a few values differ.

        Another copy of a model, such as one of an earlier training, has the same names.
        To compare all values, each process would have to read all of them.
        """
        lines: list[str] = []
        for name, view in sorted(self.tensors.items()):
            lines.append(f"{name}: {view} {view.ends().hex()}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def list_tensors(path: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and the dtype of each tensor of a model in safetensors.

    It reads only the headers of the files.

    Args:
        path: The folder of a model, its index, or one file.

    Returns:
        A dictionary by the names of the tensors, sorted.

    Raises:
        ImportError: If `safetensors` is not installed.
        FileNotFoundError: If there is no such file.
        CheckpointError: If a tensor has a dtype that NumPy does not have.
        CheckpointDamageError: If a file is damaged, or one of several is missing.
    """
    with open_tensors(path) as opened:
        check_dtypes(opened, opened.tensors)
        return {
            name: jax.ShapeDtypeStruct(view.shape, view.dtype)
            for name, view in sorted(opened.tensors.items())
        }


@contextlib.contextmanager
def open_tensors(path: Any) -> Iterator[Opened]:
    """Opens the files of a model for a while, or looks at a dictionary of arrays."""
    if isinstance(path, Mapping):
        views = {name: HostView(name, array) for name, array in path.items()}
        yield Opened("a dictionary of arrays", views)
        return
    safetensors = import_safetensors()
    place = as_local_path("path", path)
    files = _find_files(place)
    tensors: dict[str, TensorView] = {}
    for file, names in files.items():
        try:
            with safetensors.safe_open(file, "np"):
                found = _map_tensors(file)
        except (safetensors.SafetensorError, OSError) as error:
            raise _damaged(file, str(error)) from error
        missing = sorted(set(names) - found.keys())
        if missing:
            raise _damaged(file, f"it lacks {missing[0]}, which the index lists")
        tensors |= {name: found[name] for name in names or found}
    yield Opened(str(place), tensors)


def _map_tensors(file: Path) -> dict[str, TensorView]:
    """Returns the tensors of a file that `safetensors` has checked."""
    data = np.memmap(file, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    tensors: dict[str, TensorView] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            own = data[start + begin : start + end]
            tensors[name] = TensorView(own, entry["dtype"], entry["shape"])
    return tensors


def as_local_path(name: str, value: Any) -> Path:
    """Returns an absolute path, and refuses an address such as `gs://`."""
    path = check_path(name, value)
    if "://" in path:
        raise ValueError(
            f"`{name}` is {path!r}, but files of safetensors are mapped into memory, "
            "so they must be in a file system. Mount the bucket as a folder, or copy "
            "the files."
        )
    return Path(path)


def import_safetensors() -> Any:
    title = "`safetensors`, on which `armillary.pretrained` runs,"
    return import_optional("safetensors", title, "pretrained")


def check_dtypes(opened: Opened, names: Any) -> None:
    """Raises if a tensor has a dtype that NumPy does not have."""
    lines: list[str] = []
    for name in names:
        view = opened.tensors[name]
        if isinstance(view, TensorView) and view.kind not in DTYPES:
            lines.append(f"{name}: {view}")
    if lines:
        raise CheckpointError(
            f"`path` is {opened.path!r}, in which {len(lines)} tensors have a dtype "
            f"that NumPy and `ml_dtypes` do not have:\n{list_lines(lines)}\n"
            "Convert them to `bfloat16` first, with the library that wrote them. "
            "Nothing was read."
        )


def _find_files(place: Path) -> dict[Path, list[str]]:
    """Returns the files of a model, each with its tensors if an index lists them."""
    if place.is_dir():
        indices = sorted(place.glob("*.safetensors.index.json"))
        files = sorted(place.glob("*.safetensors"))
        whole = place / WHOLE
        # In this order, as `transformers` reads a folder with both.
        if whole in files:
            return {whole: []}
        if place / INDEX in indices:
            return _read_index(place / INDEX)
        if len(indices) == 1:
            return _read_index(indices[0])
        if not indices and len(files) == 1:
            return {files[0]: []}
        found = [each.name for each in (*indices, *files)]
        raise FileNotFoundError(
            f"`path` is {str(place)!r}, but it must be a folder with "
            f"`{WHOLE}`, with `{INDEX}` and its files, or with one other file of "
            f"safetensors. It has {', '.join(found[:4]) or 'none of them'}. Use the "
            "path of one file."
        )
    is_known = place.suffix in (".safetensors", ".json")
    if not (place.is_file() and is_known):
        raise FileNotFoundError(
            f"`path` is {str(place)!r}, but it must be a file of safetensors, an index "
            f"such as `{INDEX}`, or a folder with one of them. Download the model "
            "first, in the format safetensors."
        )
    return _read_index(place) if place.suffix == ".json" else {place: []}


def _read_index(index: Path) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    try:
        places = json.loads(index.read_text())["weight_map"]
        for name, file in places.items():
            # Without its folder, so that no index leads out of the model's folder.
            own = index.parent / Path(file).name
            files.setdefault(own, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(
            index, f"it is not an index of safetensors: {error!r}"
        ) from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise _damaged(index, f"its files are missing: {', '.join(missing[:4])}")
    return files


def _damaged(file: Path, problem: str) -> CheckpointDamageError:
    return CheckpointDamageError(
        f"{str(file)!r} is damaged: {problem}. Download it again. Nothing was read.",
        damage=problem,
    )
