"""Tests every public argument with many kinds of values.

The arguments come from the signatures of public names, so a new argument is tested as
soon as it exists. Its annotation tells which values fit.
"""

import enum
import functools
import importlib
import inspect
import math
import operator
import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import armillary
from armillary import data
from tests.meta.argument_values import (
    DERIVED,
    GIVEN,
    VALUES,
    make_sample,
)
from tests.meta.test_public_names import PACKAGES
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
    assert not problems, "\n".join(problems)


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
