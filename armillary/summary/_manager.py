"""Writes nested outputs: one directory, and one writer, for each level of nesting."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from armillary._checks import answers_old_names, check_callable
from armillary._process import get_process
from armillary._typing import Output
from armillary.summary._tensorboard import TensorBoardWriter
from armillary.summary._writer import SummaryWriter

_NUMBERS = (np.bool_, np.integer, np.floating)


@answers_old_names(
    summary_fn="Use `writer_fn`, which makes the writer of each directory.",
    global_step="Leave it out: `write_summaries(output, step=...)` takes the step.",
)
class SummaryManager:
    """Writes scalars below one directory.

    Args:
        summary_dir: The directory of the outermost scalars. Nothing is made before the
            first value is written.
        writer_fn: Function from a directory to a `SummaryWriter`, called on the first
            value of each directory. TensorBoard event files by default.

    Raises:
        ValueError: If `summary_dir` is a file, or is not local without a `writer_fn`.
        TypeError: If `writer_fn` is not callable.
    """

    def __init__(
        self,
        summary_dir: str | os.PathLike[str],
        *,
        writer_fn: Callable[[str], SummaryWriter] | None = None,
    ) -> None:
        self._summary_dir = os.fspath(summary_dir)
        if Path(self._summary_dir).is_file():
            raise ValueError(
                f"`summary_dir` is {self._summary_dir!r}, which is a file, but "
                "summaries need a directory. Use the name of a directory, which is "
                "made if it does not exist."
            )
        if writer_fn is not None:
            check_callable("writer_fn", writer_fn)
        elif "://" in self._summary_dir:
            raise ValueError(
                f"`summary_dir` is {self._summary_dir!r}, but event files are written "
                "to local directories only. Use a local directory, or a `writer_fn` "
                "whose writers reach that place."
            )
        self._writer_fn: Callable[[str], SummaryWriter] = writer_fn or TensorBoardWriter
        self._writers: dict[str, SummaryWriter] = {}

    @property
    def summary_dir(self) -> str:
        """The directory of the outermost scalars."""
        return self._summary_dir

    def write_summaries(self, values: Output, *, step: int) -> None:
        """Writes every scalar of `values`; of several processes, the chief does.

        Args:
            values: Numbers or arrays of shape `()` by tag, or `None` for nothing. A
                nested dictionary goes to the subdirectory of its name. Infinities and
                NaN are written too.
            step: The step that the values belong to.

        Raises:
            TypeError: If a key is not a string or a value is not numeric.
            ValueError: If a value has more than one element, or the name of a nested
                dictionary leaves `summary_dir`. All bad values are listed, and then
                none is written.
        """
        entries = list(_find_values(values or {}, ()))
        _check([problem for *_, problem in entries if problem is not None])
        if not get_process().is_chief:
            return
        for parents, tag, value, _ in entries:
            self._writer(parents).scalar(tag, float(np.asarray(value)), int(step))

    def flush(self) -> None:
        """Brings everything written so far onto the disk."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flushes and closes all files. A later write starts new ones."""
        while self._writers:
            _, writer = self._writers.popitem()
            writer.close()

    def _writer(self, parents: tuple[str, ...]) -> SummaryWriter:
        directory = os.path.join(self._summary_dir, *parents)
        if directory not in self._writers:
            self._writers[directory] = self._writer_fn(directory)
        return self._writers[directory]


class NoopSummaryManager:
    """Has the methods of `SummaryManager` and writes nothing."""

    @property
    def summary_dir(self) -> None:
        """`None`: there is no directory."""
        return None

    def write_summaries(self, values: Output, *, step: int) -> None:
        """Writes nothing."""

    def flush(self) -> None:
        """Returns at once."""

    def close(self) -> None:
        """Returns at once."""


_Problem = tuple[type[Exception], str]
_Entry = tuple[tuple[str, ...], str, Any, _Problem | None]


def _find_values(
    values: Mapping[Any, Any], parents: tuple[str, ...]
) -> Iterator[_Entry]:
    """Yields each value with its directory, its tag and what is wrong with it."""
    for key, value in values.items():
        path = "/".join((*parents, str(key)))
        if not isinstance(key, str):
            kind = type(key).__name__
            problem = (TypeError, f"{path}: the key {key!r} is of type {kind}")
            yield parents, path, value, problem
        elif not isinstance(value, Mapping):
            yield parents, key, value, _find_problem(path, value)
        elif key.startswith("/") or not key or ".." in key.split("/"):
            problem = (ValueError, f"{path}: {key!r} cannot name a subdirectory")
            yield parents, key, value, problem
        else:
            yield from _find_values(value, (*parents, key))


def _find_problem(path: str, value: Any) -> _Problem | None:
    if isinstance(value, int | float):
        return None
    if not isinstance(value, jax.Array) and hasattr(value, "__array__"):
        value = np.asarray(value)
    if not hasattr(value, "dtype"):
        return TypeError, f"{path}: {value!r} of type {type(value).__name__}"
    shape = tuple(value.shape)
    if not any(jax.dtypes.issubdtype(value.dtype, kind) for kind in _NUMBERS):
        return TypeError, f"{path}: {value.dtype} {shape}"
    if shape != ():
        return ValueError, f"{path}: {value.dtype} {shape}"
    return None


def _check(problems: list[_Problem]) -> None:
    if not problems:
        return
    kind = TypeError if any(kind is TypeError for kind, _ in problems) else ValueError
    lines = "\n".join(f"  {line}" for _, line in problems)
    raise kind(
        f"`values` has {len(problems)} entries that are not scalars, and a summary is "
        f"a number of shape () under a string:\n{lines}\n"
        "Reduce arrays (`value.mean()`), convert what is not a number, or leave the "
        "entry out."
    )
