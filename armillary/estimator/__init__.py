"""Estimators: a model function and an input function, and no loop to write.

After `tf.estimator`, as a thin layer over the `Controller`::

    classifier = estimator.Estimator(model_fn, "runs/model", config, params)
    classifier.train(input_fn=input_fn, steps=10)
    classifier.evaluate(input_fn=input_fn, steps=10)

`docs/estimator.md` has a whole program, and all about model functions.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.estimator._estimator import Estimator as Estimator
from armillary.estimator._estimator import train_and_evaluate as train_and_evaluate
from armillary.estimator._model_fn import EstimatorSpec as EstimatorSpec
from armillary.estimator._model_fn import ModeKeys as ModeKeys
from armillary.estimator._model_fn import Modules as Modules
from armillary.estimator._run_config import EvalSpec as EvalSpec
from armillary.estimator._run_config import RunConfig as RunConfig
from armillary.estimator._run_config import TrainSpec as TrainSpec

_mark_public(globals())
