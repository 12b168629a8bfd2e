"""Keywords of Orbit and tf.distribute that have another name are answered with it."""

import inspect

import pytest

import armillary
from armillary import actions, cluster, summary

RENAMED = {
    armillary.StandardTrainerOptions: {
        "use_tf_function": "It is called `compile_step` here.",
        "use_tf_while_loop": "It is called `compile_loop` here.",
        "use_tpu_summary_optimization": "Leave it out: summaries are written between ",
    },
    armillary.StandardEvaluatorOptions: {
        "use_tf_function": "It is called `compile_step` here.",
        "use_tf_while_loop": "It is called `compile_loop` here.",
        "on_non_finite": "An evaluation changes nothing that lasts, so there is ",
        "check_replicas_every": "An evaluation changes nothing that lasts, so there ",
    },
    armillary.InputOptions: {
        "experimental_fetch_to_device": "Leave it out: batches are always on ",
        "experimental_per_replica_buffer_size": "It is called `prefetch` here.",
        "experimental_place_dataset_on_device": "It is called `place_on_device` here.",
        "experimental_replication_mode": "Leave it out: a function with an ",
    },
    actions.NewBestMetric: {"filename": "Use `directory`, in which it makes a file "},
    actions.SaveCheckpointIfPreempted: {
        "cluster_resolver": "Leave it out: the processes are those that ",
        "checkpoint_number": "Leave it out: it is that of the manager's step counter.",
    },
    cluster.TerminationConfig: {
        "termination_watcher_fn": "It is called `watcher` here.",
        "save_fn": "Leave it out: the checkpoint manager saves.",
    },
    armillary.CheckpointManager: {
        "checkpoint_name": "Leave it out: each checkpoint is a folder named for its ",
    },
    summary.SummaryManager: {
        "summary_fn": "Use `writer_fn`, which makes the writer of each directory.",
        "global_step": "Leave it out: `write_summaries(output, step=...)` takes the ",
    },
    armillary.MultiWorkerMirroredStrategy: {
        "communication": "Write `communication_options=armillary.cluster.Communicati",
    },
    armillary.Controller: {
        "enable_async_checkpointing": "Leave it out: every save goes on in the ",
        "hang_timeout": "It is called `hang_timeout_seconds` here.",
    },
}


@pytest.mark.parametrize("kind", RENAMED)
def test_an_old_keyword_is_answered_with_the_new_one(kind):
    for name, answer in RENAMED[kind].items():
        with pytest.raises(TypeError) as caught:
            kind(**{name: True})
        start = f"`{name}` is True, but `{kind.__name__}` has no such argument. "
        assert str(caught.value).startswith(start + answer)
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
        (armillary.InputOptions, "zzz", "It has `remainder`, "),
        (armillary.data.from_arrays, "batchsize", "Did you mean `batch_size`?"),
        (armillary.data.from_arrays, "shuffle", "Did you mean `shuffle_seed`?"),
        (armillary.MirroredStrategy, "device", "Did you mean `devices`?"),
        (armillary.EpochHelper, "epoch_step", "Did you mean `epoch_steps`?"),
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
