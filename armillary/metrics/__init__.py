"""Metrics that add up: over steps, over replicas, and over examples, exactly.

They are `nnx.metrics`, so they are updated in a step and computed after the loop, alone
or in an `nnx.MultiMetric`::

    self.f1 = armillary.metrics.F1Score(num_classes=10)                # constructor
    self.f1.reset()                                                    # eval_begin
    self.f1.update(logits=logits, labels=batch["label"])               # eval_step
    return {"f1": self.f1.compute()}                                   # eval_end

Their state consists of counts, held in integers of 63 bits. So a result depends only on
the examples: not on their order, on batches, replicas or processes. Sums of floats are
an exception in their last digits: they are added in 32 bits within a batch, and exactly
over batches. `compute` waits for the device, works in NumPy, and raises an error if an
update got invalid values.

`Sum`, `Ratio` and `WeightedMean` also take numbers when they are made. So the step of a
`StepTrainer` returns a new one from every step: `{"loss": Ratio(loss, num_tokens)}`.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.metrics._labeled import AUC as AUC
from armillary.metrics._labeled import ConfusionMatrix as ConfusionMatrix
from armillary.metrics._labeled import F1Score as F1Score
from armillary.metrics._labeled import Precision as Precision
from armillary.metrics._labeled import Recall as Recall
from armillary.metrics._labeled import TopKAccuracy as TopKAccuracy
from armillary.metrics._numbers import Distribution as Distribution
from armillary.metrics._numbers import MeanAbsoluteError as MeanAbsoluteError
from armillary.metrics._numbers import MeanSquaredError as MeanSquaredError
from armillary.metrics._sums import Ratio as Ratio
from armillary.metrics._sums import Sum as Sum
from armillary.metrics._sums import WeightedMean as WeightedMean

_mark_public(globals())
