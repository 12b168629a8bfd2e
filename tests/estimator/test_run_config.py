"""`RunConfig`: every field that TensorFlow prints, and answers to old arguments."""

import json

import pytest

import armillary
from armillary import estimator
from armillary.advice._foreign_names import find_module_answer
from armillary.errors import EstimatorError
from armillary.estimator._answers import ARGUMENTS, ATTRIBUTES, HOOKS, NAMES
from tests.estimator.problems import linear_model_fn, make_input_fn, make_regressor

# As TensorFlow 2 prints a `RunConfig`, without the underscores.
PRINTED = [
    "model_dir",
    "tf_random_seed",
    "save_summary_steps",
    "save_checkpoints_steps",
    "save_checkpoints_secs",
    "session_config",
    "keep_checkpoint_max",
    "keep_checkpoint_every_n_hours",
    "log_step_count_steps",
    "train_distribute",
    "device_fn",
    "protocol",
    "eval_distribute",
    "experimental_distribute",
    "experimental_max_worker_delay_secs",
    "session_creation_timeout_secs",
    "checkpoint_save_graph_def",
    "service",
    "cluster_spec",
    "task_type",
    "task_id",
    "global_id_in_cluster",
    "master",
    "evaluation_master",
    "is_chief",
    "num_ps_replicas",
    "num_worker_replicas",
]
WITHOUT_MEANING = {
    "session_config",
    "device_fn",
    "protocol",
    "experimental_distribute",
    "experimental_max_worker_delay_secs",
    "session_creation_timeout_secs",
    "checkpoint_save_graph_def",
}


@pytest.mark.parametrize("name", PRINTED)
def test_every_printed_field_is_there_or_is_answered(name, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    config = estimator.RunConfig()
    if name in WITHOUT_MEANING:
        with pytest.raises(AttributeError, match=rf"'{name}'\. (Leave it out|Write)"):
            getattr(config, name)
    else:
        getattr(config, name)


def test_a_process_on_its_own(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    config = estimator.RunConfig()
    assert (config.task_type, config.task_id, config.is_chief) == ("worker", 0, True)
    assert (config.num_worker_replicas, config.num_ps_replicas) == (1, 0)
    assert (config.master, config.evaluation_master, config.service) == ("", "", None)
    assert config.global_id_in_cluster == 0


@pytest.mark.parametrize(
    ("task", "number", "address"),
    [
        (("chief", 0), 0, "10.0.0.1:1"),
        (("worker", 1), 2, "10.0.0.3:1"),
        (("ps", 0), 3, "10.0.0.4:1"),
        (("evaluator", 0), None, ""),
    ],
)
def test_a_task_of_a_cluster(monkeypatch, task, number, address):
    cluster = {
        "chief": ["10.0.0.1:1"],
        "worker": ["10.0.0.2:1", "10.0.0.3:1"],
        "ps": ["10.0.0.4:1"],
    }
    task = {"type": task[0], "index": task[1]}
    text = {"cluster": cluster, "task": task, "service": {"key": "value"}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(text))
    config = estimator.RunConfig()
    assert config.global_id_in_cluster == number
    assert config.master == address
    assert config.num_ps_replicas == 1
    assert config.service == {"key": "value"}
    if number is not None and task["type"] != "ps":
        assert config.num_worker_replicas == 3


def test_parameter_servers_are_counted():
    strategy = armillary.ParameterServerStrategy(num_workers=3, num_ps=2)
    config = estimator.RunConfig(train_distribute=strategy)
    assert (config.num_worker_replicas, config.num_ps_replicas) == (3, 2)


def test_a_chief_with_parameter_servers_may_train_in_a_cluster(tmp_path, monkeypatch):
    cluster = {
        "chief": ["127.0.0.1:1"],
        "worker": ["127.0.0.1:2", "127.0.0.1:3"],
        "ps": ["127.0.0.1:4"],
    }
    text = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(text))
    resolver = armillary.cluster.TFConfigClusterResolver()
    strategy = armillary.ParameterServerStrategy(resolver)
    config = estimator.RunConfig(train_distribute=strategy)
    assert (config.num_worker_replicas, config.num_ps_replicas) == (3, 1)
    # Another strategy would train alone in each process, which is an error.
    made = estimator.Estimator(linear_model_fn, tmp_path, config)
    assert made.config.is_chief
    config = estimator.RunConfig(train_distribute=armillary.MirroredStrategy())
    with pytest.raises(EstimatorError, match="3 processes that train"):
        estimator.Estimator(linear_model_fn, tmp_path, config)


def test_seconds_take_the_place_of_steps_and_steps_of_seconds():
    config = estimator.RunConfig()
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == (1000, None)
    config = config.replace(save_checkpoints_secs=60)
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == (None, 60)
    assert config.steps_per_loop == 100
    config = config.replace(save_checkpoints_steps=50)
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == (50, None)
    assert config.steps_per_loop == 50
    for make in (estimator.RunConfig, config.replace):
        with pytest.raises(ValueError, match="`save_checkpoints_steps` is 5 and"):
            make(save_checkpoints_steps=5, save_checkpoints_secs=60)
    with pytest.raises(ValueError, match="`save_checkpoints_secs` is 0"):
        estimator.RunConfig(save_checkpoints_secs=0)


CALLS = {
    "RunConfig": estimator.RunConfig,
    "EstimatorSpec": lambda **given: estimator.EstimatorSpec(
        estimator.ModeKeys.TRAIN, **given
    ),
    "EvalSpec": lambda **given: estimator.EvalSpec(make_input_fn(), **given),
    "numeric_column": lambda **given: estimator.numeric_column("x", **given),
}


@pytest.mark.parametrize("path", ARGUMENTS)
def test_an_old_argument_is_answered(tmp_path, path):
    owner, _, name = path.rpartition(".")
    columns = [estimator.numeric_column("x")]
    identity = estimator.categorical_column_with_identity("c", 3)

    def call(**given):
        if owner == "Estimator.predict":
            return next(make_regressor(tmp_path).predict(make_input_fn(), **given))
        if name == "ckpt_to_load_from":
            return estimator.embedding_column(identity, 2, **given)
        if not owner:
            return estimator.DNNClassifier([4], columns, tmp_path, **given)
        return CALLS[owner](**given)

    with pytest.raises(TypeError) as raised:
        call(**{name: 7})
    assert f"`{name}` is 7" in str(raised.value)
    assert ARGUMENTS[path] in str(raised.value)
    assert "Did you mean" not in str(raised.value)


# The public names of `tf.estimator` (TensorFlow 2.15) and `tf.feature_column`.
PUBLIC = """BaselineClassifier BaselineEstimator BaselineRegressor BestExporter
    BinaryClassHead CheckpointSaverHook CheckpointSaverListener DNNClassifier
    DNNEstimator DNNLinearCombinedClassifier DNNLinearCombinedEstimator
    DNNLinearCombinedRegressor DNNRegressor Estimator EstimatorSpec EvalSpec Exporter
    FeedFnHook FinalExporter FinalOpsHook GlobalStepWaiterHook Head LatestExporter
    LinearClassifier LinearEstimator LinearRegressor LoggingTensorHook
    LogisticRegressionHead ModeKeys MultiClassHead MultiHead MultiLabelHead
    NanLossDuringTrainingError NanTensorHook PoissonRegressionHead ProfilerHook
    RegressionHead RunConfig SecondOrStepTimer SessionRunArgs SessionRunContext
    SessionRunHook SessionRunValues StepCounterHook StopAtStepHook SummarySaverHook
    TrainSpec VocabInfo WarmStartSettings add_metrics classifier_parse_example_spec
    experimental export regressor_parse_example_spec train_and_evaluate
    bucketized_column categorical_column_with_hash_bucket
    categorical_column_with_identity categorical_column_with_vocabulary_file
    categorical_column_with_vocabulary_list crossed_column embedding_column
    indicator_column make_parse_example_spec numeric_column
    sequence_categorical_column_with_hash_bucket
    sequence_categorical_column_with_identity
    sequence_categorical_column_with_vocabulary_file
    sequence_categorical_column_with_vocabulary_list sequence_numeric_column
    shared_embeddings weighted_categorical_column"""


def test_every_public_name_of_tensorflow_is_there_or_is_answered():
    names = set(PUBLIC.split())
    assert len(names) == 72
    missing = names - set(estimator.__all__)
    assert all(find_module_answer("armillary.estimator", name) for name in missing)


@pytest.mark.parametrize("name", NAMES)
def test_an_old_name_is_answered(name):
    with pytest.raises(AttributeError) as raised:
        getattr(estimator, name)
    assert NAMES[name] in str(raised.value)
    assert name in HOOKS or "hook" not in name.lower()


def test_an_unknown_name_is_an_ordinary_error():
    with pytest.raises(AttributeError, match=r"no attribute 'Nothing'$"):
        _ = estimator.Nothing
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = estimator.RunConfig().nothing


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_an_old_attribute_is_answered(tmp_path, path):
    owner, _, name = path.partition(".")
    made = make_regressor(tmp_path) if owner == "Estimator" else estimator.RunConfig()
    with pytest.raises(AttributeError) as raised:
        getattr(made, name)
    assert ATTRIBUTES[path] in str(raised.value)


def with_no_params(features, labels, mode, modules):
    raise AssertionError("not called")


def with_unknown_argument(features, labels, mode, modules, rate):
    raise AssertionError("not called")


def without_features(labels, mode):
    raise AssertionError("not called")


@pytest.mark.parametrize(
    ("model_fn", "params", "message"),
    [
        (with_no_params, {"rate": 1}, "`params` is {'rate': 1}, but `model_fn` has no"),
        (with_unknown_argument, None, "`model_fn` has the argument `rate`"),
        (without_features, None, "`model_fn` has the arguments labels, mode"),
    ],
)
def test_a_model_function_is_checked_before_it_is_called(
    tmp_path, model_fn, params, message
):
    with pytest.raises(EstimatorError, match=message):
        estimator.Estimator(model_fn, tmp_path, params=params)


def test_an_input_function_is_checked_before_it_is_called(tmp_path):
    made = make_regressor(tmp_path)
    for call in (made.train, made.evaluate, made.predict, estimator.TrainSpec):
        with pytest.raises(EstimatorError, match="`input_fn` has the argument `rows`"):
            found = call(lambda rows: rows)
            next(found)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.slow
def test_functions_may_have_defaults_and_take_any_keyword(tmp_path):
    seen = {}

    def model_fn(features, labels, mode, modules, rate=0.5, **others):
        seen.update(others, rate=rate)
        return linear_model_fn(features, labels, mode, others["params"], modules)

    made = estimator.Estimator(model_fn, tmp_path, params=None)
    made.evaluate(make_input_fn(), steps=1)
    assert seen.keys() == {"rate", "params", "config"}
