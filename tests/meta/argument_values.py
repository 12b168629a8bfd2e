"""Values for every public argument: one right value, and many that may be wrong."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
from flax import nnx

import armillary
from armillary import data, estimator, pretrained
from tests.records import make_record, write_records


class Trainer(armillary.StandardTrainer):
    def train_step(self, iterator):
        next(iterator)


class Evaluator(armillary.StandardEvaluator):
    def eval_step(self, iterator):
        next(iterator)


class Nothing:
    """Nothing in particular."""


def function_of_one(x=None):
    return x


VALUES: dict[str, Any] = {
    **{repr(n): n for n in (0, 1, 2, 7, -1, -7, 10**20, -(10**20), 2**63)},
    **{repr(x): x for x in (0.0, 0.5, 1.0, -0.5, 1e300, math.nan, math.inf, -math.inf)},
    **{repr(x): x for x in (None, True, False, 1j, ..., b"", b"x", slice(3))},
    **{repr(x): x for x in ("", " ", "no such word", "1", "False", "none", "[/nope]")},
    **{repr(x): x for x in ([], [1], [None], ["x"], [[]], (), (1, 2), (math.nan,))},
    **{repr(x): x for x in ({}, {"x": 1}, {1: 2}, {None: None}, {1, 2}, range(3))},
    "an escape sequence": "\x1b[2J",
    "a text with a NUL": "a\0b",
    "a long text": "x" * 300,
    "a frozenset": frozenset(),
    "a bytearray": bytearray(b"x"),
    "a generator": None,
    "an array of one number": np.array(7),
    "an empty array": np.array([]),
    "an array": np.array([1, 2]),
    "an array of text": np.array(["x"]),
    "a NumPy integer": np.int64(-3),
    "a NumPy float": np.float32(math.nan),
    "a date": np.datetime64("2020-01-01"),
    "an array of JAX": jnp.zeros(2),
    "an integer of JAX": jnp.int32(2),
    "an object": object(),
    "an object of a class": Nothing(),
    "a class": Nothing,
    "a type": int,
    "a function": function_of_one,
    "a builtin": print,
    "a lambda": lambda: 3,
    "a module": math,
    "an exception": ValueError("x"),
}
ROWS = {"x": np.ones((4, 2), np.float32)}
TF_CONFIG = {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}
PAIR = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)


def make_model():
    return nnx.Linear(1, 1, rngs=nnx.Rngs(0))


def make_checkpoint(leave_out=None):
    return armillary.Checkpoint(model=make_model(), leave_out=leave_out)


DERIVED = {
    armillary.Checkpoint: make_checkpoint,
    armillary.StandardTrainer: Trainer,
    armillary.StandardEvaluator: Evaluator,
}


def model_fn(features, modules):
    raise AssertionError("not called")


# A right value for what must be given, by the name of the argument.
SAMPLES: dict[str, Callable[[], Any]] = {
    "action": lambda: print,
    "args": lambda: (),
    "arrays": lambda: ROWS,
    "axis": lambda: 0,
    "at": lambda: 5,
    "base_name": lambda: "exports/model",
    "batch_size": lambda: 2,
    "boundaries": lambda: [0.0, 1.0],
    "categorical_column": lambda: estimator.categorical_column_with_identity("x", 3),
    "checkpoint": lambda: armillary.Checkpoint(model=make_model()),
    "checkpoint_manager": lambda: armillary.CheckpointManager(
        armillary.Checkpoint(model=make_model()), "checkpoints"
    ),
    "cluster": lambda: {"worker": ["a:1"]},
    "cluster_spec": lambda: {"worker": ["a:1"]},
    "condition": lambda: bool,
    "dataset": lambda: [ROWS],
    "dataset_fn": lambda: lambda context: [ROWS],
    "dataset_or_fn": lambda: [ROWS],
    "decay": lambda: 0.9,
    "device": lambda: "cpu:0",
    "dimension": lambda: 2,
    "directory": lambda: "directory",
    "environ": lambda: {"TF_CONFIG": json.dumps(TF_CONFIG)},
    "documents": lambda: [np.arange(3)],
    "dtype": lambda: np.float32,
    "epoch_steps": lambda: 3,
    "estimator": lambda: estimator.Estimator(model_fn, "estimator"),
    "eval_dataset": lambda: [ROWS],
    "eval_steps": lambda: 1,
    "eval_spec": lambda: estimator.EvalSpec(function_of_one),
    "feature_columns": lambda: [estimator.numeric_column("x")],
    "features": lambda: {"x": data.FixedLenFeature([], np.float32)},
    "file_manager": lambda: armillary.actions.ExportFileManager("exports/model"),
    "evaluator": lambda: Evaluator([ROWS]),
    "file_prefix": lambda: "prefix",
    "fn": lambda: function_of_one,
    "global_step": lambda: lambda: 0,
    "hash_bucket_size": lambda: 5,
    "hidden_units": lambda: [4],
    "higher_is_better": lambda: True,
    "input_fn": lambda: function_of_one,
    "interval": lambda: 2,
    "k": lambda: 2,
    "keep": lambda: [0],
    "key": lambda: "x",
    "learning_rate": lambda: 0.1,
    "loss_fn": lambda: lambda *_: jnp.zeros(()),
    "make_trainer": lambda: function_of_one,
    "global_batch_size": lambda: 2,
    "memory_bytes": lambda: 1e9,
    "metric": lambda: "loss",
    "model": make_model,
    "model_dir": lambda: "estimator",
    "model_fn": lambda: model_fn,
    "name": lambda: "h100",
    "names": lambda: pretrained.Names([("weight", "kernel"), ("bias", "bias")]),
    "num_buckets": lambda: 3,
    "num_steps": lambda: 1,
    "op": lambda: "sum",
    "path": lambda: "nowhere",
    "paths": lambda: write_records(Path("a.tfrecord"), [make_record({"x": 1.0})]),
    "patience": lambda: 2,
    "pattern": lambda: "a b -> b a",
    "per_example_loss": lambda: jnp.ones(2),
    "pixels": lambda: np.zeros((2, 2, 3), np.uint8),
    "platform": lambda: "cuda",
    "rank": lambda: 1,
    "reduce_op": lambda: "mean",
    "regularization_loss": lambda: jnp.ones(()),
    "request_stop": lambda: function_of_one,
    "rngs": lambda: nnx.Rngs(0),
    "row_length": lambda: 4,
    "rows": lambda: [("weight", "kernel")],
    "run_dir": lambda: "nowhere",
    "shape": lambda: (),
    "sizes": lambda: 2,
    "source": lambda: [ROWS],
    "sources": lambda: {"x": ROWS},
    "source_column": lambda: estimator.numeric_column("x"),
    "state": lambda: jnp.ones(2),
    "step": lambda: 1,
    "steps": lambda: 2,
    "steps_per_loop": lambda: 2,
    "strategies": lambda: [armillary.get_strategy()] * 2,
    "strategy": lambda: None,
    "summary_dir": lambda: "summaries",
    "task_type": lambda: "worker",
    "text": lambda: "x",
    "topology": lambda: "h100:1x1",
    "train_dataset": lambda: [ROWS],
    "train_steps": lambda: 1,
    "train_spec": lambda: estimator.TrainSpec(function_of_one),
    "trainer": lambda: Trainer([ROWS]),
    "tree": lambda: jnp.ones(2),
    "value": lambda: armillary.MirroredStrategy().run(lambda: jnp.ones(2)),
    "value_fn": lambda: function_of_one,
    "values": lambda: jnp.ones(2),
    "variables": make_model,
    "vocabulary_list": lambda: ["a", "b"],
    "weights": lambda: jnp.ones(2),
    "where": lambda: "kernel",
}


@functools.cache
def make_sample(name: str, argument: str) -> Any:
    return OTHER_SAMPLES.get((name, argument), SAMPLES[argument])()


def make_keras_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd")
    return model


OTHER_SAMPLES = {
    ("armillary.keras.KerasEvaluator", "model"): make_keras_model,
    ("armillary.keras.KerasTrainer", "model"): make_keras_model,
    ("armillary.StepEvaluator", "step"): lambda: function_of_one,
    ("armillary.StepEvaluator", "trainer"): lambda: SimpleNamespace(state=jnp.ones(2)),
    ("armillary.StepTrainer", "step"): lambda: function_of_one,
    ("armillary.keras.KerasEvaluator", "eval_dataset"): lambda: [PAIR],
    ("armillary.keras.KerasTrainer", "train_dataset"): lambda: [PAIR],
}
# Given too, as defaults would have an error of another argument come first.
GIVEN = {
    "checkpoint_manager",
    "environ",
    "evaluator",
    "interval",
    "model_dir",
    "steps_per_loop",
    "task_type",
    "trainer",
}
