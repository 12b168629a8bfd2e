"""Estimators: data, a model, and no loop to write.

The interface follows `tf.estimator`; the code is a thin layer over the `Controller`. A
canned estimator needs columns::

    strategy = armillary.MirroredStrategy()
    regressor = armillary.estimator.LinearRegressor(
        feature_columns=[armillary.estimator.numeric_column("feats")],
        optimizer="SGD",
        config=armillary.estimator.RunConfig(
            train_distribute=strategy, eval_distribute=strategy
        ),
    )
    regressor.train(input_fn=input_fn, steps=10)
    regressor.evaluate(input_fn=input_fn, steps=10)

An `Estimator` needs a model function. `docs/advanced/estimator.md` and
`docs/advanced/model_functions.md` have complete programs.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.estimator._canned import BaselineClassifier as BaselineClassifier
from armillary.estimator._canned import BaselineRegressor as BaselineRegressor
from armillary.estimator._canned import DNNClassifier as DNNClassifier
from armillary.estimator._canned import DNNRegressor as DNNRegressor
from armillary.estimator._canned import LinearClassifier as LinearClassifier
from armillary.estimator._canned import LinearRegressor as LinearRegressor
from armillary.estimator._estimator import Estimator as Estimator
from armillary.estimator._feature_column import bucketized_column as bucketized_column
from armillary.estimator._feature_column import (
    categorical_column_with_hash_bucket as categorical_column_with_hash_bucket,
)
from armillary.estimator._feature_column import (
    categorical_column_with_identity as categorical_column_with_identity,
)
from armillary.estimator._feature_column import (
    categorical_column_with_vocabulary_list as categorical_column_with_vocabulary_list,
)
from armillary.estimator._feature_column import embedding_column as embedding_column
from armillary.estimator._feature_column import indicator_column as indicator_column
from armillary.estimator._feature_column import numeric_column as numeric_column
from armillary.estimator._model_fn import EstimatorSpec as EstimatorSpec
from armillary.estimator._model_fn import ModeKeys as ModeKeys
from armillary.estimator._model_fn import Modules as Modules
from armillary.estimator._optimizers import ftrl as ftrl
from armillary.estimator._run_config import EvalSpec as EvalSpec
from armillary.estimator._run_config import RunConfig as RunConfig
from armillary.estimator._run_config import TrainSpec as TrainSpec
from armillary.estimator._train_and_evaluate import (
    train_and_evaluate as train_and_evaluate,
)

_mark_public(globals())
