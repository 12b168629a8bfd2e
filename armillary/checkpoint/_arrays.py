"""Writes and reads the arrays of a checkpoint. Only this file knows Orbax.

Orbax stores a flat dictionary from path to array in the item `arrays`, as Zarr arrays
in OCDBT files. Each process writes its own files below `arrays/ocdbt.process_<k>`, and
`merge_arrays` adds the common index of all of them. Nothing here waits for another
process.
"""

import asyncio
import functools
import logging
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from etils import epath

from armillary._process import get_process
from armillary.checkpoint._content import LeafSpec, group_by_bytes
from armillary.checkpoint._folder import as_plain
from armillary.checkpoint._storage import find_files

_ARRAYS = "arrays"
# If an array has copies on several devices, each of them writes a part of at least this
# size. For each shape, Orbax compiles a program that cuts the part.
_MIN_PART_BYTES = 1 << 16
_GROUP_BYTES = 256 << 20
"""The most bytes that a process reads at a time, unless one array is larger."""


def copy_arrays(
    folder: epath.Path, arrays: Mapping[str, jax.Array | np.ndarray]
) -> Callable[[], None]:
    """Starts writing this process's part; returns once the arrays may change again.

    It has copied device memory. For CPU devices, it holds a reference that keeps XLA
    from reusing a donated buffer (tested).

    Returns:
        A function that waits until the files are written, or raises the error that
        prevented it.
    """
    import orbax.checkpoint as ocp

    _quiet_failures()
    if not arrays:
        return lambda: None
    handler = _make_handler()
    place = as_plain(folder) / _ARRAYS

    def begin() -> list[Any]:
        args = ocp.args.PyTreeSave(dict(arrays))
        return asyncio.run(handler.async_save(place, args=args)) or []

    # A thread of its own, because a notebook runs an event loop in the main thread. It
    # is also outside the mesh of the program, which is not the mesh of a part.
    with ThreadPoolExecutor(1) as thread:
        futures = thread.submit(begin).result()

    def wait() -> None:
        for future in futures:
            future.result()
        handler.close()

    return wait


def count_moved(direction: str) -> int:
    """Returns the bytes that TensorStore has moved since the program began.

    Args:
        direction: `"written"` or `"read"`.
    """
    import tensorstore as ts

    total = 0
    for metric in ts.experimental_collect_matching_metrics("/tensorstore/kvstore/"):
        # One for each kind of file system, such as `kvstore/file/bytes_written`.
        if metric["name"].endswith(f"/bytes_{direction}"):
            total += sum(entry["value"] for entry in metric["values"])
    return total


def find_own_files(folder: epath.Path) -> Iterator[epath.Path]:
    """Yields the files that only this process has written."""
    own = folder / _ARRAYS / f"ocdbt.process_{get_process().index}"
    yield from find_files(own)


def merge_arrays(folder: epath.Path) -> None:
    """Writes the common index of the files of all processes. One process calls it."""
    _make_handler().finalize(as_plain(folder) / _ARRAYS)


def read_arrays(
    path: epath.Path,
    shardings: Mapping[str, jax.sharding.Sharding | None],
    specs: Mapping[str, LeafSpec] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the named arrays of a folder in their shardings; `None` means NumPy.

    Each process reads only the parts on its own devices. Arrays with a known
    description are read in groups, because Orbax holds a copy of all arrays of a group.

    Raises:
        LookupError: If the folder has no values of an array.
    """
    import orbax.checkpoint as ocp

    handler = _make_handler()
    arrays: dict[str, Any] = {}
    for names in _group(shardings, specs):
        args: dict[str, Any] = {}
        for name in names:
            sharding = shardings[name]
            if sharding is None:
                args[name] = ocp.RestoreArgs(restore_type=np.ndarray)
            else:
                args[name] = ocp.ArrayRestoreArgs(sharding=sharding)
        # Only this item is read, because other files next to it have no checksum.
        tree = ocp.args.PyTreeRestore(
            item=dict.fromkeys(args, 0), restore_args=args, partial_restore=True
        )
        found = handler.restore(as_plain(path) / _ARRAYS, args=tree)
        # Orbax 0.12.8 returns the placeholder of an array that the folder lacks.
        missing = [name for name in args if isinstance(found.get(name, 0), int)]
        if missing:
            raise LookupError(f"it has no values of {', '.join(missing[:10])}")
        arrays |= found
    return arrays


def count_buffer_bytes(sizes: Collection[int]) -> int:
    """Returns the most host memory that a read takes next to the arrays it makes.

    Args:
        sizes: The bytes of this process's part of each array.
    """
    largest = max(sizes, default=0)
    group = min(sum(sizes), max(_GROUP_BYTES, largest))
    return 2 * group  # TensorStore reads into one copy, and Orbax puts it together.


def _group(
    shardings: Mapping[str, jax.sharding.Sharding | None],
    specs: Mapping[str, LeafSpec],
) -> list[list[str]]:
    """Returns the names of arrays in groups that take a limited part of the memory."""
    sizes: dict[str, int] = {}
    for name, sharding in shardings.items():
        sizes[name] = specs[name].own_bytes(sharding) if name in specs else 0
    return group_by_bytes(sizes, _GROUP_BYTES)


def _make_handler() -> Any:
    import orbax.checkpoint as ocp

    types = ocp.type_handlers
    registry = types.create_type_handler_registry(
        (np.ndarray, types.NumpyHandler()),
        (
            jax.Array,
            types.ArrayHandler(min_slice_bytes_for_replica_parallel=_MIN_PART_BYTES),
        ),
    )
    # Compression would make trained weights only 7 % smaller. It would take three
    # quarters of a save's CPU time, which steps on a CPU need.
    return ocp.PyTreeCheckpointHandler(
        use_compression=False, type_handler_registry=registry
    )


@functools.cache
def _quiet_failures() -> None:
    """Drops log lines of Orbax on a failed save, because the final error has them."""

    def is_kept(record: logging.LogRecord) -> bool:
        if not record.exc_info:
            return True
        _, _, trace = record.exc_info
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
        return not any("orbax" in file for file in files)

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_kept)
