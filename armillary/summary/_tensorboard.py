"""TensorBoard event files.

tensorboardX provides the record format and the protocol buffers. Its own writer class
is not used: it hands events to a thread whose queue `flush` does not drain, and it
names files by the second, so a quick restart would overwrite the file of the run that
it resumes.
"""

import importlib
import itertools
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from armillary._checks import check_path


@runtime_checkable
class SummaryWriter(Protocol):
    """Writes the summaries of one directory.

    A `SummaryManager` makes one writer for each directory, on its first value, and
    calls it from one thread. A writer that is to write a `Histogram`, an `Image` or a
    `Text` has `histogram`, `image` or `text` too, as `TensorBoardWriter` does, and one
    for hyperparameters has `hyperparameters`.
    """

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Writes one value, which may be infinite or not a number."""

    def flush(self) -> None:
        """Brings everything written so far onto the disk."""

    def close(self) -> None:
        """Flushes and closes; no other method is called afterwards."""


class WriterGroup:
    """Hands everything to each of several writers that has a method for it."""

    def __init__(self, makers: Iterable[Callable[[str], Any]], directory: str) -> None:
        self._writers = [make(directory) for make in makers]

    def __getattr__(self, name: str) -> Callable[..., None]:
        methods = [
            getattr(writer, name) for writer in self._writers if hasattr(writer, name)
        ]
        if self._writers and not methods:
            raise AttributeError(f"none of the writers has a method {name!r}")

        def write(*arguments: Any) -> None:
            for method in methods:
                method(*arguments)

        return write


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

        folder = Path(check_path("directory", directory))
        folder.mkdir(parents=True, exist_ok=True)
        # Two writers of one second, one host and one process still differ.
        suffix = f".{os.getpid()}.{time.time_ns()}.{next(_file_numbers)}"
        self._events = EventsWriter(str(folder / "events"), suffix)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Writes one value, which may be infinite or not a number."""
        self._write(tag, step, simple_value=value)

    def histogram(
        self, tag: str, edges: np.ndarray, counts: np.ndarray, step: int
    ) -> None:
        """Writes how many values lie between each two neighbors of `edges`.

        Args:
            tag: The name.
            edges: One more than there are counts, in ascending order. The first and the
                last count are not 0.
            counts: How many values lie between two edges.
            step: The step that they belong to.
        """
        # Of buckets that are empty, one in a row is enough.
        kept = (counts > 0) | np.append(counts[1:] > 0, True)
        middles = (edges[:-1] + edges[1:]) / 2
        histogram = _proto("summary").HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=counts.sum(),
            sum=counts @ middles,
            sum_squares=counts @ middles**2,
            bucket_limit=edges[1:][kept],
            bucket=counts[kept],
        )
        self._write(tag, step, histo=histogram)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        """Writes an image: `uint8`, of shape `(height, width, channels)`."""
        height, width, channels = pixels.shape
        image = _proto("summary").Summary.Image(
            height=height,
            width=width,
            colorspace=channels,
            encoded_image_string=as_png(pixels),
        )
        self._write(tag, step, image=image)

    def text(self, tag: str, text: str, step: int) -> None:
        """Writes text, which TensorBoard shows as Markdown."""
        metadata = _proto("summary").SummaryMetadata(
            plugin_data={"plugin_name": "text"}
        )
        tensor = _proto("tensor").TensorProto(
            dtype="DT_STRING", string_val=[text.encode()]
        )
        self._write(tag, step, metadata=metadata, tensor=tensor)

    def hyperparameters(self, values: Mapping[str, bool | int | float | str]) -> None:
        """Writes what TensorBoard's page of hyperparameters shows for the directory."""
        from tensorboardX.summary import hparams

        _, start, _ = hparams(dict(values), {})
        # TensorBoard's reader looks at values only.
        tensor = _proto("tensor").TensorProto(dtype="DT_FLOAT", float_val=[0.0])
        start.value[0].tensor.CopyFrom(tensor)
        self._write_summary(start, 0)

    def _write(self, tag: str, step: int, **content: Any) -> None:
        summaries = _proto("summary")
        value = summaries.Summary.Value(tag=tag, **content)
        self._write_summary(summaries.Summary(value=[value]), step)

    def _write_summary(self, summary: Any, step: int) -> None:
        event = _proto("event").Event(wall_time=time.time(), step=step, summary=summary)
        self._events.write_event(event)

    def flush(self) -> None:
        """Brings everything written so far onto the disk."""
        self._events.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._events.close()


def as_png(pixels: np.ndarray) -> bytes:
    """Returns the file of an image."""
    height, width, channels = pixels.shape
    color_type = {1: 0, 3: 2, 4: 6}[channels]
    # Each row begins with the number of its filter: 0 for none.
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))
    chunks = {
        b"IHDR": struct.pack(">2I5B", width, height, 8, color_type, 0, 0, 0),
        b"IDAT": zlib.compress(rows.tobytes()),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )


def _proto(name: str) -> Any:
    """Returns a generated module, whose names no type checker sees."""
    return importlib.import_module(f"tensorboardX.proto.{name}_pb2")
