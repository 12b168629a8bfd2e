"""Estimators: a model function and an input function, and no loop to write.

After `tf.estimator`, as a thin layer over the `Controller`::

    def model_fn(features, labels, mode, params, modules):
        model = modules.make("model", lambda rngs: nnx.Linear(4, 3, rngs=rngs))
        logits = model(features["x"])
        if mode == estimator.ModeKeys.PREDICT:
            return estimator.EstimatorSpec(mode, predictions={"logits": logits})
        losses = cross_entropy(logits, labels)
        return estimator.EstimatorSpec(
            mode,
            loss=losses.mean(),
            train_op=optax.sgd(params["learning_rate"]),
            eval_metric_ops={"accuracy": logits.argmax(-1) == labels},
        )

    strategy = armillary.MirroredStrategy()
    config = estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)
    classifier = estimator.Estimator(
        model_fn, "runs/model", config, params={"learning_rate": 0.1}
    )
    classifier.train(input_fn=input_fn, steps=10)
    classifier.evaluate(input_fn=input_fn, steps=10)

See `docs/estimator.md` for model functions, input functions and directories.
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
