"""Compiled Keras models under a `Controller`.

A model that knows its optimizer, loss and metrics (`model.compile`) is a trainer::

    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    controller = armillary.Controller(
        trainer=armillary.keras.KerasTrainer(model, train_dataset),
        evaluator=armillary.keras.KerasEvaluator(model, eval_dataset),
        global_step=model.optimizer.iterations,
        strategy=strategy,
        steps_per_loop=100,
    )

In a step of your own, Keras objects work like those of Flax NNX, and this package is
not needed.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.keras._trainer import KerasEvaluator as KerasEvaluator
from armillary.keras._trainer import KerasTrainer as KerasTrainer

_mark_public(globals())
