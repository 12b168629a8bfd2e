"""Reads and writes one checkpoint folder. The only file that knows Orbax.

Three items make a folder: `arrays` (a flat dictionary from path to array), `manifest`
and `header` (JSON). Orbax writes them under a temporary name and renames the folder
when all of it is on the disk. Before `write` returns, Orbax has copied device memory,
or, for CPU devices, holds a reference that keeps XLA from reusing the buffer of a
donated array; the tests of the manager pin that.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from armillary._process import get_process
from armillary.checkpoint._folder import HEADER_FILE, Header

_MANIFEST_FILE = "manifest.json"


class Store:
    """Writes in the background, one folder at a time, and reads."""

    def __init__(self) -> None:
        self._writer: Any = None

    def write(
        self,
        path: epath.Path,
        *,
        arrays: Mapping[str, jax.Array | np.ndarray],
        manifest: Mapping[str, Any],
        header: Header,
    ) -> None:
        """Starts writing a new folder; returns once the arrays may change again."""
        import orbax.checkpoint as ocp

        if self._writer is None:
            # A directory that cannot be made must be an error of this call.
            options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
            self._writer = ocp.AsyncCheckpointer(
                _handler(), async_options=options, multiprocessing_options=_alone()
            )
        items: dict[str, Any] = {
            "manifest": ocp.args.JsonSave(manifest),
            "header": ocp.args.JsonSave(header.as_json()),
        }
        if arrays:
            items["arrays"] = ocp.args.PyTreeSave(dict(arrays))
        self._writer.save(path, args=ocp.args.Composite(**items))

    def wait(self) -> None:
        """Returns when the folder is complete, or raises what kept it from that."""
        if self._writer is not None:
            self._writer.wait_until_finished()

    def close(self) -> None:
        """Waits, then ends the threads of the writer. A later write starts new ones."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


def read_manifest(path: epath.Path) -> dict[str, Any]:
    """Returns the manifest of a folder."""
    return json.loads((path / "manifest" / _MANIFEST_FILE).read_text())


def read_arrays(
    path: epath.Path, shardings: Mapping[str, jax.sharding.Sharding | None]
) -> dict[str, Any]:
    """Returns arrays of a folder.

    Args:
        path: The folder.
        shardings: Where each array goes; `None` gives a NumPy array.
    """
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
    with ocp.Checkpointer(_handler(), multiprocessing_options=alone) as reader:
        items = ocp.args.Composite(
            arrays=ocp.args.PyTreeRestore(
                item=dict.fromkeys(args, 0), restore_args=args
            )
        )
        return reader.restore(path, args=items)["arrays"]


def _handler() -> Any:
    import orbax.checkpoint as ocp

    return ocp.CompositeCheckpointHandler(
        arrays=ocp.PyTreeCheckpointHandler(multiprocessing_options=_alone()),
        manifest=ocp.JsonCheckpointHandler(
            _MANIFEST_FILE, multiprocessing_options=_alone()
        ),
        header=ocp.JsonCheckpointHandler(HEADER_FILE, multiprocessing_options=_alone()),
        composite_options=ocp.CompositeOptions(multiprocessing_options=_alone()),
    )


def _alone() -> Any:
    """Returns options by which no other process takes part: those agree above."""
    import orbax.checkpoint as ocp

    index = get_process().index
    return ocp.options.MultiprocessingOptions(
        primary_host=index,
        active_processes={index} if get_process().count > 1 else None,
        barrier_sync_key_prefix=f"armillary_{index}",
    )
