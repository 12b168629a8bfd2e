"""Restores one checkpoint: verify, compare, read everything, and only then write.

Damage is found by checksums alone, before anything is decoded. What fails after that is
not the disk's doing, so an older checkpoint would not help: it is an error of the
program or of the machine, and `restore_latest` lets it through.
"""

from collections.abc import Mapping
from typing import Any

from etils import epath

from armillary._logging import logger
from armillary.checkpoint._checkpoint import Checkpoint, Content
from armillary.checkpoint._checksums import find_damage
from armillary.checkpoint._folder import check_is_checkpoint, list_directory
from armillary.checkpoint._joint import announcing_errors, check_all_see, decide
from armillary.checkpoint._leaf import LeafSpec, as_restored, stored_sharding
from armillary.checkpoint._messages import (
    check_match,
    describe_all_damaged,
    describe_damage,
    read_error,
)
from armillary.checkpoint._part import RestoredPart, match_parts
from armillary.checkpoint._store import read_arrays, read_manifest
from armillary.cluster._join import get_peers
from armillary.errors import CheckpointDamageError, CheckpointError


def restore(checkpoint: Checkpoint, folder: epath.Path, directory: epath.Path) -> None:
    """Puts the values of a folder into the objects of `checkpoint`.

    Args:
        checkpoint: The objects.
        folder: What to restore.
        directory: Where an error looks for checkpoints to name instead.

    Raises:
        CheckpointError: As `_verify` does, and if it cannot be read or does not fit.
    """
    _verify(folder, directory)
    _restore_intact(checkpoint, folder)


def restore_part(
    checkpoint: Checkpoint,
    folder: epath.Path,
    directory: epath.Path,
    parts: Mapping[str, str],
) -> RestoredPart:
    """Puts a part of the values of a folder into the objects of `checkpoint`.

    Args:
        checkpoint: The objects.
        folder: What to restore from.
        directory: Where an error looks for checkpoints to name instead.
        parts: Where each part goes in the program, by its path in the checkpoint.

    Returns:
        What was restored, and what was not.

    Raises:
        CheckpointError: As `_verify` does, and if it cannot be read or does not fit.
    """
    _verify(folder, directory)
    with announcing_errors():
        leaves = checkpoint.read_leaves()
        saved, states = _read_description(folder)
        sources = match_parts(
            str(folder),
            parts,
            saved=saved,
            program=Content(leaves, {}).specs,
            saved_states=states,
            program_states=checkpoint.state_names,
        )
        restored = _read_leaves(folder, leaves, saved, sources.leaves)
        new_states = {name: states[source] for name, source in sources.states.items()}
        checkpoint.write_content(Content({**leaves, **restored}, new_states))
    done = sources.leaves | sources.states
    return RestoredPart(
        path=str(folder),
        restored=tuple(sorted(done)),
        kept=tuple(sorted({*leaves, *checkpoint.state_names} - done.keys())),
        unused=tuple(sorted({*saved, *states} - set(done.values()))),
    )


def _verify(folder: epath.Path, directory: epath.Path) -> None:
    """Raises if a folder is not a checkpoint to restore from.

    Raises:
        CheckpointError: If it is not a complete checkpoint, or processes that train
            together do not see the same one.
        CheckpointDamageError: If a file of it is not as it was saved.
    """

    def find_problem() -> str | None:
        check_is_checkpoint(folder, directory)
        return find_damage(folder)

    peers = get_peers()
    damage = decide("a checkpoint", find_problem, peers)
    if damage is not None:
        raise CheckpointDamageError(describe_damage(folder, damage), damage=damage)
    check_all_see(folder, folder.parent, peers)


def restore_latest(checkpoint: Checkpoint, directory: epath.Path) -> epath.Path | None:
    """Restores the newest checkpoint without damage.

    Args:
        checkpoint: The objects.
        directory: Where the checkpoints are.

    Returns:
        Its folder, or `None` if the directory holds no checkpoint, good or bad.

    Raises:
        CheckpointError: If all of its checkpoints are damaged, or processes that train
            together do not see the same one.
    """
    peers = get_peers()
    name = decide("the latest checkpoint", lambda: _find_latest(directory), peers)
    folder = None if name is None else directory / name
    check_all_see(folder, directory, peers)
    if folder is None:
        return None
    try:
        _restore_intact(checkpoint, folder)
    except CheckpointError:
        if peers is not None or folder.exists():
            raise
        # The job that trains has removed it meanwhile, so there are newer ones.
        return restore_latest(checkpoint, directory)
    return folder


def _find_latest(directory: epath.Path) -> str | None:
    """Returns the name of the newest checkpoint without damage; warns of those before.

    Raises:
        CheckpointError: If all are damaged.
    """
    saved, damaged, unfinished = list_directory(directory)
    for path in unfinished:
        logger.warning(
            "`%s` is not used: it is what an interrupted save left, or a save that "
            "another process is writing.",
            path,
        )
    for entry in reversed(saved):
        damage = find_damage(entry.path)
        if damage is None:
            _warn_of_damage(damaged, entry.path)
            return entry.path.name
        if not entry.path.exists():
            # Removed meanwhile, by the job that trains.
            return _find_latest(directory)
        damaged[entry.path] = damage
    if damaged:
        raise CheckpointError(describe_all_damaged(directory, damaged))
    return None


def _warn_of_damage(damaged: Mapping[epath.Path, str], good: epath.Path) -> None:
    for path, damage in damaged.items():
        logger.warning(
            "`%s` is damaged and was skipped: %s. Taking `%s` instead; the steps after "
            "it are trained again.",
            path,
            damage,
            good,
        )


def _restore_intact(checkpoint: Checkpoint, folder: epath.Path) -> None:
    with announcing_errors():
        leaves = checkpoint.read_leaves()
        saved, states = _read_description(folder)
        check_match(
            str(folder),
            saved=saved,
            program=Content(leaves, {}).specs,
            saved_states=states,
            program_states=checkpoint.state_names,
        )
        restored = _read_leaves(folder, leaves, saved, {path: path for path in leaves})
        checkpoint.write_content(Content({**leaves, **restored}, states))


def _read_description(folder: epath.Path) -> tuple[dict[str, LeafSpec], dict[str, Any]]:
    try:
        manifest = read_manifest(folder)
        leaves = manifest["leaves"]
        specs = {path: LeafSpec.from_json(spec) for path, spec in leaves.items()}
        return specs, manifest["states"]
    except Exception as error:
        raise read_error(folder, error) from error


def _read_leaves(
    folder: epath.Path,
    leaves: Mapping[str, Any],
    saved: Mapping[str, LeafSpec],
    sources: Mapping[str, str],
) -> dict[str, Any]:
    # `sources` has the path in the checkpoint of each leaf to read, by its path here.
    targets = {
        path: leaves[path] for path in sources if not saved[sources[path]].is_empty
    }
    shardings = {sources[path]: stored_sharding(leaf) for path, leaf in targets.items()}
    try:
        stored = read_arrays(folder, shardings)
    except Exception as error:
        raise read_error(folder, error) from error
    return {
        path: as_restored(stored[sources[path]], leaf) for path, leaf in targets.items()
    }
