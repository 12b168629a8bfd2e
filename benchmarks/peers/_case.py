"""The common base of all peers: the cases they refuse, and batches cut in advance."""

import abc
import importlib
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from benchmarks.protocol import Options, UnsupportedError
from benchmarks.tasks import Task


class Peer(abc.ABC):
    """A contestant that trains with another library.

    Attributes:
        library: Its name, as in `benchmarks/peers/<library>.txt`.
        tasks: The tasks that it is compared on.
        facts: Notes about its way of training.
    """

    library: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]] = ("mlp", "cnn", "bert")
    facts: dict[str, Any]

    def setup(self, task: Task, options: Options) -> None:
        """Builds all that `run` needs.

        Args:
            task: The task to train.
            options: The options of the training.

        Raises:
            UnsupportedError: If the library is absent or not compared on this case.
        """
        check_case(self.library, task, options, tasks=self.tasks)
        self.facts = self._build(task, options)

    @abc.abstractmethod
    def run(self, num_steps: int) -> float:
        """Runs steps to their end; returns a mean loss.

        Args:
            num_steps: Steps to run, a multiple of `steps_per_loop`.
        """

    @abc.abstractmethod
    def _build(self, task: Task, options: Options) -> dict[str, Any]:
        """Builds model and data; returns the facts."""


def import_peer(module: str, peer: str) -> ModuleType:
    """Returns a module of a peer's own library.

    Raises:
        UnsupportedError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"`{peer}` needs the package that holds `{error.name}`, which this Python "
            f"does not have. Run `make bench-peers`, which installs "
            f"`benchmarks/peers/{peer}.txt` into `.venv-bench-{peer}`."
        ) from error


def check_case(
    peer: str, task: Task, options: Options, *, tasks: tuple[str, ...]
) -> None:
    """Refuses what no peer is compared on.

    Convolutions may be `"canonical"`: that option is about Armillary and the
    references, and a peer runs its own convolutions next to either.

    Raises:
        UnsupportedError: If the task, the data or the dtype is not supported.
    """
    if task.name not in tasks:
        raise UnsupportedError(
            f"`task` is {task.name!r}, but `{peer}` is compared on {', '.join(tasks)} "
            f"only. Use `--tasks {tasks[0]}`."
        )
    if options.data != "memory":
        raise UnsupportedError(
            f"`data` is {options.data!r}, but `{peer}` reads arrays in memory through "
            "its own input pipeline. Use `--data memory`."
        )
    if options.dtype != "f32":
        raise UnsupportedError(
            f"`dtype` is {options.dtype!r}, but peers are compared in float32. Use "
            "`--dtype f32`."
        )


def cut_batches(task: Task) -> dict[str, np.ndarray]:
    """Returns the task's arrays as `(num_batches, batch_size, ...)`, whole batches."""
    num_batches = task.num_examples // task.batch_size
    return {
        name: array[: num_batches * task.batch_size].reshape(
            num_batches, task.batch_size, *array.shape[1:]
        )
        for name, array in task.make_arrays().items()
    }
