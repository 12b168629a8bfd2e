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

**The input function** is called once in each process. It returns what
`armillary.data.as_source` takes, with batches `(features, labels)`, and may have the
arguments `input_context`, `mode`, `params` and `config`. Each replica takes one batch
for a step: with N replicas a step sees N batches, and gives the numbers of one replica
with the N concatenated.

**The model function** describes one replica's part of a step. `modules.make(name,
make_fn)` calls `make_fn` with an `nnx.Rngs` the first time, and returns the same module
ever after. The function is called in Python first, on zeros of the shape of a batch, to
make the modules (whatever that call writes to them is undone), and then for each
program that is traced. So every mode makes the same modules, and what a layer does in
training alone it is told explicitly. `EstimatorSpec` says what the function returns.

**The directory** `model_dir` holds checkpoints and summaries. Each call of `train`,
`evaluate` and `predict` begins with the latest checkpoint there, and `train` saves one
at its end. With `max_steps`, training that was stopped goes on where it was, also in
the data, and ends bit for bit as if nothing had happened.
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

__all__ = [
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "ModeKeys",
    "Modules",
    "RunConfig",
    "TrainSpec",
    "train_and_evaluate",
]

_mark_public(globals())
