"""Compiled Keras models under a `Controller`; see `docs/keras/controller.md`.

A model that knows its optimizer, loss and metrics (`model.compile`) is a trainer, with
`model.optimizer.iterations` as the global step. In a step of your own, Keras objects
work like objects of Flax NNX, and this package is not needed. A `DatasetCreator` makes
the data of `fit` in the process that reads them.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.keras._dataset_creator import DatasetCreator as DatasetCreator
from armillary.keras._trainer import KerasEvaluator as KerasEvaluator
from armillary.keras._trainer import KerasTrainer as KerasTrainer

_mark_public(globals())
