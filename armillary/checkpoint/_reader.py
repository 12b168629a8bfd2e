"""Restores one checkpoint: verify, compare, read everything, and only then write.

Damage is found by checksums alone, before anything is decoded. What fails after that is
not the disk's doing, so an older checkpoint would not help: it is an error of the
program or of the machine, and `restore_latest` lets it through.

What restoring a checkpoint did.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from etils import epath

from armillary._checks import list_lines
from armillary._logging import logger
from armillary.checkpoint._folder import check_is_checkpoint, list_directory
from armillary.checkpoint._leaf import Content, LeafSpec, as_restored, stored_sharding
from armillary.checkpoint._selection import (
    Selection,
    describe_all_damaged,
    describe_damage,
    is_inside,
    match,
    read_error,
)
from armillary.checkpoint._store import read_arrays, read_description
from armillary.checkpoint._writer import announcing_errors, decide, verify
from armillary.cluster._join import get_peers
from armillary.errors import (
    CheckpointDamageError,
    CheckpointError,
    CheckpointMismatchError,
)

if TYPE_CHECKING:
    from armillary.checkpoint._checkpoint import Checkpoint


class RestoreReport(NamedTuple):
    """What restoring a checkpoint did; `print` shows it in full.

    Attributes:
        path: The checkpoint.
        restored: Paths of the program that have the values of the checkpoint now.
        kept: Paths of the program that are as they were.
        unused: Paths of the checkpoint that went nowhere.
        differences: A line for each difference in a part that `may_differ`, so that it
            was left.
    """

    path: str
    restored: tuple[str, ...]
    kept: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        sections = (
            ("restored", self.restored),
            ("of the program, left as they were", self.kept),
            ("of the checkpoint, not used", self.unused),
        )
        is_whole = not (self.kept or self.unused)
        lines = [f"{'All' if is_whole else 'A part'} of {self.path}:"]
        for title, entries in sections:
            lines.append(f"{len(entries)} {title}{':' if entries else '.'}")
            if entries:
                lines.append(list_lines(entries))
        if self.differences:
            lines += ["These may differ, and do:", list_lines(self.differences)]
        return "\n".join(lines)

    def expect_partial(self) -> Self:
        """Returns this report, for programs that end a restore as TensorFlow's do."""
        return self

    def assert_existing_objects_matched(self) -> Self:
        """Returns this report, if everything in the program was restored.

        Raises:
            CheckpointMismatchError: If something was not.
        """
        return self._assert_none(self.kept, "of the program were not restored")

    def assert_consumed(self) -> Self:
        """Returns this report, if all of the checkpoint is in all of the program.

        Raises:
            CheckpointMismatchError: If something in either was left.
        """
        self.assert_existing_objects_matched()
        return self._assert_none(self.unused, "of the checkpoint were not used")

    def _assert_none(self, paths: tuple[str, ...], what: str) -> Self:
        if paths:
            raise CheckpointMismatchError(
                f"`path` is {self.path!r}, and {len(paths)} values {what}:\n"
                f"{list_lines(paths)}\n"
                "Restore more of it, or leave this assertion out."
            )
        return self


_STATE = "saved state"


def restore(
    checkpoint: "Checkpoint",
    folder: epath.Path,
    directory: epath.Path,
    selection: Selection,
) -> RestoreReport:
    """Puts values of a folder into the objects of `checkpoint`.

    An error names checkpoints of `directory` to take instead.
    """
    peers = get_peers()
    decide("a checkpoint", lambda: check_is_checkpoint(folder, directory), peers)
    damage = verify(folder, folder.parent, peers)
    if damage is not None:
        raise CheckpointDamageError(describe_damage(folder, damage), damage=damage)
    return _restore_intact(checkpoint, folder, selection)


def restore_latest(
    checkpoint: "Checkpoint", directory: epath.Path, selection: Selection
) -> RestoreReport | None:
    """Restores the newest checkpoint without damage; `None` if there is none at all."""
    peers = get_peers()
    damaged: dict[epath.Path, str] = {}

    def find_next() -> str | None:
        return _find_next(directory, damaged)

    while True:
        name = decide("the latest checkpoint", find_next, peers)
        folder = None if name is None else directory / name
        damage = verify(folder, directory, peers)
        if folder is None:
            return None
        if damage is None:
            break
        damaged[folder] = damage
    if peers is None or not peers.index:
        _warn_of_skipped(damaged, folder)
    try:
        return _restore_intact(checkpoint, folder, selection)
    except CheckpointError:
        if peers is not None or folder.exists():
            raise
        # The job that trains has removed it meanwhile, so there are newer ones.
        return restore_latest(checkpoint, directory, selection)


def _find_next(directory: epath.Path, damaged: dict[epath.Path, str]) -> str | None:
    """Returns the newest checkpoint that is not known to be damaged, and notes others.

    The job that trains may remove some meanwhile.
    """
    saved, broken, unfinished = list_directory(directory)
    for path in () if damaged else unfinished:
        logger.warning(
            "`%s` is not used: it is what an interrupted save left, or a save that "
            "another process is writing.",
            path,
        )
    for path in [path for path in damaged if not path.exists()]:
        del damaged[path]
    damaged.update(broken)
    names = [entry.path.name for entry in saved if entry.path not in damaged]
    if not names and damaged:
        raise CheckpointError(describe_all_damaged(directory, damaged))
    return names[-1] if names else None


def _warn_of_skipped(damaged: Mapping[epath.Path, str], taken: epath.Path) -> None:
    for path, problem in damaged.items():
        logger.warning(
            "`%s` is damaged and was skipped: %s. Taking `%s` instead; the steps after "
            "it are trained again.",
            path,
            problem,
            taken,
        )


def _restore_intact(
    checkpoint: "Checkpoint", folder: epath.Path, selection: Selection
) -> RestoreReport:
    with announcing_errors():
        leaves = checkpoint.read_leaves()
        with _reading(folder):
            saved, states = read_description(folder)
        program = {
            **dict.fromkeys(checkpoint.state_names, _STATE),
            **Content(leaves, {}).specs,
        }
        all_saved = {**dict.fromkeys(states, _STATE), **saved}
        names = [*program, *all_saved]
        passing = (
            part
            for part in checkpoint.passing
            if any(is_inside(name, [part]) for name in names)
        )
        may_differ = (*selection.may_differ, *passing)
        selection = dataclasses.replace(selection, may_differ=may_differ)
        found = match(str(folder), selection, saved=all_saved, program=program)
        from_leaves = {new: old for new, old in found.sources.items() if new in leaves}
        restored = _read_leaves(folder, leaves, saved, from_leaves)
        new_states = {
            new: states[old] for new, old in found.sources.items() if new not in leaves
        }
        refused = checkpoint.write_content(
            Content({**leaves, **restored}, new_states),
            may_refuse={
                name for name in new_states if is_inside(name, selection.may_differ)
            },
        )
    done = {new: old for new, old in found.sources.items() if new not in refused}
    report = RestoreReport(
        path=str(folder),
        restored=tuple(done),
        kept=tuple(sorted(program.keys() - done.keys())),
        unused=tuple(sorted(all_saved.keys() - set(done.values()))),
        differences=(
            *found.differences,
            *(_describe_refusal(*refusal) for refusal in sorted(refused.items())),
        ),
    )
    if report.kept or report.unused:
        is_new = selection.is_whole and report.kept
        logger.log(logging.WARNING if is_new else logging.INFO, "%s", report)
    return report


def _describe_refusal(name: str, text: str) -> str:
    # The last line of a long message is what to do about it: nothing, in this case.
    return f"~ {name}: {text.rpartition(chr(10))[0] or text}"


@contextlib.contextmanager
def _reading(folder: epath.Path) -> Iterator[None]:
    try:
        yield
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
    with _reading(folder):
        stored = read_arrays(folder, shardings)
    return {
        path: as_restored(stored[sources[path]], leaf) for path, leaf in targets.items()
    }
