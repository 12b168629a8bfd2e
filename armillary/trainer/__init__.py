"""The inner loop: many steps in one device program.

`_contract` has the methods that a controller calls on any trainer. `StandardTrainer`
and `StandardEvaluator` implement them around one step. They use a `Loop`, which moves
through the data. It has one `Program` for each shape of batch. The program carries the
state through the steps of a chunk on the device.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.trainer._contract import AbstractEvaluator as AbstractEvaluator
from armillary.trainer._contract import AbstractTrainer as AbstractTrainer
from armillary.trainer._contract import PendingLoops as PendingLoops
from armillary.trainer._epoch_helper import EpochHelper as EpochHelper
from armillary.trainer._options import (
    StandardEvaluatorOptions as StandardEvaluatorOptions,
)
from armillary.trainer._options import StandardTrainerOptions as StandardTrainerOptions
from armillary.trainer._prediction import predict as predict
from armillary.trainer._standard_evaluator import StandardEvaluator as StandardEvaluator
from armillary.trainer._standard_trainer import StandardTrainer as StandardTrainer
from armillary.trainer._step_trainer import StepEvaluator as StepEvaluator
from armillary.trainer._step_trainer import StepTrainer as StepTrainer

_mark_public(globals())
