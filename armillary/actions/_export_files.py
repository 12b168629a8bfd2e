"""The files of exported models: their names, and which of them stay."""

import os
import re
from typing import Any

from etils import epath

from armillary._checks import check_positive_int
from armillary.checkpoint._folder import as_absolute
from armillary.state._step_counter import as_step_counter


class ExportFileManager:
    """Names the files of one model, `<base_name>-<id>`, and removes old ones.

    A subclass may do either in another way: `ExportModel` calls `next_name` before it
    writes, and `clean_up` after that. One program uses a base name at a time.

    Orbit's class of this name keeps all files if `max_to_keep` is below 0; here that
    is `None`, as in `CheckpointManager`.

    Args:
        base_name: What the names of the files begin with, such as
            `"runs/digits/export"`. Its directory is made by the first export.
        max_to_keep: How many files stay: those with the highest numbers, and the one
            that was written last in any case. `None` keeps all.
        next_id_fn: What gives the number of the next file: a variable such as
            `optimizer.step`, or a function without arguments. A number that is there
            already replaces its file. `None` counts from 0, on from what is there.

    Raises:
        TypeError: If `next_id_fn` is neither a variable nor a function.
        ValueError: If `max_to_keep` is neither `None` nor a positive integer.
    """

    def __init__(
        self,
        base_name: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        next_id_fn: Any = None,
    ) -> None:
        if max_to_keep is not None:
            max_to_keep = check_positive_int("max_to_keep", max_to_keep)
        self._base = as_absolute("base_name", base_name)
        self._max_to_keep = max_to_keep
        self._next_id = (
            None if next_id_fn is None else as_step_counter(next_id_fn, "next_id_fn")
        )
        self._last_name: str | None = None
        self._pattern = re.compile(rf"{re.escape(self._base.name)}-(\d+)")

    @property
    def managed_files(self) -> list[str]:
        """Paths of the complete files, by increasing number."""
        found = [(int(match[1]), str(path)) for path, match in self._matches("{}")]
        return [path for _, path in sorted(found)]

    def next_name(self) -> str:
        """Returns the path of the next file."""
        if self._next_id is not None:
            number = self._next_id()
        else:
            files = self.managed_files
            number = int(files[-1].rpartition("-")[2]) + 1 if files else 0
        self._last_name = f"{self._base}-{number}"
        return self._last_name

    def clean_up(self) -> None:
        """Removes all but `max_to_keep` files, and what interrupted exports left."""
        for path, _ in self._matches(temporary_name("{}")):
            path.unlink(missing_ok=True)
        if self._max_to_keep is None:
            return
        # A run that went back to an earlier step writes lower numbers than are there.
        files = sorted(self.managed_files, key=lambda path: path == self._last_name)
        for path in files[: -self._max_to_keep]:
            epath.Path(path).unlink(missing_ok=True)

    def _matches(self, form: str) -> list[tuple[epath.Path, re.Match[str]]]:
        """Returns the files whose names have a form, in which `{}` is ours."""
        before, after = form.split("{}")
        found: list[tuple[epath.Path, re.Match[str]]] = []
        folder = self._base.parent
        for path in folder.iterdir() if folder.is_dir() else ():
            if not (path.name.startswith(before) and path.name.endswith(after)):
                continue
            end = len(path.name) - len(after)
            match = self._pattern.fullmatch(path.name, len(before), end)
            if match is not None and path.is_file():
                found.append((path, match))
        return found


def temporary_name(name: str) -> str:
    """Returns the name that a file has until it is complete."""
    return f".{name}.incomplete"
