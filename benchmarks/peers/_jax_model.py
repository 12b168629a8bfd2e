"""The model of the hand-written loops, for peers that train with JAX.

These peers train the same function of the same parameters, with the same Optax
optimizer and the same batches in the same order, so their losses must be the same too.
Only the loop around the step differs.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.contestants.rows import read_batches
from benchmarks.peers._case import Peer
from benchmarks.protocol import Options, UnsupportedError
from benchmarks.tasks import Task


class JaxPeer(Peer):
    """A peer that trains the model of the hand-written loops.

    It has no loop of several steps, so `steps_per_loop` only sets how often the loss is
    read. It saves no position in the data: after a restore, it reads the batches before
    the position again, and drops them.
    """

    tasks = ("mlp", "cnn", "bert", "gpt", "many-leaves")

    def _check_devices(self, options: Options) -> None:
        """Refuses several devices.

        Raises:
            UnsupportedError: If there are several.
        """
        if options.devices != 1:
            raise UnsupportedError(
                f"`devices` is {options.devices}, but `{self.library}` is compared on "
                "one device. Use `--devices 1`."
            )


def read_from(task: Task, num_read: int) -> Iterator[Any]:
    """Returns the batches after some that were read before."""
    batches = read_batches(task, "memory")
    for _ in range(num_read):
        next(batches)
    return batches
