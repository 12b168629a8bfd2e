"""Tests that keywords of Orbit and tf.distribute are answered with ours."""

import inspect
import os

import pytest
from flax import nnx
from jax import numpy as jnp

import armillary
from armillary import actions, cluster, distribute, summary
from armillary._checks import check_path
from armillary.advice._foreign_keywords import ANSWERS
from armillary.estimator._answers import ARGUMENTS
from armillary.state._step_counter import as_step_counter

# Where each of these keywords stood.
OLD = {
    armillary.StandardTrainerOptions: [
        "use_tf_function",
        "use_tf_while_loop",
        "use_tpu_summary_optimization",
    ],
    armillary.StandardEvaluatorOptions: [
        "on_non_finite",
        "check_replicas_every",
    ],
    armillary.data.InputOptions: [
        "experimental_fetch_to_device",
        "experimental_per_replica_buffer_size",
        "experimental_place_dataset_on_device",
    ],
    actions.NewBestMetric: ["filename", "monitor", "write_metric"],
    actions.EarlyStopping: ["mode", "monitor", "restore_best_weights"],
    actions.ExportModel: ["signatures"],
    actions.PeriodicAction: ["global_step"],
    actions.SaveCheckpointIfPreempted: ["cluster_resolver"],
    cluster.TerminationConfig: ["termination_watcher_fn"],
    armillary.CheckpointManager: [
        *("checkpoint_name", "monitor", "mode", "save_top_k", "save_best_only"),
        *("every_n_train_steps", "save_freq", "save_last", "every_n_epochs"),
        *("period", "save_interval_steps", "dirpath", "filepath", "filename"),
        *("save_weights_only", "save_interval", "save_steps", "save_every"),
        *("save_total_limit", "max_checkpoints", "keep", "metric_for_best_model"),
        *("best_fn", "greater_is_better", "best_mode", "load_best_model_at_end"),
        "output_dir",
    ],
    armillary.Controller.train: [
        *("batch_size", "callbacks", "validation_data", "verbose"),
        *("max_epochs", "num_train_epochs", "max_steps", "train_steps"),
    ],
    armillary.Controller.train_and_evaluate: [
        *("max_epochs", "num_train_epochs", "train_epochs", "max_steps"),
        "limit_val_batches",
    ],
    armillary.data.from_arrays: ["drop_last", "num_workers", "collate_fn"],
    armillary.data.from_random_access: ["num_workers", "pin_memory"],
    armillary.Checkpoint.read: ["rename"],
    armillary.keras.KerasTrainer: ["batch_size", "callbacks", "epochs"],
    armillary.StepTrainer: ["callbacks", "epochs"],
    armillary.distribute.Strategy.run: ["options"],
    armillary.function: ["input_signature", "jit_compile", "reduce_retracing"],
    summary.SummaryManager: ["summary_fn", "global_step"],
    armillary.CentralStorageStrategy: ["cross_device_ops"],
    distribute.ReductionToOneDevice: ["reduce_to_device", "accumulation_fn"],
    armillary.MultiWorkerMirroredStrategy: ["communication"],
    armillary.TPUStrategy: ["tpu_cluster_resolver", "experimental_device_assignment"],
    armillary.Controller: [
        *("enable_async_checkpointing", "hang_timeout", "eval_steps"),
        *("max_epochs", "log_every_n_steps", "max_steps", "train_dataset", "steps"),
        *("eval_interval", "train_steps", "num_steps", "epochs", "eval_dataset"),
        *("train_data", "validation_data", "model", "optimizer", "callbacks"),
        *("logger", "devices", "accelerator", "num_nodes", "precision", "verbose"),
        *("enable_progress_bar", "monitor", "gradient_clip_val", "clipnorm"),
        *("accumulate_grad_batches", "resume_from_checkpoint", "ckpt_path"),
        *("batch_size", "shuffle", "seed", "validation_split", "validation_steps"),
        *("limit_val_batches", "val_check_interval", "num_sanity_val_steps"),
        *("limit_train_batches", "fast_dev_run", "min_epochs", "steps_per_epoch"),
        *("max_time", "initial_epoch", "loss", "metrics", "learning_rate", "lr"),
        *("class_weight", "sample_weight", "run_eagerly", "profiler"),
        *("deterministic", "benchmark", "default_root_dir", "checkpoint_dir"),
        *("enable_checkpointing", "save_weights_only", "save_top_k", "mode"),
        *("save_best_only", "every_n_train_steps", "save_freq", "save_steps"),
        *("save_interval", "checkpoint_interval", "save_total_limit", "max_to_keep"),
        *("max_checkpoints", "metric_for_best_model", "load_best_model_at_end"),
        *("output_dir", "num_train_epochs", "per_device_train_batch_size"),
        *("logging_steps", "logging_dir", "gradient_accumulation_steps", "bf16"),
        *("max_grad_norm", "train_dataloaders", "val_dataloaders", "datamodule"),
        *("overfit_batches", "detect_anomaly", "check_val_every_n_epoch"),
    ],
}


def test_every_answer_is_tested():
    tested = {(kind.__qualname__, name) for kind in OLD for name in OLD[kind]}
    names = {name for _, name in tested} | {f"{kind}.{name}" for kind, name in tested}
    # Estimators have tests of their own.
    assert set(ANSWERS) - set(ARGUMENTS) <= names


@pytest.mark.parametrize("kind", OLD, ids=lambda kind: kind.__qualname__)
def test_an_old_keyword_is_answered_with_the_new_one(kind):
    for name in OLD[kind]:
        answer = ANSWERS.get(f"{kind.__qualname__}.{name}") or ANSWERS[name]
        with pytest.raises(TypeError) as caught:
            kind(**{name: True})
        assert str(caught.value).startswith(f"`{name}` is True, but `")
        assert f"` has no such argument. {answer}" in str(caught.value)
        # The argument that an answer names exists. The refused one does not.
        parameters = inspect.signature(kind).parameters
        assert name not in parameters
        if "called" in answer:
            assert answer.split("`")[1] in parameters


@pytest.mark.parametrize(
    ("kind", "name", "answer"),
    [
        (armillary.Controller, "num_steps_per_loop", "Did you mean `steps_per_loop`?"),
        (
            armillary.StandardTrainerOptions,
            "gradient_accumulation_steps",
            "Did you mean `accumulate_steps`?",
        ),
        (armillary.data.InputOptions, "zzz", "It has `remainder`, "),
        # Arguments of the options, for the function that takes the options.
        (
            armillary.StepTrainer,
            "precision",
            "It is an option: `options=StandardTrainerOptions(precision=...)`.",
        ),
        (
            armillary.StepEvaluator,
            "precision",
            "It is an option: `options=StandardEvaluatorOptions(precision=...)`.",
        ),
        # Words that are hardly alike get no guess.
        (armillary.CheckpointManager, "validation_steps", "It has `checkpoint`, "),
        (armillary.StandardTrainerOptions, "validation_steps", "It has `compile_loop`"),
        # A new name counts where there is one.
        (armillary.CheckpointManager, "log_every_n_steps", "It has `checkpoint`, "),
        (armillary.data.from_arrays, "batchsize", "Did you mean `batch_size`?"),
        (armillary.data.from_arrays, "shuffle", "Did you mean `shuffle_seed`?"),
        (armillary.MirroredStrategy, "device", "Did you mean `devices`?"),
        (armillary.summarize, "models", "Did you mean `model`?"),
        (
            armillary.Controller.train_and_evaluate,
            "steps",
            "Did you mean `train_steps`",
        ),
    ],
)
def test_a_keyword_that_there_is_not_is_answered_with_what_there_is(kind, name, answer):
    with pytest.raises(TypeError) as caught:
        kind(**{name: 3})
    assert f"`{name}` is 3, but `{kind.__qualname__}` has no such" in str(caught.value)
    assert answer in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda params: armillary.StepTrainer(params, lambda state, batch: state),
            r"`step` is \{'w': .*\.\.\. of type dict, but it must be callable",
        ),
        (
            lambda params: armillary.StepTrainer(parameters=params),
            r"`parameters` is \{'w': .*\.\.\., but `StepTrainer` has no such argument",
        ),
        (
            lambda params: armillary.get_strategy().run(len, args=params),
            r"`args` is \{'w': .*\.\.\. of type dict, but it must be a tuple",
        ),
        (
            as_step_counter,
            r"`global_step` is \{'w': .*\.\.\. of type dict, but it must be a variable",
        ),
    ],
)
def test_a_message_shows_only_the_beginning_of_large_values(call, message):
    params = {"w": jnp.zeros((20, 20)), "b": jnp.zeros(20)}
    with pytest.raises(TypeError, match=message) as caught:
        call(params)
    text = str(caught.value)
    assert len(text) < 700
    assert "\n" not in text


def test_a_path_means_what_it_meant_when_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    paths = {
        text: check_path("directory", text)
        for text in ("~/run", "~", "run", "./~/run", "gs://bucket/~/run")
    }

    assert paths == {
        "~/run": f"{tmp_path}/run",
        "~": str(tmp_path),
        "run": f"{tmp_path}/run",
        "./~/run": f"{tmp_path}/~/run",
        "gs://bucket/~/run": "gs://bucket/~/run",
    }


def test_a_home_folder_that_is_not_there_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"`directory` is '~nobody-of-this-name/run'.*`directory=\"\./~",
    ):
        check_path("directory", "~nobody-of-this-name/run")


# A path of the bytes of UTF-8, and of Latin-1, as Python has it in an ASCII locale.
AS_UTF8 = "lauf ü".encode().decode("ascii", "surrogateescape")
AS_LATIN = "lauf ü".encode("latin-1").decode("ascii", "surrogateescape")


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        (AS_UTF8, "`LC_ALL=C.UTF-8` or `PYTHONUTF8=1`"),
        (AS_LATIN, "not UTF-8: rename the folder"),
        ("lauf \ud800", "not UTF-8: rename the folder"),
    ],
)
def test_a_path_that_is_not_utf8_is_an_error(path, fix, tmp_path):
    folder = f"{tmp_path}/{path}"
    checkpoint = armillary.Checkpoint(model=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    for make in (
        lambda: armillary.CheckpointManager(checkpoint, folder, step_counter=1),
        lambda: checkpoint.save(folder),
        lambda: summary.SummaryManager(folder),
    ):
        with pytest.raises(ValueError, match=rf"`\w+` is '.*\\ud.*{fix}"):
            make()
    # Python's own functions open such a file.
    assert check_path("paths", folder, only_python_opens=True) == folder


@pytest.mark.parametrize("path", ["lauf ü", "走る ☃"])
def test_a_path_in_utf8_is_none(path, tmp_path):
    assert check_path("directory", f"{tmp_path}/{path}") == f"{tmp_path}/{path}"


def test_a_locale_with_another_encoding_is_an_error(monkeypatch):
    monkeypatch.setattr(os, "fsencode", lambda path: path.encode("latin-1"))
    with pytest.raises(ValueError, match=r"on the disk is UTF-8.*LC_ALL=C\.UTF-8"):
        check_path("directory", "/lauf ü")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: armillary.data.from_arrays((1, 2), 64),
            "`from_arrays` takes 1 argument without a name, but got 2. Several arrays "
            "are one nest: `from_arrays((x, y), batch_size=64)`.",
        ),
        (
            lambda: armillary.CheckpointManager(1, "runs", 5),
            "`CheckpointManager` takes 2 arguments without a name, but got 3. Pass the "
            "others by name, as in `max_to_keep=...`.",
        ),
        (
            lambda: armillary.data.from_arrays([1]),
            "`from_arrays` needs `batch_size`, which is missing. Write "
            "`from_arrays(arrays=..., batch_size=...)`.",
        ),
        (
            lambda: armillary.Controller(steps_per_loop=1),
            "`Controller` needs `global_step`, which is missing. Write "
            "`global_step=trainer.global_step` for a `StepTrainer`. Otherwise the "
            "optimizer counts the steps: `global_step=trainer.optimizer.step` of Flax, "
            "or `global_step=model.optimizer.iterations` of Keras.",
        ),
        (
            lambda: armillary.actions.NewBestMetric("loss", filename="best"),
            "`filename` is 'best', but `NewBestMetric` has no such argument. Use "
            "`directory`, in which it makes a file named for the metric. It also needs "
            "`higher_is_better=...`.",
        ),
        (
            lambda: armillary.data.from_arrays([1], batchsize=2),
            "`batchsize` is 2, but `from_arrays` has no such argument. Did you mean "
            "`batch_size`?",
        ),
        (
            lambda: armillary.keras.KerasTrainer(1, [], callbacks=[]),
            "`callbacks` is [], but `KerasTrainer` has no such argument. Give the "
            "`Controller` actions, such as "
            "`eval_actions=[armillary.actions.EarlyStopping(...)]`, or call "
            "`model.fit(dataset, callbacks=[...])`.",
        ),
        (
            lambda: armillary.get_strategy().make_numpy_dataset([1]),
            "`Strategy.make_numpy_dataset` needs `batch_size`, which is missing. Write "
            "`strategy.make_numpy_dataset(arrays=..., batch_size=...)`.",
        ),
        (
            lambda: armillary.get_strategy().reduce(),
            "`Strategy.reduce` needs `reduce_op`, `value`, which are missing. Write "
            "`strategy.reduce(reduce_op=..., value=...)`.",
        ),
        (
            lambda: armillary.get_strategy().reduce(1),
            "`Strategy.reduce` needs `value`, which is missing. Write "
            "`strategy.reduce(reduce_op=..., value=...)`.",
        ),
    ],
)
def test_arguments_that_are_missing_or_without_a_name_are_reported(call, message):
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == message


def test_an_error_of_a_function_that_was_called_rightly_stays():
    def wrong_inside():
        return len(3)

    with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)$"):
        armillary.get_strategy().run(wrong_inside)
