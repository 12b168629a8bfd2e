"""Writes one checkpoint folder: each process writes its part, and process 0 commits.

::

    process 0                              each other process
    chooses the name, makes the folder
    ---------------- all agree on the name of the folder ----------------
    copies its arrays                      copies its arrays
    writes, sums and syncs its files       writes, sums and syncs its files
    waits for all sums              <----  sends its sums, or its error
    merges the index of all arrays
    writes manifest, header, checksums
    syncs and renames the folder

Training waits until the arrays are copied. Everything else happens in the background.
"""

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from etils import epath

from armillary.checkpoint._arrays import (
    copy_arrays,
    count_moved,
    find_own_files,
    merge_arrays,
    read_arrays,
)
from armillary.checkpoint._checksums import (
    Sum,
    compare_size,
    measure_all,
    write_checksums,
)
from armillary.checkpoint._content import MANIFEST, Content
from armillary.checkpoint._folder import HEADER, Saved
from armillary.checkpoint._folder import complete as complete_folder
from armillary.checkpoint._leaves import as_stored
from armillary.checkpoint._storage import sync_files, sync_tree
from armillary.cluster._peers import Peers
from armillary.distribute.replica._program_mesh import without_program_mesh
from armillary.goodput._stopwatch import Category
from armillary.lifeline._transfer import Transfer

_MAX_READ = 1 << 20
"""The most elements of an array that is read back after a save."""


class PartError(Exception):
    """The error of one or several processes that could not write their parts."""


def write_folder(
    folder: epath.Path,
    content: Content,
    peers: Peers,
    key: str,
    header: Saved | None = None,
    earlier: Sequence[threading.Thread] = (),
) -> Callable[[], None]:
    """Starts writing a checkpoint; returns once the arrays may change again.

    All processes call it.

    Args:
        folder: The unfinished folder.
        content: The values to write.
        peers: The processes that write together.
        key: A text of this save alone, under which its parts are sent.
        header: The header, in the first process.
        earlier: Threads that write earlier checkpoints. The folder gets its name after
            they have ended.

    Returns:
        A function that waits until this process's part is written. In the first
        process, it waits for the parts of all processes, and completes the folder. It
        raises the error that prevented this.
    """
    # Now, because the states may change later.
    manifest = content.as_manifest()
    write_part = _start_part(folder, content, peers)
    if peers.index:
        return lambda: peers.send_part(key, _report(write_part))

    # The program may replace its arrays from now on, and their memory must be free.
    described = dataclasses.replace(content, leaves={})
    del content

    def complete() -> None:
        sums = _collect_sums(folder, peers, key, write_part)
        if described.has_arrays:
            merge_arrays(folder)
            _read_one(folder, described)

        assert header is not None
        _write_text(folder / MANIFEST, manifest)
        _write_text(folder / HEADER, json.dumps(header.as_json()))
        # ORDER: in an object store, a checkpoint is complete with this file.
        write_checksums(folder, sums)
        sync_tree(folder)
        for thread in earlier:
            thread.join()
        complete_folder(folder, header.path)

    return complete


def _start_part(
    folder: epath.Path, content: Content, peers: Peers
) -> Callable[[], dict[str, Sum]]:
    """Copies the arrays that this process writes; returns a function that waits.

    That function returns the sums of the files. If a process of several cannot copy its
    arrays, the function raises the error, so that all processes learn it.
    """
    has_parts = content.has_arrays and not peers.is_alone
    try:
        arrays = _as_arrays(content, peers)
        transfer = _make_transfer(arrays)
        with transfer.reported():
            wait = copy_arrays(folder, arrays)
    except Exception as error:
        if peers.is_alone:
            raise
        failure = error

        def fail() -> dict[str, Sum]:
            raise failure

        return fail

    def write_part() -> dict[str, Sum]:
        with transfer.reported():
            wait()
            if not has_parts:
                return {}  # The files of a single process are measured at the end.
            files = list(find_own_files(folder))
            sums = measure_all(folder, files)
            sync_files(files)
            return sums

    return write_part


def _make_transfer(arrays: Mapping[str, jax.Array | np.ndarray]) -> Transfer:
    """Returns the transfer of the arrays that this process writes."""
    total = 0
    for array in arrays.values():
        num_own = num_all = 1
        if isinstance(array, jax.Array):
            # Orbax divides copies of a part among the processes that have them.
            num_own = len(array.sharding.addressable_devices)
            num_all = len(array.sharding.device_set)
        total += array.nbytes * num_own // num_all
    return Transfer(Category.SAVING, "written", total, lambda: count_moved("written"))


def _as_arrays(content: Content, peers: Peers) -> dict[str, jax.Array | np.ndarray]:
    """Returns the arrays that this process writes. All processes must call it."""
    arrays: dict[str, jax.Array | np.ndarray] = {}
    with without_program_mesh():
        for name, leaf in content.leaves.items():
            stored = as_stored(leaf, peers) if content.specs[name].is_stored else None
            if stored is not None:
                arrays[name] = stored
    if peers.index == 0:
        arrays |= content.state_arrays  # Copies already, which nothing changes.
    return arrays


def _report(write_part: Callable[[], dict[str, Sum]]) -> str:
    """Returns the sums of a part, or the error of its process, as JSON."""
    try:
        report = {"sums": write_part()}
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(report)


def _collect_sums(
    folder: epath.Path,
    peers: Peers,
    key: str,
    write_part: Callable[[], dict[str, Sum]],
) -> dict[str, Sum]:
    """Returns the sums of all parts, in the first process.

    Raises:
        PartError: If a part is not written, or this process does not see it. All
            processes have stopped writing by then.
    """
    if peers.is_alone:
        return write_part()
    own = _report(write_part)
    reports = [own, *peers.receive_parts(key)]

    sums: dict[str, Sum] = {}
    problems: list[str] = []
    for index, text in enumerate(reports):
        report = json.loads(text)
        problem = report.get("error") or _find_missing(folder, report["sums"])
        if problem is not None:
            problems.append(f"in process {index} of {peers.count}, {problem}")
        sums |= report.get("sums", {})
    if problems:
        raise PartError("; ".join(problems))
    return sums


def _find_missing(folder: epath.Path, sums: Mapping[str, Sum]) -> str | None:
    """Returns a sentence if this process does not see a file of another one."""
    for name, measured in sums.items():
        problem = compare_size(folder, name, measured)
        if problem is not None:
            return (
                f"a file was written that process 0 does not see as it is: {problem}. "
                "The directory must be on a file system that all processes share"
            )
    return None


def _read_one(folder: epath.Path, content: Content) -> None:
    """Reads the smallest array, because Orbax may write files that it cannot read."""
    sizes: dict[str, int] = {}
    for name, spec in content.specs.items():
        if spec.is_stored:
            sizes[name] = math.prod(spec.shape)
    for name, array in content.state_arrays.items():
        sizes[name] = array.size
    smallest = min(sizes, key=lambda name: sizes[name])
    # A larger array might not fit into the memory of one process.
    if sizes[smallest] <= _MAX_READ:
        read_arrays(folder, {smallest: None})


def _write_text(file: epath.Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
