"""What restoring a checkpoint did."""

from typing import NamedTuple, Self

from armillary._checks import list_lines
from armillary.errors import CheckpointMismatchError


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
