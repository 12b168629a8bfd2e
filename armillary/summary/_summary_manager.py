"""Writes nested outputs: one directory, and one writer, for each level of nesting."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from armillary._checks import (
    check_callable,
    check_instance,
    check_path,
    list_lines,
)
from armillary._process import get_process
from armillary._records import flatten
from armillary.distribute._global_arrays import as_local
from armillary.distribute.replica._values import PerReplica
from armillary.summary._kinds import Histogram, Summary
from armillary.summary._tensorboard import SummaryWriter, TensorBoardWriter, WriterGroup
from armillary.typing import Output

_NUMBERS = (np.bool_, np.integer, np.floating)


class SummaryManager:
    """Writes summaries below one directory.

    Args:
        summary_dir: The directory of the outermost values. Nothing is made before the
            first value is written.
        writer_fn: Function from a directory to a `SummaryWriter`, called on the first
            value of each directory, or a sequence of such functions, to write to
            several places at once. TensorBoard event files by default.

    Raises:
        ValueError: If `summary_dir` is a file, or is not local without a `writer_fn`.
        TypeError: If `writer_fn`, or one of several, is not callable.
    """

    def __init__(
        self,
        summary_dir: str | os.PathLike[str],
        *,
        writer_fn: Callable[[str], SummaryWriter]
        | Sequence[Callable[[str], SummaryWriter]]
        | None = None,
    ) -> None:
        self._summary_dir = check_path("summary_dir", summary_dir)
        if Path(self._summary_dir).is_file():
            raise ValueError(
                f"`summary_dir` is {self._summary_dir!r}, which is a file, but "
                "summaries need a directory. Use another name."
            )
        make: Any = writer_fn
        if isinstance(writer_fn, list | tuple):
            for index, each in enumerate(writer_fn):
                check_callable(f"writer_fn[{index}]", each)
            make = functools.partial(WriterGroup, tuple(writer_fn))
        elif writer_fn is not None:
            check_callable("writer_fn", writer_fn)
        if writer_fn is None and "://" in self._summary_dir:
            raise ValueError(
                f"`summary_dir` is {self._summary_dir!r}, but event files are local. "
                "Use a local directory, or a `writer_fn` that reaches that place."
            )
        self._make: Any = TensorBoardWriter if writer_fn is None else make
        self._writers: dict[str, Any] = {}

    @property
    def summary_dir(self) -> str:
        """The directory of the outermost values."""
        return self._summary_dir

    def write_summaries(self, values: Output, *, step: int) -> None:
        """Writes all of `values`; of several processes, the chief does.

        Args:
            values: Values by tag; `None` for nothing. A number or an array of shape
                `()` is a scalar, any other array is written as its `Histogram`, and a
                `Histogram`, an `Image` or a `Text` as itself. A nested dictionary goes
                to the subdirectory of its name. Scalars that are infinite or NaN are
                written too.
            step: The step that the values belong to.

        Raises:
            TypeError: If a key is no name, or leaves `summary_dir`, or if a value is
                not numeric or has no elements. All are listed, and none is written.
            AttributeError: If a writer has no method for a kind of value.
        """
        fix = 'Use a dictionary, such as `{"loss": loss}`.'
        check_instance("values", values, Mapping | None, fix)
        problems: list[str] = []
        entries = list(_find_values(values or {}, (), problems))
        if problems:
            raise TypeError(
                f"{len(problems)} values cannot be written as summaries. Keys must be "
                "names, and values numbers, arrays of numbers that are not empty, or "
                f"each a `Histogram`, an `Image` or a `Text`:\n{list_lines(problems)}\n"
                "Convert the value, reduce per-replica values (`strategy.reduce`), or "
                "leave the entry out."
            )
        # On all processes: each may have a part of an array.
        known = jax.tree.map(as_local, [value for *_, value in entries])
        if not get_process().is_chief:
            return
        for (parents, tag, _), value in zip(entries, known, strict=True):
            if not isinstance(value, Summary) and np.shape(value):
                # A copy on the host: of several processes, only this one counts.
                value = Histogram(np.asarray(value))
            if isinstance(value, Summary):
                value.write(self._writer(parents), tag, int(step))
            else:
                number = float(np.asarray(value))
                self._writer(parents).scalar(tag, number, int(step))

    def write_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Writes what makes this run another than the next one.

        Nested values are written by path, such as `"optimizer/rate"`, and what is
        neither a number nor a truth value as a string. A writer without a method
        `hyperparameters` is passed over.

        Args:
            values: Values by name.
        """
        if values and get_process().is_chief:
            write = getattr(self._writer(()), "hyperparameters", None)
            if write is not None:
                write(flatten(values))

    def flush(self) -> None:
        """Brings everything written so far onto the disk."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flushes and closes all files. A later write starts new ones."""
        while self._writers:
            _, writer = self._writers.popitem()
            writer.close()

    def _writer(self, parents: tuple[str, ...]) -> Any:
        directory = os.path.join(self._summary_dir, *parents)
        if directory not in self._writers:
            self._writers[directory] = self._make(directory)
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


def _find_values(
    values: Mapping[Any, Any], parents: tuple[str, ...], problems: list[str]
) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yields each value with its directory and tag, and notes what is wrong."""
    for key, value in values.items():
        path = "/".join((*parents, str(key)))
        if not isinstance(key, str) or not key:
            problems.append(f"{path}: the key {key!r} is no name")
        elif not isinstance(value, Mapping):
            problem = _find_problem(value)
            if problem is not None:
                problems.append(f"{path}: {problem}")
            yield parents, key, value
        elif key.startswith("/") or ".." in key.split("/"):
            problems.append(f"{path}: {key!r} cannot name a subdirectory")
        else:
            yield from _find_values(value, (*parents, key), problems)


def _find_problem(value: Any) -> str | None:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        return "a value that JAX traces; return it from `train_loop_end`"
    if isinstance(value, int | float | Summary):
        return None
    if isinstance(value, PerReplica):
        return repr(value)
    if not isinstance(value, jax.Array) and hasattr(value, "__array__"):
        value = np.asarray(value)
    if not hasattr(value, "dtype"):
        return f"{value!r} of type {type(value).__name__}"
    is_number = any(jax.dtypes.issubdtype(value.dtype, kind) for kind in _NUMBERS)
    is_fine = is_number and 0 not in value.shape
    return None if is_fine else f"{value.dtype} {tuple(value.shape)}"
