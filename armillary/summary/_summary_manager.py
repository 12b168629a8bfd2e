"""Writes nested outputs: one directory, and one writer, for each level of nesting."""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from armillary._checks import check_callable, check_instance, check_path
from armillary._json_values import flatten
from armillary._process import get_process
from armillary.distribute._global_arrays import as_local
from armillary.summary._kinds import Histogram, Summary, as_real_array
from armillary.summary._tensorboard import TensorBoardWriter
from armillary.typing import Output


@runtime_checkable
class SummaryWriter(Protocol):
    """Writes the summaries of one directory.

    To write a `Histogram`, an `Image`, a `Text` or hyperparameters, a writer also needs
    the method `histogram`, `image`, `text` or `hyperparameters`, as in
    `TensorBoardWriter`. If a writer has a method `resume`, it is called with the step
    from which a restored run continues.
    """

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Writes one value, which may be infinite or not a number."""

    def flush(self) -> None:
        """Brings everything written so far onto the disk."""

    def close(self) -> None:
        """Flushes and closes; no other method is called afterwards."""


class SummaryManager:
    """Writes summaries below one directory.

    Args:
        summary_dir: The directory of the outermost values, which is made when the first
            value is written. `None` writes nothing.
        writer_fn: Function from a directory to a `SummaryWriter`, called on the first
            value of each directory, or several such functions.

    Raises:
        ValueError: If `summary_dir` is not local, without a `writer_fn`.
        TypeError: If `writer_fn`, or one of several, is not callable.
    """

    def __init__(
        self,
        summary_dir: str | os.PathLike[str] | None,
        *,
        writer_fn: Callable[[str], SummaryWriter]
        | Sequence[Callable[[str], SummaryWriter]] = TensorBoardWriter,
    ) -> None:
        makers: Any = [writer_fn]
        if isinstance(writer_fn, list | tuple):
            makers = writer_fn
        for make in makers:
            check_callable("writer_fn", make)
        if summary_dir is not None:
            summary_dir = check_path("summary_dir", summary_dir)
            if "://" in summary_dir and TensorBoardWriter in makers:
                raise ValueError(
                    f"`summary_dir` is {summary_dir!r}, but event files are local. Use "
                    "a local directory, or a `writer_fn` that reaches that place."
                )
        self.summary_dir = summary_dir
        """The directory of the outermost values."""
        self._makers = makers
        self._writers: dict[str, list[Any]] = {}
        # The step of the last restore, and of the last one after which training ran.
        self._restored_at: int | None = None
        self._resumed_at: int | None = None
        # The directories whose writers were called since then.
        self._resumed: set[str] = set()

    def write_summaries(self, values: Output, *, step: int) -> None:
        """Writes all `values`; if there are several processes, the chief writes them.

        Args:
            values: Values by tag: numbers, arrays, `Histogram`, `Image` and `Text`. An
                array with axes is written as its `Histogram`. A nested dictionary goes
                to the subdirectory of its name.
            step: The step that the values belong to.

        Raises:
            TypeError: If a key is not a name, or leaves `summary_dir`, or if a value is
                not numeric. Then nothing is written.
            ValueError: If an array has no elements.
            AttributeError: If no writer has a method for a kind of value.
        """
        if self.summary_dir is None:
            return
        fix = 'Use a dictionary, such as `{"loss": loss}`.'
        check_instance("values", values, Mapping | None, fix)
        entries = list(_find_values(values or {}, ()))
        # This runs on all processes, because each may have a part of an array.
        found = [value for _, _, value in entries]
        local = jax.tree.map(as_local, found)
        if not get_process().is_chief:
            return

        step = int(step)
        self._resume_before(step)
        for (parents, tag, _), value in zip(entries, local, strict=True):
            if not isinstance(value, Summary):
                # The array is copied to the host first. Only this process comes here,
                # so it cannot run a program over the devices of several processes.
                array = np.asarray(value)
                if not array.shape:
                    self._write(parents, "scalar", tag, float(array), step)
                    continue
                value = Histogram(array)

            for content in value.read(tag, step):
                self._write(parents, value.kind, *content, step)

    def write_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Writes the hyperparameters of this run, to each writer that supports them.

        Args:
            values: Values by name. Nested ones are written by path, such as
                `"optimizer/rate"`. Numbers and booleans keep their type; other values
                are written as strings.
        """
        if not values or self.summary_dir is None:
            return
        if get_process().is_chief:
            self._write((), "hyperparameters", flatten(values))

    def resume_at(self, step: int) -> None:
        """Notes that a run was restored at a step; a `Controller` calls this method.

        Before values of later steps are written, the `resume` of each writer is called.
        TensorBoard then shows these steps once, although the run has written values for
        them before.

        Args:
            step: The global step of the checkpoint.
        """
        self._restored_at = int(step)

    def _resume_before(self, step: int) -> None:
        """Calls `resume` of all writers once, before the values of later steps."""
        # If a restored model is only evaluated, the values of later steps stay.
        if self._restored_at is None or step <= self._restored_at:
            return
        self._resumed_at = self._restored_at
        self._restored_at = None
        self._resumed.clear()
        for directory in self._writers:
            self._resume(directory)

    def _resume(self, directory: str) -> None:
        """Calls `resume` of the writers of a directory, once for each restore."""
        # A directory that is opened again already has values of the resumed run.
        if self._resumed_at is None or directory in self._resumed:
            return
        self._resumed.add(directory)
        for writer in self._writers[directory]:
            if hasattr(writer, "resume"):
                writer.resume(self._resumed_at)

    def flush(self) -> None:
        """Brings everything written so far onto the disk."""
        for writer in itertools.chain(*self._writers.values()):
            writer.flush()

    def close(self) -> None:
        """Flushes and closes all files. A later write starts new ones."""
        while self._writers:
            _, writers = self._writers.popitem()
            for writer in writers:
                writer.close()

    def _write(self, parents: tuple[str, ...], method: str, *arguments: Any) -> None:
        """Calls a method of each writer of a directory that has it."""
        directory = os.path.join(str(self.summary_dir), *parents)
        if directory not in self._writers:
            self._open_writers(directory)
        writers = self._writers[directory]
        able = [writer for writer in writers if hasattr(writer, method)]

        # A controller writes hyperparameters for the writers that can, if there are
        # any. A value that no writer can write is a mistake.
        is_optional = method == "hyperparameters"
        if not able and not is_optional:
            raise AttributeError(f"none of the writers has a method {method!r}")
        for writer in able:
            write = getattr(writer, method)
            write(*arguments)

    def _open_writers(self, directory: str) -> None:
        self._writers[directory] = [make(directory) for make in self._makers]
        # They missed the call for the other writers, when the run was restored.
        self._resume(directory)


def _find_values(
    values: Mapping[Any, Any], parents: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yields each value with its directory and tag."""
    for key, value in values.items():
        path = (*parents, key)
        is_folder = isinstance(value, Mapping)
        is_name = isinstance(key, str) and key != ""
        # As a directory, such a key would be outside of `summary_dir`.
        leaves_folder = is_name and (key[0] == "/" or ".." in key.split("/"))
        is_refused = is_folder and leaves_folder
        if not is_name or is_refused:
            raise TypeError(
                f"`values` has the key {key!r} at {path!r}, but a key must be the name "
                "of a value, or of a subdirectory. Use a name such as `'loss'`."
            )
        if is_folder:
            yield from _find_values(value, path)
        elif isinstance(value, int | float | Summary):
            yield parents, key, value
        else:
            name = "/".join(path)
            yield parents, key, _as_filled_array(name, value)


def _as_filled_array(name: str, value: Any) -> Any:
    """Returns a value as an array, which must have elements."""
    if not isinstance(value, jax.Array) and hasattr(value, "__array__"):
        value = np.asarray(value)
    array = as_real_array(name, value)
    if not array.size:
        raise ValueError(f"`{name}` has no elements. Leave it out.")
    return array
