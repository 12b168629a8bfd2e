"""Reads and writes one checkpoint folder. Only this file and `_handler` know Orbax.

Three items make a folder: `arrays` (a flat dictionary from path to array), `manifest`
and `header` (JSON). Orbax writes them under a temporary name, we add their checksums,
and Orbax renames the folder when all of it is on the disk. Before `write` returns,
Orbax has copied device memory, or, for CPU devices, holds a reference that keeps XLA
from reusing the buffer of a donated array; the tests of the manager pin that.

The handlers with which Orbax writes a folder, and what we add at the end.

Imported inside functions only, because importing Orbax takes long.
"""

import functools
import logging
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from armillary._process import get_process
from armillary.checkpoint._checksums import read_json, sync_tree, write_checksums
from armillary.checkpoint._folder import HEADER_FILE, Header
from armillary.checkpoint._leaf import LeafSpec


class ItemsHandler(ocp.CompositeCheckpointHandler):
    """Writes items, lists their checksums, and has all of it on the disk.

    Attributes:
        earlier: Threads that end first: the save of another directory that began
            before this one, and that this one may speak of.
    """

    earlier: Sequence[threading.Thread] = ()

    def finalize(self, directory: epath.Path) -> None:
        """Ends a save, on the one process that gives the folder its name."""
        super().finalize(directory)
        # ORDER: after all processes have written, and before the folder is renamed.
        write_checksums(directory)
        sync_tree(directory)
        for thread in self.earlier:
            thread.join()


# Orbax looks up what a handler takes by its type.
@ocp.args.register_with_handler(ItemsHandler, for_save=True, for_restore=True)
class ItemsArgs(ocp.args.Composite):
    """The items by name."""


_MANIFEST_FILE = "manifest.json"


@functools.cache
def _quiet_failures() -> None:
    """Drops what Orbax's threads and asyncio print, at any later time, of failed saves.

    `Store.wait` raises that error. A hundred lines of it on stderr would hide the one
    sentence that says what to do.
    """

    def is_news(record: logging.LogRecord) -> bool:
        frames = traceback.walk_tb(record.exc_info[2]) if record.exc_info else ()
        return not any("orbax" in frame.f_code.co_filename for frame, _ in frames)

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_news)
    show = sys.unraisablehook

    def show_others(unraisable: Any) -> None:
        # Orbax closes its event loop at the first array that fails.
        if str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = show_others


class Store:
    """Writes in the background, one folder at a time, and reads."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._handler: Any = None

    def write(
        self,
        path: epath.Path,
        *,
        arrays: Mapping[str, jax.Array | np.ndarray],
        manifest: Mapping[str, Any],
        header: Header,
        earlier: Sequence[threading.Thread] = (),
    ) -> None:
        """Starts writing a new folder; returns once the arrays may change again.

        It gets its name only when `earlier` threads have ended.
        """
        import orbax.checkpoint as ocp

        if self._writer is None:
            # A directory that cannot be made must be an error of this call.
            options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
            self._handler = _handler()
            self._writer = ocp.AsyncCheckpointer(
                self._handler, async_options=options, multiprocessing_options=_alone()
            )
        items: dict[str, Any] = {
            "manifest": ocp.args.JsonSave(manifest),
            "header": ocp.args.JsonSave(header.as_json()),
        }
        if arrays:
            items["arrays"] = ocp.args.PyTreeSave(dict(arrays))
        self._handler.earlier = earlier
        _quiet_failures()
        self._writer.save(path, args=ItemsArgs(**items))

    def wait(self) -> None:
        """Waits until the folder is complete, or raises the error that prevented it."""
        if self._writer is not None:
            self._writer.wait_until_finished()

    def close(self) -> None:
        """Waits, then ends the threads of the writer. A later write starts new ones."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def abandon(self) -> None:
        """Forgets a writer that failed. Its threads end by themselves."""
        self._writer = None


def read_description(path: epath.Path) -> tuple[dict[str, LeafSpec], dict[str, Any]]:
    """Returns the leaves of a folder, described, and the states of objects."""
    manifest = read_json(path / "manifest" / _MANIFEST_FILE)
    leaves = manifest["leaves"]
    specs = {name: LeafSpec.from_json(spec) for name, spec in leaves.items()}
    return specs, manifest["states"]


def read_evaluation(path: epath.Path) -> Any:
    """Returns how far the evaluation of the step was, for a controller."""
    try:
        manifest = read_json(path / "manifest" / _MANIFEST_FILE)
    except FileNotFoundError:
        return None  # The job that trains has removed it since it was restored.
    return manifest.get("evaluation")


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
        return reader.restore(path / "arrays", args=tree)


def _handler() -> Any:
    import orbax.checkpoint as ocp

    return ItemsHandler(
        # Compressing would take three quarters of a save's processor time, which steps
        # on a CPU lack meanwhile, to make trained weights 7 % smaller.
        arrays=ocp.PyTreeCheckpointHandler(
            use_compression=False, multiprocessing_options=_alone()
        ),
        manifest=ocp.JsonCheckpointHandler(
            _MANIFEST_FILE, multiprocessing_options=_alone()
        ),
        header=ocp.JsonCheckpointHandler(HEADER_FILE, multiprocessing_options=_alone()),
        composite_options=ocp.CompositeOptions(multiprocessing_options=_alone()),
    )


def _alone() -> Any:
    """Returns options by which Orbax works alone: the processes agree above it."""
    import orbax.checkpoint as ocp

    index = get_process().index
    return ocp.options.MultiprocessingOptions(
        primary_host=index,
        active_processes={index} if get_process().count > 1 else None,
        barrier_sync_key_prefix=f"armillary_{index}",
    )
