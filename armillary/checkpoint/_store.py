"""Reads and writes one checkpoint folder. Only this file knows Orbax.

Three items make a folder: `arrays` (a flat dictionary from path to array), `manifest`
and `header` (JSON). Orbax writes them under a temporary name, and renames the folder
when all is on the disk. When `write_folder` returns, it has copied device memory, or,
for CPU devices, holds a reference that keeps XLA from reusing a donated buffer
(tested). A typed random key is stored as its data, small unsigned integers as bytes. An
array goes back to where the program's own is: sharding, memory kind, and whether it is
bound.
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
from armillary.cluster._peers import Peers
from armillary.distribute._global_arrays import as_global, as_whole, is_key

_MANIFEST_FILE = "manifest.json"
# Orbax 0.12 counts its saves in a process-wide number, by which its parts wait for each
# other. Two threads that start a save at the same time would get one number.
_starting = threading.Lock()


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The description of a leaf without its values."""

    # Such as `bfloat16`, or `key<threefry2x32>`: its shape lacks the axis of the data.
    dtype: str
    shape: tuple[int, ...]
    # A NumPy array or number has JAX's default width once a step has used it.
    is_host: bool = False

    def __str__(self) -> str:
        # A checkpoint fits a program where these are equal.
        if not self.is_host:
            return f"{self.dtype} {self.shape}"
        return f"{jax.dtypes.canonicalize_dtype(self.dtype).name} {self.shape}"


@dataclasses.dataclass(frozen=True)
class Content:
    """The values of a checkpoint at one moment."""

    leaves: dict[str, Any]
    specs: dict[str, LeafSpec]
    # The state that each object's `get_state` returned, in the types of JSON, and the
    # arrays that belong to it.
    states: dict[str, Any]
    state_arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    # How far the evaluation of this moment is, for a controller.
    evaluation: Any = None


def describe_leaves(leaves: Mapping[str, Any]) -> dict[str, LeafSpec]:
    """Returns the description of each leaf, or raises an error that names bad ones."""
    specs, bad = {}, []
    for path, leaf in leaves.items():
        if is_key(leaf):
            dtype = f"key<{jax.random.key_impl(leaf)}>"
            specs[path] = LeafSpec(dtype, tuple(leaf.shape))
            continue
        is_host = not isinstance(leaf, jax.Array)
        array = np.asarray(leaf) if is_host else leaf
        # Of JAX, because NumPy does not count `bfloat16` and the like among numbers.
        if any(jax.dtypes.issubdtype(array.dtype, k) for k in (np.bool_, np.number)):
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


def _is_widened(leaf: Any) -> bool:
    # It is stored as bytes: TensorStore lacks its dtype.
    return hasattr(leaf, "dtype") and leaf.dtype.name in ("uint2", "uint4")


def as_stored(leaf: Any, peers: Peers | None = None) -> Any:
    """Returns the plain array to store for a leaf. All processes must call it."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if _is_widened(leaf):
        leaf = leaf.astype(np.uint8)
    if peers is not None:
        # The first one writes: from its own memory, as Orbax refuses devices then.
        whole = as_whole(leaf)
        return None if peers.index else np.array(whole)
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    is_on_cpu = all(device.platform == "cpu" for device in leaf.devices())
    if is_on_cpu and leaf.is_fully_addressable and leaf.is_fully_replicated:
        # Replicas share the host's memory. Orbax would cut the array into a slice for
        # each, by programs to be compiled, which serves devices with a memory each.
        return leaf.addressable_data(0)
    return leaf


def stored_sharding(target: Any) -> jax.sharding.Sharding | None:
    """Returns where the stored array is read to, or `None` for host memory."""
    # Binding an array that is not bound would forbid programs on other devices.
    if isinstance(target, jax.Array) and target.committed:
        return target.sharding if target.is_fully_addressable else None
    return None


def as_restored(stored: Any, target: Any) -> Any:
    """Returns a stored array as the kind of value that `target` is, in its place."""
    if _is_widened(target):
        stored = stored.astype(target.dtype)
    if isinstance(target, np.ndarray) and target.dtype == stored.dtype:
        return stored
    if not isinstance(target, jax.Array):
        # JAX's integers have 32 bits, those of Python and NumPy may need more.
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
    with _starting:
        writer.save(as_plain(path), args=ocp.args.Composite(**items))

    def wait() -> None:
        writer.wait_until_finished()
        writer.close()  # The threads of one that failed end by themselves.

    return wait


def _make_writer(earlier: Sequence[threading.Thread], smallest: str | None) -> Any:
    import orbax.checkpoint as ocp

    alone = _alone()
    handler: Any = ocp.CompositeCheckpointHandler(
        # Compressing would take three quarters of a save's processor time, which
        # steps on a CPU lack meanwhile, to make trained weights 7 % smaller.
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
        # ORDER: after all items are written, and before the folder is renamed. Files
        # that are as Orbax wrote them may still be none that it can read.
        if smallest is not None:
            read_arrays(directory, {smallest: None})
        write_checksums(directory)
        sync_tree(directory)
        for thread in earlier:
            thread.join()

    # No subclass: Orbax looks up what a handler takes by its exact type.
    handler.finalize = finalize_durably
    # A directory that cannot be made must be an error of `save`.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return ocp.AsyncCheckpointer(
        handler, async_options=options, multiprocessing_options=alone
    )


def read_description(
    path: epath.Path,
) -> tuple[dict[str, LeafSpec], dict[str, Any], Any]:
    """Returns the descriptions of leaves, the states, and how far an evaluation was."""
    manifest = json.loads((path / "manifest" / _MANIFEST_FILE).read_bytes())
    specs = {
        name: LeafSpec(spec["dtype"], tuple(spec["shape"]), spec["is_host"])
        for name, spec in manifest["leaves"].items()
    }
    return specs, manifest["states"], manifest.get("evaluation")


def read_arrays(
    path: epath.Path, shardings: Mapping[str, jax.sharding.Sharding | None]
) -> dict[str, Any]:
    """Returns arrays of a folder in their shardings, and no others; `None` is NumPy."""
    import orbax.checkpoint as ocp

    if not shardings:
        return {}
    args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if sharding is None
        else ocp.ArrayRestoreArgs(sharding=sharding)
        for name, sharding in shardings.items()
    }
    alone = _alone()
    # The item alone: what Orbax keeps beside the items has no checksum.
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        tree = ocp.args.PyTreeRestore(
            item=dict.fromkeys(args, 0), restore_args=args, partial_restore=True
        )
        return reader.restore(as_plain(path) / "arrays", args=tree)


def _alone() -> Any:
    """Returns options by which Orbax works alone: the processes agree above it."""
    import orbax.checkpoint as ocp

    process = get_process()
    return ocp.options.MultiprocessingOptions(
        primary_host=process.index,
        active_processes={process.index} if process.count > 1 else None,
        barrier_sync_key_prefix=f"armillary_{process.index}",
    )


@functools.cache
def _quiet_failures() -> None:
    """Drops lines of Orbax on a failed save, which hide the error of its end."""

    def is_news(record: logging.LogRecord) -> bool:
        frames = traceback.walk_tb(record.exc_info[2]) if record.exc_info else ()
        return not any("orbax" in frame.f_code.co_filename for frame, _ in frames)

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_news)
