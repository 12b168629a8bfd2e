"""Restores one checkpoint: verify, compare, read everything, and only then write.

Where memory has no room for old and new arrays at once, they are read and written in
parts (`_in_parts.py`).

Only checksums decide whether a checkpoint is damaged, before anything is decoded. A
later failure is not damage, so an older checkpoint would not help.

In a job of several processes, each process reads the parts of arrays that it needs. The
processes share out the large files to verify, so that each byte is verified once before
anything is read. Small files are verified by all processes, because a cache or a disk
may show them different content. If one process refuses a checkpoint, no process
restores it.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
from etils import epath

from armillary._checks import counted, list_lines
from armillary._launcher import SKIPPED, notify_launcher
from armillary._logging import logger
from armillary.checkpoint._arrays import count_moved, read_arrays
from armillary.checkpoint._best import read_best
from armillary.checkpoint._checksums import CHECKSUM_FILE, find_damage
from armillary.checkpoint._content import (
    LeafSpec,
    Manifest,
    count_bytes,
    describe_leaves,
    read_manifest,
)
from armillary.checkpoint._digests import compute_digests
from armillary.checkpoint._folder import (
    Saved,
    find_checkpoints,
    list_directory,
    read_header,
)
from armillary.checkpoint._in_parts import divide, restore_in_parts
from armillary.checkpoint._leaves import as_restored, stored_sharding
from armillary.checkpoint._packed import find_names, unpack
from armillary.checkpoint._put import put_all, put_states
from armillary.checkpoint._room import all_have_room
from armillary.checkpoint._selection import (
    RestoreReport,
    Selection,
    match,
    show_path,
)
from armillary.checkpoint._storage import is_remote
from armillary.checkpoint._writer import agree_on, announcing_errors
from armillary.cluster._join import get_peers
from armillary.cluster._peers import ALONE, Peers
from armillary.distribute.replica._program_mesh import without_program_mesh
from armillary.errors import (
    CheckpointDamageError,
    CheckpointError,
    CheckpointMismatchError,
)
from armillary.goodput._stopwatch import Category
from armillary.lifeline._transfer import Transfer

if TYPE_CHECKING:
    from armillary.checkpoint._checkpoint import Checkpoint

# The report, and the progress of the evaluation at the save.
_Restored = tuple[RestoreReport, Any]


def restore(
    checkpoint: "Checkpoint",
    directory: epath.Path,
    selection: Selection,
    chosen: epath.Path | None = None,
) -> _Restored | None:
    """Puts values of a checkpoint into objects; by default, of the newest good one."""
    peers = get_peers()
    if chosen is None:
        folder = _find_latest(directory, peers)
        if folder is None:
            return None
        notify_launcher("restored", str(folder))
        try:
            return restore_from(checkpoint, FolderSource(folder), selection)
        except CheckpointError:
            if not peers.is_alone or folder.exists():
                raise
            # The training job has just removed it, because there are newer ones.
            return restore(checkpoint, directory, selection)

    agree_on("a checkpoint", lambda: _check_is_checkpoint(chosen), peers)
    damage = verify(chosen, chosen.parent, peers)
    if damage is not None:
        raise CheckpointDamageError(
            f"`path` is {str(chosen)!r}, a damaged checkpoint: {damage}. Nothing was "
            "restored. Use another one of `manager.checkpoints`.",
            damage=damage,
        )
    with announcing_errors():
        _check_is_known(chosen)
    return restore_from(checkpoint, FolderSource(chosen), selection)


def _check_is_known(folder: epath.Path) -> None:
    """Raises if another release, or another library, wrote an undamaged folder."""
    found = read_header(folder)
    if not isinstance(found, Saved):
        raise CheckpointError(
            f"`path` is {str(folder)!r}, which is not damaged, but cannot be read: "
            f"{found}. Use the release that wrote it. Nothing was restored."
        )


def _check_is_checkpoint(folder: epath.Path) -> None:
    found = read_header(folder)
    # A header that exists but is wrong counts as damage, which is reported later.
    if isinstance(found, Saved) or (folder / "header").exists():
        return
    reason = f"{found}" if folder.exists() else "it does not exist"
    raise CheckpointError(
        f"`path` is {str(folder)!r}, which is not a complete checkpoint: {reason}. "
        f"{_suggest_checkpoints(folder)}"
    )


def _suggest_checkpoints(folder: epath.Path) -> str:
    """Returns the advice for a path that is not a checkpoint."""
    # A program that only predicts often has the directory of the run, or a wrong name.
    for directory in (folder, folder.parent):
        try:
            saved = find_checkpoints(directory)
            best = read_best(directory)
        except (OSError, ValueError):
            continue  # The advice must not replace the error.
        if not saved:
            continue
        text = f"The newest checkpoint in {str(directory)!r} is `{saved[-1].path.name}`"
        if best is not None:
            text += f", and the best is `{best.saved.path.name}`"
        return f"{text}."
    return "Use one of `manager.checkpoints`."


def _find_latest(directory: epath.Path, peers: Peers) -> epath.Path | None:
    """Returns the newest checkpoint without damage; `None` if there are none at all."""
    damaged: dict[epath.Path, str] = {}
    while True:
        topic = "the latest checkpoint"
        name = agree_on(topic, lambda: _find_next(directory, damaged), peers)
        folder = None if name is None else directory / name
        damage = verify(folder, directory, peers)
        if folder is None or damage is None:
            break
        damaged[folder] = damage

    if peers.index:
        return folder
    for path, problem in damaged.items():
        logger.warning(
            f"`{path}` is damaged and was skipped: {problem}. Taking `{folder}` "
            "instead; the steps after it are trained again."
        )
    return folder


def _find_next(directory: epath.Path, damaged: dict[epath.Path, str]) -> str | None:
    """Returns the newest checkpoint that is not known as damaged.

    It adds broken checkpoints to `damaged`.
    """
    saved, broken = list_directory(directory)
    # The training job may have removed some of them.
    for path in [path for path in damaged if not path.exists()]:
        del damaged[path]
    damaged.update(broken)
    names = [entry.path.name for entry in saved if entry.path not in damaged]
    if not names and damaged:
        lines = "\n".join(f"  {path}: {damage}" for path, damage in damaged.items())
        raise CheckpointError(
            f"`directory` is {str(directory)!r}, but all of its {len(damaged)} "
            f"checkpoints are damaged:\n{lines}\n"
            "Bring the files back, or move these folders away to start from scratch. "
            "Nothing was restored."
        )
    skipped = os.environ.get(SKIPPED)
    if len(names) > 1 and skipped == str(directory / names[-1]):
        logger.warning(
            f"`{skipped}` is skipped, but not removed, because the first steps after "
            f"it failed. Taking `{directory / names[-2]}`, unless that is damaged; the "
            "steps after it are trained again."
        )
        names.pop()
    return names[-1] if names else None


class Source(Protocol):
    """A place with the values of a checkpoint; its text is the name of the place."""

    def read_manifest(self) -> Manifest:
        """Returns the descriptions of leaves, the states, and an evaluation."""
        ...

    def read_arrays(
        self,
        shardings: Mapping[str, jax.sharding.Sharding | None],
        specs: Mapping[str, LeafSpec],
    ) -> dict[str, Any]:
        """Returns the named arrays in their shardings; `None` means NumPy."""
        ...


class FolderSource:
    """A checkpoint on the disk."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def read_manifest(self) -> Manifest:
        return read_manifest(self._folder)

    def read_arrays(
        self,
        shardings: Mapping[str, jax.sharding.Sharding | None],
        specs: Mapping[str, LeafSpec],
    ) -> dict[str, Any]:
        total = count_bytes(shardings, specs)
        transfer = Transfer(
            Category.RESTORING, "read", total, lambda: count_moved("read")
        )
        with transfer.reported():
            return read_arrays(self._folder, shardings, specs)


def restore_from(
    checkpoint: "Checkpoint", source: Source, selection: Selection
) -> _Restored:
    """Puts values of a verified checkpoint into objects."""
    with announcing_errors(), without_program_mesh():
        leaves = checkpoint.read_leaves()
        with _reading(source):
            saved, states, evaluation = source.read_manifest()

        own = describe_leaves(leaves)
        for name, digest in _find_own_digests(checkpoint, leaves, saved, selection):
            own[name] = dataclasses.replace(own[name], digest=digest)

        program = _as_specs(own, checkpoint.states)
        all_saved = _as_specs(saved, states)
        selection = selection._replace(passing=tuple(checkpoint.passing))
        # Objects that an older release saved without their state keep their own.
        new = checkpoint.missing_before - states.keys()
        expected = {name: spec for name, spec in program.items() if name not in new}
        taken, differences = match(
            str(source), selection, saved=all_saved, program=expected
        )

        # Arrays without elements are not stored.
        full = [name for name in taken if name in saved and saved[name].is_stored]
        taken_states = {name: states[name] for name in taken if name in states}
        new_states = _read_states(source, taken_states)
        has_digests = any(spec.digest for spec in saved.values())
        leaves_out = has_digests or bool(checkpoint.left_out.paths)

        def read(names: Sequence[str]) -> dict[str, Any]:
            shardings = {name: stored_sharding(leaves[name]) for name in names}
            with _reading(source):
                stored = source.read_arrays(shardings, saved)
            restored = {name: as_restored(stored[name], leaves[name]) for name in names}
            _check_left_out(checkpoint, source, leaves, restored)
            if leaves_out:
                # A base may be wrong in a single process, whose error arrives here.
                get_peers().gather("the arrays that a checkpoint leaves out", "")
            return restored

        if all_have_room({name: leaves[name] for name in full}, own):
            new_leaves = {**leaves, **read(full)}
            refused = put_all(checkpoint, new_leaves, new_states, selection.may_differ)
        else:
            # Arrays that are left out come first, because they may be refused.
            full.sort(key=lambda name: name not in checkpoint.left_out.paths)
            refused = restore_in_parts(
                checkpoint,
                leaves,
                divide(full, saved),
                read,
                lambda: put_states(checkpoint, new_states, selection.may_differ),
            )

    done = tuple(name for name in taken if name not in refused)
    positions = tuple(sorted(checkpoint.data_positions))
    report = RestoreReport(
        path=str(source),
        restored=done,
        kept=tuple(sorted(program.keys() - done)),
        unused=tuple(sorted(all_saved.keys() - done)),
        differences=(*differences, *_describe_refused(refused, positions)),
        data_positions=positions,
    )
    _log_incomplete(report, selection)
    return report, evaluation


def _describe_refused(
    refused: Mapping[str, str], positions: Sequence[str]
) -> list[str]:
    """Returns a line for each state that its object has refused."""
    lines: list[str] = []
    for name in sorted(refused):
        text = refused[name]
        # The last line of a long message is the fix, which is not needed here.
        shown = text.rpartition("\n")[0] or text
        lines.append(f"~ {show_path(name, positions)}: {shown}")
    return lines


def _log_incomplete(report: RestoreReport, selection: Selection) -> None:
    """Logs a restore that did not use everything; a new part is worth a warning."""
    if not report.kept and not report.unused:
        return
    is_new = selection.only is None and report.kept
    level = logging.WARNING if is_new else logging.INFO
    logger.log(level, "%s", report)


def _read_states(source: Source, states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states of objects, with their arrays."""
    names = [name for state in states.values() for name in find_names(state)]
    with _reading(source):
        stored = source.read_arrays(dict.fromkeys(names), {})
        return {name: unpack(state, stored) for name, state in states.items()}


def _find_own_digests(
    checkpoint: "Checkpoint",
    leaves: Mapping[str, Any],
    saved: Mapping[str, LeafSpec],
    selection: Selection,
) -> Iterable[tuple[str, str]]:
    """Returns the digests of the program's arrays that a checkpoint leaves out."""
    paths = [name for name, spec in saved.items() if spec.digest is not None]
    wanted = set(filter(selection.has, paths))
    return checkpoint.left_out.find_digests(leaves, wanted).items()


def _check_left_out(
    checkpoint: "Checkpoint",
    source: Source,
    leaves: Mapping[str, Any],
    restored: Mapping[str, Any],
) -> None:
    """Raises if a checkpoint has other values for arrays that the program leaves out.

    They would replace the base that the program begins with.
    """
    paths = checkpoint.left_out.paths & restored.keys()
    own = checkpoint.left_out.find_digests(leaves, paths)
    # ORDER: as in `restored`, because all processes start these programs together.
    saved = compute_digests({k: array for k, array in restored.items() if k in paths})
    changed = sorted(path for path in paths if saved[path] != own[path])
    if changed:
        raise CheckpointMismatchError(
            f"`path` is {str(source)!r}, which has values for "
            f"{counted(len(changed), 'array')} that `leave_out` names, and the "
            f"program has different ones:\n{list_lines(changed)}\n"
            "Read these arrays before you make the `Checkpoint` with `leave_out`: "
            "`Checkpoint(model=model).read(path)`. Nothing was restored."
        )


def _as_specs(specs: Mapping[str, LeafSpec], states: Iterable[str]) -> dict[str, str]:
    """Returns a text for each leaf and state; equal texts fit each other."""
    leaves = {path: str(spec) for path, spec in specs.items()}
    return {**dict.fromkeys(states, "saved state"), **leaves}


@contextlib.contextmanager
def _reading(source: Source) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"Reading `{source}` failed, although its files are not damaged: "
            f"{type(error).__name__}: {error}. Nothing was restored. Check the memory "
            "of the devices, or use another one of `manager.checkpoints`."
        ) from error


def verify(
    chosen: epath.Path | None, directory: epath.Path, peers: Peers
) -> str | None:
    """Returns the damage that any process finds.

    Raises:
        CheckpointError: If processes see different checkpoints.
    """
    if peers.is_alone:
        return None if chosen is None else find_damage(chosen)
    is_one_copy = _is_one_copy(chosen, peers)
    with peers.announcing_errors():
        own = _look(chosen, directory, peers if is_one_copy else ALONE)
    text = json.dumps([*own, str(directory)])
    texts = peers.gather("the checkpoint to restore", text)

    damages: dict[int, str] = {}
    contents: set[str] = set()
    lines: list[str] = []
    for index, text in enumerate(texts):
        content, is_damaged, place = json.loads(text)
        lines.append(f"  process {index} of {peers.count}: {content}, in {place}")
        if is_damaged:
            damages[index] = content
        else:
            contents.add(content)
    if len(contents) > 1:
        shown = "\n".join(lines)
        raise CheckpointError(
            f"The processes do not see the same checkpoint to restore:\n{shown}\n"
            "Give `CheckpointManager` a directory that all processes see, such as a "
            "directory on a shared file system. Nothing was restored."
        )

    is_damaged_in_all = len(damages) == peers.count
    is_same_in_all = is_damaged_in_all and len(set(damages.values())) == 1
    if is_same_in_all:
        return damages[0]
    who = [f"in process {i} of {peers.count}, {text}" for i, text in damages.items()]
    return "; ".join(who) or None


def _is_one_copy(chosen: epath.Path | None, peers: Peers) -> bool:
    """Returns whether all processes see the same files, so that they can share them."""
    identity: list[int] = []
    if chosen is not None and not is_remote(chosen):
        # A process that does not see the file reports it later.
        with contextlib.suppress(OSError):
            status = os.stat(chosen / CHECKSUM_FILE)
            identity = [status.st_ino, status.st_mtime_ns]
    texts = peers.gather("the files of a checkpoint", json.dumps(identity))
    return len(set(texts)) == 1


def _look(
    chosen: epath.Path | None, directory: epath.Path, peers: Peers
) -> tuple[str, bool]:
    """Describes a checkpoint as this process sees it; returns whether it is damaged."""
    damage = None
    if chosen is None:
        saved = find_checkpoints(directory)
        chosen = saved[-1].path if saved else directory
    elif chosen.exists():
        damage = find_damage(chosen, peers)
    if damage is not None:
        return damage, True
    if not isinstance(read_header(chosen), Saved):
        return "nothing", False

    # All files match this list, so an equal list means equal content.
    content = (chosen / CHECKSUM_FILE).read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:12]
    return f"{chosen.name} (`{CHECKSUM_FILE}` #{digest})", False
