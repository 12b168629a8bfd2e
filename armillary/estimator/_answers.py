"""Answers to the names of `tf.estimator` that are not here: the line to write.

`ARGUMENTS` joins the table of `advice/_foreign_keywords.py`, which answers a wrong
keyword. `NAMES` and `ATTRIBUTES` join the table of `advice/_foreign_names.py`, which
answers a missing name of the package or of an object.
"""

from armillary.advice import _foreign_names
from armillary.advice._foreign_keywords import ANSWERS

_FROM_CLUSTER = (
    "Leave it out: it follows from `TF_CONFIG`, or from the `cluster_resolver` of "
    "`train_distribute`."
)
_EVALUATES_CHECKPOINTS = (
    "Leave it out: an evaluation follows each checkpoint, so set "
    "`RunConfig(save_checkpoints_steps=...)` or `save_checkpoints_secs`."
)
_MODEL_FN = "Write an `armillary.estimator.Estimator` with a `model_fn` of your own"
_NO_GRAPH = "there is no graph and no session"

# Arguments of `RunConfig` without a meaning here. They are not attributes either.
_RUN_CONFIG = {
    "session_config": "Leave it out: there is no session. Set options of JAX by "
    "`jax.config.update(...)`.",
    "device_fn": "Leave it out: the strategy places the variables.",
    "protocol": "Leave it out: JAX chooses how processes exchange data.",
    "experimental_distribute": "Write `train_distribute=strategy, "
    "eval_distribute=strategy`.",
    "experimental_max_worker_delay_secs": "Leave it out: processes that train "
    "together begin together.",
    "session_creation_timeout_secs": "Leave it out: the strategy limits how long "
    "processes wait for each other, by "
    "`communication_options=armillary.cluster.CommunicationOptions("
    "timeout_seconds=...)`.",
    "checkpoint_save_graph_def": "Leave it out: a checkpoint holds arrays, and no "
    "graph.",
}

ARGUMENTS = {
    **{f"RunConfig.{name}": answer for name, answer in _RUN_CONFIG.items()},
    **{
        f"RunConfig.{name}": _FROM_CLUSTER
        for name in (
            *("cluster_spec", "task_type", "task_id", "global_id_in_cluster"),
            *("master", "evaluation_master", "is_chief", "service"),
            *("num_ps_replicas", "num_worker_replicas"),
        )
    },
    "EstimatorSpec.scaffold": "Leave it out: begin with trained weights by "
    "`warm_start_from` of the estimator, and save with `saving_listeners` of `train`.",
    "EstimatorSpec.export_outputs": "Leave it out: `Estimator.export_model` exports "
    "`predictions`.",
    "EstimatorSpec.prediction_hooks": "Leave it out: `predict` returns an iterator, so "
    "write it into the loop over the predictions.",
    "Estimator.predict.hooks": "Leave it out: `predict` returns an iterator, so write "
    "it into the loop over the predictions.",
    "EvalSpec.start_delay_secs": _EVALUATES_CHECKPOINTS,
    "EvalSpec.throttle_secs": _EVALUATES_CHECKPOINTS,
    "weight_column": f"{_MODEL_FN}, which weighs the losses: "
    "`loss=(losses * features['weight']).mean()`.",
    "label_vocabulary": "Leave it out: give integers as labels, from "
    "`np.searchsorted(sorted_words, words)` in `input_fn`.",
    "loss_reduction": "Leave it out: the loss is the mean over the batch, as in "
    "TensorFlow 2.",
    "batch_norm": f"{_MODEL_FN}, whose module has `nnx.BatchNorm`.",
    "sparse_combiner": "Leave it out: a linear estimator adds the weights of an "
    "example's categories.",
    "numeric_column.default_value": "Leave it out: `input_fn` returns arrays without "
    "gaps. Fill them there.",
    "ckpt_to_load_from": "Leave it out: `warm_start_from` of the estimator reads "
    "embeddings, too.",
}
ANSWERS.update(ARGUMENTS)

_OWN_MODEL = f"{_MODEL_FN}; docs/advanced/model_functions.md has one to begin with."
_OWN_LOSS = f"{_MODEL_FN} and a loss of your own."
_PLAIN_HOOK = (
    "A hook here is a function of the output of a loop: "
    "`train(input_fn, hooks=[lambda output: print(output)])`"
)

HOOKS = {
    "CheckpointSaverHook": "Set `RunConfig(save_checkpoints_steps=...)`.",
    "CheckpointSaverListener": "Pass a function of the path of each checkpoint: "
    "`train(input_fn, saving_listeners=[lambda path: print(path)])`.",
    "FeedFnHook": f"Leave it out: {_NO_GRAPH}. `input_fn` gives the data.",
    "FinalOpsHook": f"{_PLAIN_HOOK}.",
    "GlobalStepWaiterHook": "Leave it out: processes that train together begin "
    "together.",
    "LoggingTensorHook": f"{_PLAIN_HOOK}. The loss is logged anyway.",
    "NanLossDuringTrainingError": "Catch `armillary.errors.NonFiniteError`.",
    "NanTensorHook": "Leave it out: training ends with an error if the loss is not a "
    "number.",
    "ProfilerHook": "Pass an `armillary.actions.Profile(...)` as a hook.",
    "SecondOrStepTimer": "Wrap the hook: `armillary.actions.PeriodicAction(hook, "
    "interval=100)`.",
    "SessionRunArgs": f"{_PLAIN_HOOK}.",
    "SessionRunContext": f"{_PLAIN_HOOK}. It stops training by "
    "`estimator.request_stop(reason)`.",
    "SessionRunHook": f"{_PLAIN_HOOK}.",
    "SessionRunValues": f"{_PLAIN_HOOK}.",
    "StepCounterHook": "Leave it out: log lines have `steps/sec`.",
    "StopAtStepHook": "Call `train(input_fn, max_steps=...)`.",
    "SummarySaverHook": "Set `RunConfig(save_summary_steps=...)`.",
}
"""The line to write in place of a hook of TensorFlow."""

NAMES = {
    **HOOKS,
    **dict.fromkeys(
        (
            *("LinearEstimator", "DNNEstimator", "BaselineEstimator"),
            *("DNNLinearCombinedClassifier", "DNNLinearCombinedEstimator"),
            *("DNNLinearCombinedRegressor", "BoostedTreesClassifier"),
            *("BoostedTreesRegressor", "BoostedTreesEstimator"),
        ),
        _OWN_MODEL,
    ),
    **dict.fromkeys(
        (
            *("Head", "BinaryClassHead", "MultiClassHead", "RegressionHead"),
            *("LogisticRegressionHead", "PoissonRegressionHead", "MultiHead"),
            "MultiLabelHead",
        ),
        _OWN_LOSS,
    ),
    **dict.fromkeys(
        ("Exporter", "BestExporter", "FinalExporter", "LatestExporter"),
        "An exporter here is a function of the output of an evaluation: "
        "`EvalSpec(input_fn, exporters=lambda output: estimator.export_model(...))`.",
    ),
    "export": "Call `estimator.export_model(...)`.",
    "WarmStartSettings": "Pass the path of a checkpoint: "
    "`Estimator(..., warm_start_from=path)`.",
    "VocabInfo": "Pass the path of a checkpoint: `Estimator(..., "
    "warm_start_from=path)`.",
    "add_metrics": "Add entries to `eval_metric_ops` in `model_fn`.",
    "classifier_parse_example_spec": "Leave it out: `armillary.data.from_tfrecords` "
    "takes the features itself.",
    "regressor_parse_example_spec": "Leave it out: `armillary.data.from_tfrecords` "
    "takes the features itself.",
    "make_parse_example_spec": "Leave it out: `armillary.data.from_tfrecords` takes "
    "the features itself.",
    "inputs": "Return `armillary.data.from_arrays((features, labels), batch_size=...)` "
    "from `input_fn`.",
    "experimental": "Its early stopping is a hook: `armillary.actions.EarlyStopping("
    "estimator, 'loss', patience=3, higher_is_better=False)`.",
    "crossed_column": "Combine the features in `input_fn`, and use "
    "`categorical_column_with_hash_bucket`.",
    "categorical_column_with_vocabulary_file": "Read the file: "
    "`categorical_column_with_vocabulary_list(key, "
    "pathlib.Path(file).read_text().split())`.",
    **dict.fromkeys(
        (
            *("weighted_categorical_column", "shared_embeddings"),
            "sequence_numeric_column",
            "sequence_categorical_column_with_hash_bucket",
            "sequence_categorical_column_with_identity",
            "sequence_categorical_column_with_vocabulary_file",
            "sequence_categorical_column_with_vocabulary_list",
        ),
        f"{_MODEL_FN}, which reads such features itself.",
    ),
}
"""Names of `tf.estimator` and `tf.feature_column` that are not here."""

ATTRIBUTES = {
    **{f"RunConfig.{name}": answer for name, answer in _RUN_CONFIG.items()},
    **dict.fromkeys(
        (
            *("Estimator.export_saved_model", "Estimator.export_savedmodel"),
            "Estimator.experimental_export_all_saved_models",
        ),
        "Call `estimator.export_model(file_manager, features)`.",
    ),
    **dict.fromkeys(
        ("Estimator.get_variable_names", "Estimator.get_variable_value"),
        "Run `armillary checkpoint show PATH` to list the arrays, and read a module by "
        '`armillary.Checkpoint(model={"net": net}).read(path, only="model/net")`.',
    ),
}
"""Missing attributes of objects of the package, each after the name of its class."""

_foreign_names.NAMES.update(
    {f"estimator.{name}": answer for name, answer in NAMES.items()} | ATTRIBUTES
)
