"""Estimators: a model function and an input function, and nothing else to write.

After `tf.estimator`, as a thin layer over the `Controller`. The estimators that come
with it need only columns::

    strategy = armillary.MirroredStrategy()
    config = estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)
    regressor = estimator.LinearRegressor(
        feature_columns=[estimator.numeric_column("feats")],
        optimizer="SGD",
        config=config,
    )
    regressor.train(input_fn=input_fn, steps=10)
    regressor.evaluate(input_fn=input_fn, steps=10)

**The input function** is called once in each process, with an `InputContext` if it has
an argument `input_context`. It returns what `armillary.data.as_source` takes, with
batches `(features, labels)`. Each replica takes one batch for a step: with N replicas a
step sees N batches, and gives the numbers of one replica with the N concatenated.

**The model function** of an `Estimator` describes one replica's part of a step::

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

`modules.make(name, make_fn)` calls `make_fn` with an `nnx.Rngs` the first time, and
returns the same module ever after, as TensorFlow finds variables by their names. The
function is called in Python first, on zeros of the shape of a batch, to make the
modules (whatever that call writes to them is undone), and then for each program that is
traced. So

- `loss` is a scalar, the mean over this replica's batch. The mean over replicas is
  taken for you, so do not divide by the global batch size.
- `train_op` is an Optax transformation: the gradients of `loss` with respect to all
  `nnx.Param` of the modules go through it. That of the first call in a process counts.
- `eval_metric_ops` has for each name an array with an entry for each example, of which
  the mean is reported, or a pair of a function that makes a metric of `nnx.metrics` or
  `armillary.metrics`, and the arguments of its `update`.
- every mode makes the same modules, and what a layer does in training alone it is told
  explicitly (`dropout(x, deterministic=mode != ModeKeys.TRAIN)`).

**The directory** `model_dir` holds checkpoints and summaries. Each call of `train`,
`evaluate` and `predict` begins with the latest checkpoint there, and `train` saves one
at its end. With `max_steps`, training that was stopped goes on where it was, also in
the data, and ends bit for bit as if nothing had happened.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.estimator._canned import DNNClassifier as DNNClassifier
from armillary.estimator._canned import DNNRegressor as DNNRegressor
from armillary.estimator._canned import LinearClassifier as LinearClassifier
from armillary.estimator._canned import LinearRegressor as LinearRegressor
from armillary.estimator._canned import ftrl as ftrl
from armillary.estimator._estimator import Estimator as Estimator
from armillary.estimator._heads import NumericColumn as NumericColumn
from armillary.estimator._heads import numeric_column as numeric_column
from armillary.estimator._model_fn import EstimatorSpec as EstimatorSpec
from armillary.estimator._model_fn import ModeKeys as ModeKeys
from armillary.estimator._model_fn import Modules as Modules
from armillary.estimator._run_config import RunConfig as RunConfig
from armillary.estimator._train_and_evaluate import EvalSpec as EvalSpec
from armillary.estimator._train_and_evaluate import TrainSpec as TrainSpec
from armillary.estimator._train_and_evaluate import (
    train_and_evaluate as train_and_evaluate,
)

__all__ = [
    "DNNClassifier",
    "DNNRegressor",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "LinearClassifier",
    "LinearRegressor",
    "ModeKeys",
    "Modules",
    "NumericColumn",
    "RunConfig",
    "TrainSpec",
    "ftrl",
    "numeric_column",
    "train_and_evaluate",
]

_mark_public(globals())
