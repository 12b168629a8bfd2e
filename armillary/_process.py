"""Which process of the job this is: only one of them writes logs and files.

Asking JAX would start its devices. So the code that joins processes records it here.
A program that joins no others is process 0 of 1.
"""

from dataclasses import dataclass

READER_THREADS = "armillary-prefetch"
"""The name of the threads that read data ahead."""


@dataclass(frozen=True)
class Process:
    """A process of a job.

    Args:
        index: Its number, from 0. Process 0 is the chief.
        count: How many processes train together.
    """

    index: int
    count: int

    @property
    def is_chief(self) -> bool:
        """Whether this is the one that writes log lines, summaries and files."""
        return self.index == 0

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"


_current = Process(0, 1)


def get_process() -> Process:
    """Returns which process this is."""
    return _current


def set_process(process: Process) -> None:
    """Records which process this is, once it has joined the others."""
    global _current
    _current = process


def is_first() -> bool:
    """Returns whether this is the first process of those that JAX has joined.

    For files, as the program may have called `jax.distributed.initialize` itself. Only
    then are devices started here.
    """
    import jax

    return not jax.distributed.is_initialized() or jax.process_index() == 0
