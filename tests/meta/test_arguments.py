"""Tests every public argument with many kinds of values.

The arguments come from the signatures of public names, so a new argument is tested as
soon as it exists. Its annotation tells which values fit.
"""

import enum
import functools
import importlib
import inspect
import json
import math
import operator
import re
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import data, estimator, pretrained
from armillary._checks import list_lines
from tests.meta.test_public_names import PACKAGES
from tests.records import make_record, write_records
from tests.tiers import slow_after_first

LIBRARY_MAKES_IT = "the library makes it"
NOT_TESTED = {
    "armillary.trainer.PendingLoops": "trainers make it, for controllers",
    "armillary.controller.RunOutput": LIBRARY_MAKES_IT,
    "armillary.cluster.ProcessPlan": "resolvers make it, of what they have checked",
    "armillary.data.ArrayDataset": "`from_arrays` makes it",
    "armillary.data.DistributedDataset": LIBRARY_MAKES_IT,
    "armillary.data.DistributedIterator": LIBRARY_MAKES_IT,
    "armillary.data.HuggingFaceDataset": "`from_huggingface` makes it",
    "armillary.data.MixedDataset": "`mix` makes it",
    "armillary.data.OptionalBatch": LIBRARY_MAKES_IT,
    "armillary.data.PackedExamples": "`pack` makes it",
    "armillary.data.RandomAccessDataset": "`from_random_access` makes it",
    "armillary.data.SelectedExamples": "`select` makes it",
    "armillary.data.TFRecordDataset": "`from_tfrecords` makes it",
    "armillary.data.from_huggingface": "needs a package that is not there everywhere",
    "armillary.distribute.PerReplica": LIBRARY_MAKES_IT,
    "armillary.distribute.ReplicaContext": LIBRARY_MAKES_IT,
    "armillary.distribute.Strategy": "a base class",
    "armillary.distribute.StrategyExtended": LIBRARY_MAKES_IT,
    "armillary.estimator.EstimatorSpec": "checked when a model function returns it",
    "armillary.goodput.Goodput": LIBRARY_MAKES_IT,
    "armillary.plan.Collective": LIBRARY_MAKES_IT,
    "armillary.plan.Memory": LIBRARY_MAKES_IT,
    "armillary.plan.Plan": LIBRARY_MAKES_IT,
    "armillary.plan.Tensor": LIBRARY_MAKES_IT,
    "armillary.plan.Variant": LIBRARY_MAKES_IT,
    "armillary.summary.WandbWriter": "needs a package that is not there everywhere",
}
# They get only what they must refuse, as they would train, compile, or change JAX.
REFUSING = {
    "armillary.estimator.train_and_evaluate",
    "armillary.plan.plan",
    "armillary.pretrained.list_tensors",
    "armillary.pretrained.load",
    "armillary.pretrained.save",
    "armillary.testing.assert_collectives",
    "armillary.testing.assert_shardings",
    "armillary.testing.assert_strategies_agree",
    "armillary.testing.find_collectives",
    "armillary.xla.use_compilation_cache",
}
# Their signatures are not for users, or are inherited from a base.
WITHOUT_ARGUMENTS = (data.Source, data.SourceIterator, armillary.summary.SummaryWriter)


class Trainer(armillary.StandardTrainer):
    def train_step(self, iterator):
        next(iterator)


class Evaluator(armillary.StandardEvaluator):
    def eval_step(self, iterator):
        next(iterator)


def list_arguments(value: Any) -> list[inspect.Parameter]:
    """Returns what users may give by name to a function, or to make an object."""
    function = value.__init__ if isinstance(value, type) else value
    if not isinstance(function, types.FunctionType):
        return []
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(function).parameters.values()
    return [each for each in parameters if each.kind in kinds and each.name != "self"]


def find_callables() -> dict[str, Callable[..., Any]]:
    """Returns what the packages make public and takes arguments, by its first name."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            is_kind = isinstance(value, type)
            if is_kind and issubclass(value, enum.Enum | BaseException | tuple):
                continue
            if value not in WITHOUT_ARGUMENTS and list_arguments(value):
                found.setdefault(f"{value.__module__}.{name}", (package, name, value))
    return {f"{package}.{name}": value for package, name, value in found.values()}


# Methods that users give arguments to. They get only what they must refuse, too.
METHODS = [
    "Checkpoint.read",
    "Checkpoint.restore",
    "Checkpoint.save",
    "Checkpoint.write",
    "CheckpointManager.restore",
    "CheckpointManager.save",
    "Controller.evaluate",
    "Controller.evaluate_continuously",
    "Controller.train",
    "Controller.train_and_evaluate",
    "InputContext.get_per_replica_batch_size",
    "MirroredStrategy.distribute_dataset",
    "MirroredStrategy.gather",
    "MirroredStrategy.reduce",
    "MirroredStrategy.distribute_datasets_from_function",
    "MirroredStrategy.run",
    "MirroredStrategy.distribute_values_from_function",
    "StandardEvaluator.evaluate",
    "StandardTrainer.train",
    "estimator.Estimator.evaluate",
    "estimator.Estimator.predict",
    "estimator.Estimator.train",
]
CALLABLES = find_callables()
for path in METHODS:
    CALLABLES[f"armillary.{path}"] = operator.attrgetter(path)(armillary)
    REFUSING.add(f"armillary.{path}")
TESTED = [name for name in CALLABLES if name not in NOT_TESTED]


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
# The meaning of arguments whose annotations say less.
MEANT = {
    "checkpoint_interval": "int | Literal['auto'] | None",
    "eval_dataset": "Iterable | Callable | None",
    "global_step": "Callable",
    "next_id_fn": "Callable | None",
    "request_stop": "Callable",
    "step_counter": "Callable | None",
    "train_dataset": "Iterable | Callable | None",
}
MAY_BE_INFINITE = {"hang_timeout_seconds"}
MAY_BE_NEGATIVE = {
    "axis",
    "default_value",
    "eval_steps",
    "num_steps",
    "steps",
    "threshold",
    "train_steps",
}
MAY_BE_EMPTY = {"config", "model_dir", "name", "source", "text", "tpu"}
DATA = "(dataset|source)"
OTHER_NAMES = {
    "cluster_spec": "cluster",
    "dataset": DATA,
    "dataset_or_fn": DATA,
    "eval_dataset": DATA,
    "source": DATA,
    "train_dataset": DATA,
}


def fits(parameter: inspect.Parameter, value: Any) -> bool:
    """Returns whether an argument may take a value, by its annotation."""
    name = parameter.name
    hint = MEANT.get(name) or inspect.formatannotation(parameter.annotation)
    if "Literal" in hint and isinstance(value, str):
        return repr(value) in hint
    while "[" in hint:
        hint = re.sub(r"\[[^\[\]]*\]", "", hint)
    words = {word.strip("'").rpartition(".")[2] for word in hint.split(" | ")}

    def takes(*kinds: str) -> bool:
        return not words.isdisjoint(kinds)

    if value is None:
        return takes("None", "Optional", "Any")
    if takes("Any"):
        return True
    if isinstance(value, bool):
        return takes("bool")
    if isinstance(value, int | float | np.integer | np.floating):
        is_whole = isinstance(value, int | np.integer)
        is_good = math.isfinite(value) and bool(value >= 0 or name in MAY_BE_NEGATIVE)
        is_good = is_good or (name in MAY_BE_INFINITE and value == math.inf)
        return is_good and (takes("float") or (is_whole and takes("int")))
    if isinstance(value, str):
        return takes("str") and (bool(value.strip()) or name in MAY_BE_EMPTY)
    if callable(value):
        return takes("Callable")
    if isinstance(value, dict):
        return takes("Mapping", "dict")
    many = list | tuple | range | set | frozenset | np.ndarray | jax.Array
    if isinstance(value, many | types.GeneratorType):
        return takes("Sequence", "Iterable", "tuple", "list")
    return False


def call(name: str, **given: Any) -> Any:
    """Calls with some arguments, and with what else must be given."""
    function = CALLABLES[name]
    for each in list_arguments(function):
        if each.default is each.empty or each.name in GIVEN:
            given.setdefault(each.name, make_sample(name, each.name))
    if name.removeprefix("armillary.") in METHODS:
        given["self"] = make_object(name.rpartition(".")[0])
    return DERIVED.get(function, function)(**given)


@functools.cache
def make_object(kind: str) -> Any:
    is_known = kind in CALLABLES
    return call(kind) if is_known else make_sample(kind, "checkpoint")


def find_problem(name: str, parameter: inspect.Parameter, value: Any) -> str | None:
    """Returns what is wrong with how a value is taken or refused."""
    may_be_taken = fits(parameter, value)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            jax.numpy_rank_promotion("allow"),  # for Keras
        ):
            made = call(name, **{parameter.name: value})
            if inspect.isgenerator(made):
                next(made, None)
            if hasattr(made, "close"):
                made.close()
    except Exception as error:
        if may_be_taken and (
            callable(value)  # A user's function may raise anything.
            or isinstance(error, OSError | armillary.errors.ClusterError)
        ):
            return None
        # Two values that are each right may not go together.
        every = [each.name for each in list_arguments(CALLABLES[name])]
        names = every if may_be_taken else [parameter.name]
        names += [OTHER_NAMES[each] for each in names if each in OTHER_NAMES]
        kinds = ValueError | TypeError | OSError | armillary.errors.ArmillaryError
        if isinstance(error, kinds) and any(
            re.search(rf"\b{each}\b", str(error)) for each in names
        ):
            return None
        return f"{type(error).__name__}: {error!s:.200}"
    finally:
        armillary.distribute.set_strategy(None)
    return None if may_be_taken else "taken"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Lets all tests of this module write into one temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("arguments"))
        yield
        make_object.cache_clear()
        make_sample.cache_clear()


@slow_after_first("name", TESTED)
def test_every_value_is_taken_or_refused_by_name(name):
    problems = []
    for parameter in list_arguments(CALLABLES[name]):
        for kind, value in VALUES.items():
            if kind == "a generator":
                value = (part for part in "ab")
            if name in REFUSING and fits(parameter, value):
                continue
            problem = find_problem(name, parameter, value)
            if problem is not None:
                problems.append(f"{parameter.name}={kind}: {problem}")
    assert not problems, list_lines(problems)


@pytest.mark.parametrize("name", CALLABLES)
def test_every_keyword_that_is_misspelt_gets_an_answer(name):
    function = CALLABLES[name]
    every = [each.name for each in list_arguments(function)]
    signature = inspect.signature(getattr(function, "__init__", function))
    if inspect.Parameter.VAR_KEYWORD in {p.kind for p in signature.parameters.values()}:
        return
    for argument in every:
        with pytest.raises(TypeError) as caught:
            DERIVED.get(function, function)(**{f"{argument}_": 1})
        answer = rf"^`{argument}_` is 1, but `\w+` has no such argument\. (.*)$"
        found = re.match(answer, str(caught.value))
        assert found, str(caught.value)
        assert found[1] == f"Did you mean `{argument}`?"


def test_untested_arguments_exist_and_have_a_reason():
    assert set(NOT_TESTED) | REFUSING <= set(CALLABLES)
    assert all(NOT_TESTED.values())
