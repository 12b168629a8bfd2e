"""Event files of TensorBoard.

tensorboardX provides the format, but not the writer. Its own `flush` does not drain the
queue, and its file names contain only seconds, so a quick restart would overwrite the
file of the run that it continues.
"""

import importlib
import itertools
import os
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from armillary._checks import check_path

_file_numbers = itertools.count()
_FLOAT = 1  # The number of `DT_FLOAT` in TensorFlow's types.proto.


class TensorBoardWriter:
    """Writes a new event file; TensorBoard joins all such files of a directory.

    Args:
        directory: The directory of the file. It is made if it does not exist.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        folder = Path(check_path("directory", directory))
        folder.mkdir(parents=True, exist_ok=True)
        # The names differ even for two writers of one process in the same second.
        suffix = f".{os.getpid()}.{time.time_ns()}.{next(_file_numbers)}"
        self._events = EventsWriter(str(folder / "events"), suffix)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Writes one value, which may be infinite or not a number."""
        self._write(tag, step, simple_value=value)

    def histogram(
        self,
        tag: str,
        edges: np.ndarray,
        counts: np.ndarray,
        step: int,
    ) -> None:
        """Writes a histogram: the number of values between neighboring `edges`."""
        # Only the last of several empty buckets in a row is kept.
        is_before_filled = np.append(counts[1:] > 0, True)
        kept = (counts > 0) | is_before_filled
        middles = (edges[:-1] + edges[1:]) / 2
        histogram = {
            "min": edges[0],
            "max": edges[-1],
            "num": counts.sum(),
            "sum": counts @ middles,
            "sum_squares": counts @ middles**2,
            "bucket_limit": edges[1:][kept],
            "bucket": counts[kept],
        }
        self._write(tag, step, histo=histogram)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        """Writes an image: `uint8`, of shape `(height, width, channels)`."""
        height, width, channels = pixels.shape
        image = {
            "height": height,
            "width": width,
            "colorspace": channels,
            "encoded_image_string": as_png(pixels),
        }
        self._write(tag, step, image=image)

    def text(self, tag: str, text: str, step: int) -> None:
        """Writes text, which TensorBoard shows as Markdown."""
        metadata = {"plugin_data": {"plugin_name": "text"}}
        tensor = {"dtype": "DT_STRING", "string_val": [text.encode()]}
        self._write(tag, step, metadata=metadata, tensor=tensor)

    def hyperparameters(self, values: Mapping[str, bool | int | float | str]) -> None:
        """Writes the values for the page of hyperparameters of the directory."""
        from tensorboardX.summary import hparams

        _, start, _ = hparams(dict(values), {})
        # TensorBoard's reader needs a value in the summary, so this adds one float.
        tensor = start.value[0].tensor
        tensor.dtype = _FLOAT
        tensor.float_val.append(0.0)
        self._write_summary(start, 0)

    def resume(self, step: int) -> None:
        """Makes TensorBoard drop the values that were written for later steps."""
        start = {"status": "START"}
        self._write_event(step + 1, session_log=start)

    def _write(self, tag: str, step: int, **content: Any) -> None:
        self._write_summary({"value": [{"tag": tag, **content}]}, step)

    def _write_summary(self, summary: Any, step: int) -> None:
        self._write_event(step, summary=summary)

    def _write_event(self, step: int, **content: Any) -> None:
        # Type checkers do not see the names of a generated module.
        proto = importlib.import_module("tensorboardX.proto.event_pb2")
        event = proto.Event(wall_time=time.time(), step=step, **content)
        self._events.write_event(event)

    def flush(self) -> None:
        """Brings everything written so far onto the disk."""
        self._events.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._events.close()


def as_png(pixels: np.ndarray) -> bytes:
    """Returns the file of an image with 1, 3 or 4 channels."""
    height, width, channels = pixels.shape
    num_bits = 8
    color_type = {1: 0, 3: 2, 4: 6}[channels]
    # The zeros are the compression and the filters that all files have, and no
    # interlacing.
    header = struct.pack(">2I5B", width, height, num_bits, color_type, 0, 0, 0)
    # Each row begins with the number of its filter: 0 for none.
    flat = pixels.reshape(height, -1)
    one_before_each = ((0, 0), (1, 0))
    rows = np.pad(flat, one_before_each)
    data = zlib.compress(rows.tobytes())
    return (
        b"\x89PNG\r\n\x1a\n"
        + _as_chunk(b"IHDR", header)
        + _as_chunk(b"IDAT", data)
        + _as_chunk(b"IEND", b"")
    )


def _as_chunk(kind: bytes, data: bytes) -> bytes:
    """Returns a chunk of a PNG file: its length, kind, content and checksum."""
    length = struct.pack(">I", len(data))
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return length + kind + data + checksum
