"""The messages between the parent and its workers: one JSON object a line.

A worker first sends `{"event": "ready", ...}`. Then, for each `{"run": steps}` that it
reads, it runs that many steps to their end and sends `{"event": "ran", "steps": ...,
"seconds": ..., "loss": ...}`. `{"quit": true}` or the end of its input ends it. An
error is `{"event": "error", "message": ..., "skip": ...}`. With `skip`, the contestant
does not support the case, which is not a failure.

Nothing here imports more than the standard library: peers run in other environments.
"""

import json
from dataclasses import dataclass
from typing import IO, Any

DATA_KINDS = ("memory", "grain", "resident")
DTYPES = ("f32", "bf16")
CONVOLUTIONS = ("stock", "canonical")
SIZES = ("full", "small")


class UnsupportedError(Exception):
    """A contestant cannot run a case; the message says why, and what would help."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings with which a contestant runs its task.

    Attributes:
        steps_per_loop: Steps between two moments at which the mean loss is reported.
        devices: Devices the batch is divided over.
        data: `"memory"` (arrays on the host), `"grain"` (a Grain pipeline over them) or
            `"resident"` (the arrays stay on the device).
        dtype: The dtype of the computation; parameters are float32.
        convolutions: `"canonical"` lowers the convolutions of the hand-written loops on
            the CPU as Armillary's programs have them, `"stock"` as XLA does.
    """

    steps_per_loop: int = 1
    devices: int = 1
    data: str = "memory"
    dtype: str = "f32"
    convolutions: str = "stock"


def write_message(stream: IO[str], message: dict[str, Any]) -> None:
    """Writes one message and flushes it."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()
