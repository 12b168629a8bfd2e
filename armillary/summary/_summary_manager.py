"""Writes nested outputs: one directory, and one writer, for each level of nesting."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from armillary._checks import (
    answers_old_names,
    check_callable,
    check_instance,
    check_path,
)
from armillary._process import get_process
from armillary._records import flatten
from armillary.distribute._global_arrays import as_local
from armillary.distribute.replica._values import PerReplica
from armillary.summary._kinds import Histogram, Summary
from armillary.summary._tensorboard import SummaryWriter, TensorBoardWriter, WriterGroup
from armillary.typing import Output

_NUMBERS = (np.bool_, np.integer, np.floating)


@answers_old_names(
    summary_fn="Use `writer_fn`, which makes the writer of each directory.",
    global_step="Leave it out: `write_summaries(output, step=...)` takes the step.",
)
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
                "summaries need a directory. Use the name of a directory, which is "
                "made if it does not exist."
            )
        if isinstance(writer_fn, Sequence) and not isinstance(writer_fn, str | bytes):
            for index, each in enumerate(writer_fn):
                check_callable(f"writer_fn[{index}]", each)
        elif writer_fn is not None:
            check_callable("writer_fn", writer_fn)
        if writer_fn is None and "://" in self._summary_dir:
            raise ValueError(
                f"`summary_dir` is {self._summary_dir!r}, but event files are written "
                "to local directories only. Use a local directory, or a `writer_fn` "
                "whose writers reach that place."
            )
        self._writer_fn = TensorBoardWriter if writer_fn is None else writer_fn
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
            TypeError: If a key is not a string or a value is not numeric, if this is
                called in a step, or if a writer has no method for a kind of value.
            ValueError: If an array has no elements, a key is empty, or the name of a
                nested dictionary leaves `summary_dir`. All bad values are listed, and
                then none is written.
        """
        fix = 'Use a dictionary, such as `{"loss": loss}`.'
        check_instance("values", values, Mapping | None, fix)
        entries = list(_find_values(values or {}, ()))
        _check_known([step, *(value for *_, value, _ in entries)])
        _check([problem for *_, problem in entries if problem is not None])
        # On all processes: each may have a part of an array.
        known = jax.tree.map(as_local, [value for *_, value, _ in entries])
        if not get_process().is_chief:
            return
        for (parents, tag, *_), value in zip(entries, known, strict=True):
            writer = self._writer(parents)
            if not isinstance(value, Summary) and np.shape(value):
                # A copy on the host: of several processes, only this one counts.
                value = Histogram(np.asarray(value))
            if isinstance(value, Summary):
                _check_writer(writer, tag, value)
                value.write(writer, tag, int(step))
            else:
                writer.scalar(tag, float(np.asarray(value)), int(step))

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
            make: Any = self._writer_fn
            if isinstance(make, Sequence):
                self._writers[directory] = WriterGroup([fn(directory) for fn in make])
            else:
                self._writers[directory] = make(directory)
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
        elif not key and not isinstance(value, Mapping):
            yield parents, path, value, (ValueError, f"{path}: the key is empty")
        elif not isinstance(value, Mapping):
            yield parents, key, value, _find_problem(path, value)
        elif key.startswith("/") or not key or ".." in key.split("/"):
            problem = (ValueError, f"{path}: {key!r} cannot name a subdirectory")
            yield parents, key, value, problem
        else:
            yield from _find_values(value, (*parents, key))


def _find_problem(path: str, value: Any) -> _Problem | None:
    if isinstance(value, int | float | Summary):
        return None
    if isinstance(value, PerReplica):
        return TypeError, f"{path}: {value!r}"
    if not isinstance(value, jax.Array) and hasattr(value, "__array__"):
        value = np.asarray(value)
    if not hasattr(value, "dtype"):
        return TypeError, f"{path}: {value!r} of type {type(value).__name__}"
    shape = tuple(value.shape)
    if not any(jax.dtypes.issubdtype(value.dtype, kind) for kind in _NUMBERS):
        return TypeError, f"{path}: {value.dtype} {shape}"
    if 0 in shape:
        return ValueError, f"{path}: {value.dtype} {shape}"
    return None


def _check(problems: list[_Problem]) -> None:
    if not problems:
        return
    kind = TypeError if any(kind is TypeError for kind, _ in problems) else ValueError
    lines = "\n".join(f"  {line}" for _, line in problems)
    raise kind(
        f"{len(problems)} values cannot be written as summaries. What a loop or an "
        "evaluation returns, or `write_summaries` is given, must have strings as keys, "
        "and as values numbers, arrays of numbers that are not empty, or each a "
        f"`Histogram`, an `Image` or a `Text`:\n{lines}\n"
        "Convert the value, reduce per-replica values (`strategy.reduce`), or leave "
        "the entry out."
    )


def _check_known(values: list[Any]) -> None:
    leaves = [leaf for value in values for leaf in jax.tree.leaves(value)]
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise TypeError(
            "`write_summaries` was called in a function that JAX traces, such as a "
            "step, in which values are not known yet. Keep them in a metric or an "
            "attribute of the trainer, and return them from `train_loop_end` or "
            "`eval_end`, which run in Python."
        )


def _check_writer(writer: SummaryWriter, tag: str, value: Summary) -> None:
    if not hasattr(writer, value.method):
        name = (
            repr(writer) if isinstance(writer, WriterGroup) else type(writer).__name__
        )
        raise TypeError(
            f"{tag!r} is {value!r}, but `{name}`, which `writer_fn` returned, has no "
            f"method `{value.method}` to write it. Give it one, as "
            "`armillary.summary.TensorBoardWriter` has, or leave the entry out."
        )
