"""Values over steps, in files that TensorBoard reads.

A `SummaryManager` writes the values that a loop returned. A nested dictionary becomes a
hierarchy of directories. TensorBoard shows each directory as a run of its own, so you
can compare the same tag between runs. A value is a number, a `Histogram`, an `Image` or
a `Text`. To write to another place or format, pass a class with the methods of
`SummaryWriter` as `writer_fn`. A `Controller` also writes `metrics.jsonl`, for
`read_metrics`.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.summary._kinds import Histogram as Histogram
from armillary.summary._kinds import Image as Image
from armillary.summary._kinds import Text as Text
from armillary.summary._metrics_file import read_metrics as read_metrics
from armillary.summary._summary_manager import SummaryManager as SummaryManager
from armillary.summary._summary_manager import SummaryWriter as SummaryWriter
from armillary.summary._tensorboard import TensorBoardWriter as TensorBoardWriter
from armillary.summary._wandb import WandbWriter as WandbWriter

_mark_public(globals())
