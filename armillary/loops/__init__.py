"""Many steps in one device call.

`Loop` moves through the data and keeps one `Program` per shape of batch; a program
carries the state through the steps of a chunk on the device. `run_eagerly` runs the
same steps with no compiler, for debugging.
"""

from armillary.loops._eager import run_eagerly as run_eagerly
from armillary.loops._guard import LoopCheck as LoopCheck
from armillary.loops._hooks import LoopOutputs as LoopOutputs
from armillary.loops._loop import Loop as Loop
from armillary.loops._loop import LoopOptions as LoopOptions
from armillary.loops._reads import RecordsReads as RecordsReads

__all__ = [
    "Loop",
    "LoopCheck",
    "LoopOptions",
    "LoopOutputs",
    "RecordsReads",
    "run_eagerly",
]
