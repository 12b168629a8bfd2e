"""Reads and writes one checkpoint folder. Only this file knows Orbax.

A folder has three items: `arrays` (a flat dictionary from path to array), `manifest`
and `header` (JSON). Orbax writes them under a temporary name, and renames the folder
when everything is on the disk.

When `write_folder` returns, it has copied device memory. For CPU devices, it holds a
reference that keeps XLA from reusing a donated buffer (tested). A typed random key is
stored as its data, and small unsigned integers are stored as bytes. A restored array
gets the sharding and the memory kind of the program's own array, and it is committed
only if that array is.
"""

import dataclasses
import functools
import json
import logging
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from armillary._checks import list_lines
from armillary._process import get_process
from armillary.checkpoint._folder import (
    HEADER_FILE,
    as_plain,
    sync_tree,
    write_checksums,
)
from armillary.cluster._peers import ALONE, Peers
from armillary.distribute._global_arrays import as_global, as_whole, is_key
from armillary.distribute.replica._program_mesh import without_program_mesh

_MANIFEST_FILE = "manifest.json"
# Orbax 0.12 counts the saves of a process, and its parts wait for each other by this
# number. Two threads that start a save at the same time would get the same number.
_starting = threading.Lock()


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The description of a leaf without its values."""

    # For example `bfloat16`, or `key<threefry2x32>`, whose shape lacks the last axis.
    dtype: str
    shape: tuple[int, ...]
    # Whether it is a NumPy array or a number, which a step gives JAX's default width.
    is_host: bool = False

    def __str__(self) -> str:
        # A leaf of a checkpoint fits the program if these texts are equal.
        if not self.is_host:
            return f"{self.dtype} {self.shape}"
        return f"{jax.dtypes.canonicalize_dtype(self.dtype).name} {self.shape}"


@dataclasses.dataclass(frozen=True)
class Content:
    """The values of a checkpoint at one moment."""

    leaves: dict[str, Any]
    specs: dict[str, LeafSpec]
    # The state of each object as JSON, and the arrays that belong to these states.
    states: dict[str, Any]
    state_arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    # The progress of a controller's evaluation.
    evaluation: Any = None


def describe_leaves(leaves: Mapping[str, Any]) -> dict[str, LeafSpec]:
    """Returns the description of each leaf, or raises an error that names bad ones."""
    specs: dict[str, LeafSpec] = {}
    bad: list[str] = []
    for path, leaf in leaves.items():
        if is_key(leaf):
            dtype = f"key<{jax.random.key_impl(leaf)}>"
            specs[path] = LeafSpec(dtype, tuple(leaf.shape))
            continue
        is_host = not isinstance(leaf, jax.Array)
        array = np.asarray(leaf) if is_host else leaf
        if _is_numeric(array.dtype):
            specs[path] = LeafSpec(array.dtype.name, tuple(array.shape), is_host)
        else:
            bad.append(f"{path}: {type(leaf).__name__} {leaf!r}")
    if bad:
        raise TypeError(
            f"`Checkpoint` holds {len(bad)} values that are not numeric arrays, and "
            f"only those can be saved:\n{list_lines(bad)}\n"
            "Keep such values in plain attributes, outside variables."
        )
    return specs


def _is_numeric(dtype: np.dtype) -> bool:
    # Not by NumPy, which does not count types such as `bfloat16` among numbers.
    is_bool = jax.dtypes.issubdtype(dtype, np.bool_)
    return is_bool or jax.dtypes.issubdtype(dtype, np.number)


def _is_widened(leaf: Any) -> bool:
    # These dtypes are stored as bytes, because TensorStore does not have them.
    return hasattr(leaf, "dtype") and leaf.dtype.name in ("uint2", "uint4")


def as_stored(leaf: Any, peers: Peers = ALONE) -> Any:
    """Returns the plain array to store for a leaf. All processes must call it."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if _is_widened(leaf):
        leaf = leaf.astype(np.uint8)
    if not peers.is_alone:
        # The first process writes from host memory, because Orbax refuses device arrays
        # of several processes.
        whole = as_whole(leaf)
        return None if peers.index else np.array(whole)
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)

    is_on_cpu = all(device.platform == "cpu" for device in leaf.devices())
    is_whole_here = leaf.is_fully_addressable and leaf.is_fully_replicated
    if is_on_cpu and is_whole_here:
        # Replicas on CPUs share the host's memory. Orbax would compile programs to cut
        # the array into a slice for each device, which helps only if each device has a
        # memory of its own.
        return leaf.addressable_data(0)
    return leaf


def stored_sharding(target: Any) -> jax.sharding.Sharding | None:
    """Returns the sharding for reading a stored array, or `None` for host memory."""
    # An uncommitted array must stay so, or programs on other devices could not use it.
    if isinstance(target, jax.Array) and target.committed:
        return target.sharding if target.is_fully_addressable else None
    return None


def as_restored(stored: Any, target: Any) -> Any:
    """Returns a stored array as the same kind of value, on the devices of `target`."""
    if _is_widened(target):
        stored = stored.astype(target.dtype)
    if isinstance(target, np.ndarray) and target.dtype == stored.dtype:
        return stored
    if not isinstance(target, jax.Array):
        # JAX's integers have 32 bits, but integers of Python and NumPy may need more.
        is_array = isinstance(target, np.ndarray)
        return jnp.array(stored) if is_array else type(target)(stored.item())

    if not target.committed:
        (device,) = target.devices()
        with jax.default_device(device):
            stored = jnp.array(stored)
    if is_key(target):
        data = jnp.asarray(stored)
        stored = jax.random.wrap_key_data(data, impl=jax.random.key_impl(target))
    if not target.is_fully_addressable:
        return as_global(stored, target.sharding)
    if target.committed and stored.sharding != target.sharding:
        stored = jax.device_put(stored, target.sharding)
    return stored


def write_folder(
    path: epath.Path,
    *,
    arrays: Mapping[str, jax.Array | np.ndarray],
    manifest: Mapping[str, Any],
    header: Mapping[str, Any],
    earlier: Sequence[threading.Thread],
) -> Callable[[], None]:
    """Starts writing a new folder; returns once the arrays may change again.

    The function that it returns waits until the folder is complete, or raises the error
    that prevented it. The folder gets its name after `earlier` threads have ended.
    """
    import orbax.checkpoint as ocp

    _quiet_failures()
    items: dict[str, Any] = {
        "manifest": ocp.args.JsonSave(manifest),
        "header": ocp.args.JsonSave(header),
    }
    if arrays:
        items["arrays"] = ocp.args.PyTreeSave(dict(arrays))
    smallest = min(arrays, key=lambda name: arrays[name].nbytes, default=None)
    writer = _make_writer(earlier, smallest)
    # Orbax may cut an array on one device, which is not the mesh of the program.
    with _starting, without_program_mesh():
        writer.save(as_plain(path), args=ocp.args.Composite(**items))

    def wait() -> None:
        writer.wait_until_finished()
        writer.close()  # After a failure, the threads end without this call.

    return wait


def _make_writer(earlier: Sequence[threading.Thread], smallest: str | None) -> Any:
    import orbax.checkpoint as ocp

    alone = _alone()
    handler: Any = ocp.CompositeCheckpointHandler(
        # Compression would make trained weights only 7 % smaller. It would take three
        # quarters of a save's CPU time, which steps on a CPU need.
        arrays=ocp.PyTreeCheckpointHandler(
            use_compression=False, multiprocessing_options=alone
        ),
        manifest=ocp.JsonCheckpointHandler(
            _MANIFEST_FILE, multiprocessing_options=alone
        ),
        header=ocp.JsonCheckpointHandler(HEADER_FILE, multiprocessing_options=alone),
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
    )
    finalize = handler.finalize

    def finalize_durably(directory: epath.Path) -> None:
        finalize(directory)
        # ORDER: after all items are written, and before the folder is renamed. One
        # array is read, because Orbax may write files that it cannot read.
        if smallest is not None:
            read_arrays(directory, {smallest: None})
        write_checksums(directory)
        sync_tree(directory)
        for thread in earlier:
            thread.join()

    # Not a subclass, because Orbax looks up a handler's arguments by its exact type.
    handler.finalize = finalize_durably
    # An error while the directory is made must be an error of `save`.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return ocp.AsyncCheckpointer(
        handler, async_options=options, multiprocessing_options=alone
    )


def read_description(
    path: epath.Path,
) -> tuple[dict[str, LeafSpec], dict[str, Any], Any]:
    """Returns the descriptions of leaves, the states, and an evaluation's progress."""
    file = path / "manifest" / _MANIFEST_FILE
    manifest = json.loads(file.read_bytes())
    specs: dict[str, LeafSpec] = {}
    for name, spec in manifest["leaves"].items():
        shape = tuple(spec["shape"])
        specs[name] = LeafSpec(spec["dtype"], shape, spec["is_host"])
    return specs, manifest["states"], manifest.get("evaluation")


def read_arrays(
    path: epath.Path, shardings: Mapping[str, jax.sharding.Sharding | None]
) -> dict[str, Any]:
    """Returns the named arrays of a folder in their shardings; `None` means NumPy."""
    import orbax.checkpoint as ocp

    if not shardings:
        return {}
    args: dict[str, Any] = {}
    for name, sharding in shardings.items():
        if sharding is None:
            args[name] = ocp.RestoreArgs(restore_type=np.ndarray)
        else:
            args[name] = ocp.ArrayRestoreArgs(sharding=sharding)

    alone = _alone()
    # Only this item is read, because Orbax's files next to it have no checksum.
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        tree = ocp.args.PyTreeRestore(
            item=dict.fromkeys(args, 0), restore_args=args, partial_restore=True
        )
        return reader.restore(as_plain(path) / "arrays", args=tree)


def _alone() -> Any:
    """Returns options for Orbax in a single process: `agree_on` is for several."""
    import orbax.checkpoint as ocp

    process = get_process()
    return ocp.options.MultiprocessingOptions(
        primary_host=process.index,
        active_processes={process.index} if process.count > 1 else None,
        barrier_sync_key_prefix=f"armillary_{process.index}",
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
