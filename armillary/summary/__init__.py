"""Scalars over steps, in files that TensorBoard reads.

A `SummaryManager` writes what a loop returned. A nested dictionary is a hierarchy of
directories, and TensorBoard shows each directory as a run of its own, so the same tag
can be compared between runs::

    manager = SummaryManager("runs/digits")
    manager.write_summaries(
        {"train": {"loss": 0.7}, "validation": {"loss": 0.9}, "steps_per_second": 52.1},
        step=100,
    )
    manager.flush()

    runs/digits/events...               steps_per_second
    runs/digits/train/events...         loss
    runs/digits/validation/events...    loss

`NoopSummaryManager` has the same methods and writes nothing. Another file format is one
class with the methods of `SummaryWriter`, given as `writer_fn`.
"""

from armillary.summary._manager import NoopSummaryManager as NoopSummaryManager
from armillary.summary._manager import SummaryManager as SummaryManager
from armillary.summary._tensorboard import TensorBoardWriter as TensorBoardWriter
from armillary.summary._writer import SummaryWriter as SummaryWriter

__all__ = [
    "NoopSummaryManager",
    "SummaryManager",
    "SummaryWriter",
    "TensorBoardWriter",
]
