"""Restores one checkpoint: compare, read everything, and only then write."""

from collections.abc import Mapping
from typing import Any

from etils import epath

from armillary.checkpoint._checkpoint import Checkpoint, Content
from armillary.checkpoint._directory import check_is_checkpoint, read_error
from armillary.checkpoint._leaf import LeafSpec, as_restored, stored_sharding
from armillary.checkpoint._mismatch import check_match
from armillary.checkpoint._store import read_arrays, read_manifest


def restore(checkpoint: Checkpoint, folder: epath.Path, directory: epath.Path) -> None:
    """Puts the values of a folder into the objects of `checkpoint`.

    Args:
        checkpoint: The objects.
        folder: What to restore.
        directory: Where an error looks for checkpoints to name instead.
    """
    check_is_checkpoint(folder, directory)
    leaves = checkpoint.read_leaves()
    saved, states = _read_description(folder)
    check_match(
        str(folder),
        saved=saved,
        program=Content(leaves, {}).specs,
        saved_states=states,
        program_states=checkpoint.state_names,
    )
    restored = _read_leaves(folder, leaves, saved)
    checkpoint.write(Content({**leaves, **restored}, states))


def _read_description(folder: epath.Path) -> tuple[dict[str, LeafSpec], dict[str, Any]]:
    try:
        manifest = read_manifest(folder)
        leaves = manifest["leaves"]
        specs = {path: LeafSpec.from_json(spec) for path, spec in leaves.items()}
        return specs, manifest["states"]
    except Exception as error:
        raise read_error(folder, error) from error


def _read_leaves(
    folder: epath.Path, leaves: Mapping[str, Any], saved: Mapping[str, LeafSpec]
) -> dict[str, Any]:
    targets = {path: leaf for path, leaf in leaves.items() if not saved[path].is_empty}
    shardings = {path: stored_sharding(leaf) for path, leaf in targets.items()}
    try:
        stored = read_arrays(folder, shardings)
    except Exception as error:
        raise read_error(folder, error) from error
    return {path: as_restored(stored[path], leaf) for path, leaf in targets.items()}
