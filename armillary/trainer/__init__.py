"""The inner loop: many steps in one device program.

`_contract` is what a controller asks of any trainer; `StandardTrainer` and
`StandardEvaluator` implement it around one step. Behind them a `Loop` moves through the
data and keeps one `Program` for each shape of batch, which carries the state through
the steps of a chunk on the device.
"""

from armillary.trainer._contract import AbstractEvaluator as AbstractEvaluator
from armillary.trainer._contract import AbstractTrainer as AbstractTrainer
from armillary.trainer._contract import PendingLoops as PendingLoops
from armillary.trainer._standard import StandardEvaluator as StandardEvaluator
from armillary.trainer._standard import (
    StandardEvaluatorOptions as StandardEvaluatorOptions,
)
from armillary.trainer._standard import StandardTrainer as StandardTrainer
from armillary.trainer._standard import (
    StandardTrainerOptions as StandardTrainerOptions,
)

__all__ = [
    "AbstractEvaluator",
    "AbstractTrainer",
    "PendingLoops",
    "StandardEvaluator",
    "StandardEvaluatorOptions",
    "StandardTrainer",
    "StandardTrainerOptions",
]
