"""TensorBoard event files.

tensorboardX provides the record format and the protocol buffers. Its own writer class
is not used: it hands events to a thread whose queue `flush` does not drain, and it
names files by the second, so a quick restart would overwrite the file of the run that
it resumes.
"""

import importlib
import itertools
import os
import time
from pathlib import Path
from typing import Any

_file_numbers = itertools.count()


class TensorBoardWriter:
    """Writes one event file, which TensorBoard reads while it grows.

    Every writer makes a new file. TensorBoard joins the files of a directory, so a
    resumed run continues its curves, and nothing is ever deleted.

    Args:
        directory: Where the file goes. It is made if it does not exist.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        # Two writers of one second, one host and one process still differ.
        suffix = f".{os.getpid()}.{time.time_ns()}.{next(_file_numbers)}"
        self._events = EventsWriter(str(folder / "events"), suffix)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Writes one value, which may be infinite or not a number."""
        # Generated modules, whose names no type checker sees.
        events: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        summaries: Any = importlib.import_module("tensorboardX.proto.summary_pb2")
        entry = summaries.Summary.Value(tag=tag, simple_value=value)
        summary = summaries.Summary(value=[entry])
        self._events.write_event(
            events.Event(wall_time=time.time(), step=step, summary=summary)
        )

    def flush(self) -> None:
        """Brings everything written so far onto the disk."""
        self._events.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._events.close()
