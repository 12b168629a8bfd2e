"""Keywords of Orbit and tf.distribute that have another name are answered with it."""

import inspect

import pytest

import armillary
from armillary import actions, cluster, summary
from armillary._checks import check_path
from armillary._traceback import ANSWERS

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
        "recreate_iterator_for_each_eval",
    ],
    armillary.data.InputOptions: [
        "experimental_fetch_to_device",
        "experimental_per_replica_buffer_size",
        "experimental_place_dataset_on_device",
    ],
    actions.NewBestMetric: ["filename"],
    actions.ExportModel: ["signatures"],
    actions.PeriodicAction: ["global_step"],
    actions.SaveCheckpointIfPreempted: ["cluster_resolver"],
    cluster.TerminationConfig: ["termination_watcher_fn"],
    armillary.CheckpointManager: ["checkpoint_name", "monitor", "mode", "save_top_k"],
    summary.SummaryManager: ["summary_fn", "global_step"],
    armillary.MirroredStrategy: ["cross_device_ops"],
    armillary.MultiWorkerMirroredStrategy: ["communication"],
    armillary.TPUStrategy: ["tpu_cluster_resolver", "experimental_device_assignment"],
    armillary.Controller: [
        *("enable_async_checkpointing", "hang_timeout", "eval_steps"),
        *("max_epochs", "log_every_n_steps"),
    ],
}


@pytest.mark.parametrize("kind", OLD, ids=lambda kind: kind.__qualname__)
def test_an_old_keyword_is_answered_with_the_new_one(kind):
    for name in OLD[kind]:
        answer = ANSWERS.get(f"{kind.__qualname__}.{name}") or ANSWERS[name]
        with pytest.raises(TypeError) as caught:
            kind(**{name: True})
        assert str(caught.value).startswith(f"`{name}` is True, but `")
        assert str(caught.value).endswith(f"` has no such argument. {answer}")
        # What an answer names exists, and what it answers does not.
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
