"""Calls a model function, and keeps the modules that it makes.

Modules are made in a call of the function in Python, on zeros. All later calls are part
of a traced step, and find them.
"""

import enum
import inspect
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from armillary._checks import check_callable
from armillary.distribute.replica._collectives import ReplicaContext
from armillary.distribute.replica._context import Scope
from armillary.distribute.strategies._single import DefaultStrategy
from armillary.errors import EstimatorError
from armillary.state._lift import find_slots
from armillary.typing import PyTree


class ModeKeys(enum.StrEnum):
    """What a model function is called for."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True)
class EstimatorSpec:
    """What a model function returns; see the package for an example.

    Args:
        mode: The mode that the function was called with.
        predictions: A dictionary of arrays with an entry for each example. Needed to
            predict.
        loss: A scalar: the mean over the examples of this batch. Needed to train and to
            evaluate.
        train_op: An Optax transformation, which turns gradients into updates. Needed to
            train.
        eval_metric_ops: What an evaluation reports besides the loss, by name: an array
            with an entry for each example, or a pair of a function that makes a metric
            and the keyword arguments of its `update`.
    """

    mode: ModeKeys
    predictions: PyTree = None
    loss: Any = None
    train_op: optax.GradientTransformation | None = None
    eval_metric_ops: Mapping[str, Any] = field(default_factory=dict)


# What each mode needs of it, and how to write that.
_NEEDED = {
    ModeKeys.TRAIN: ("loss", "train_op"),
    ModeKeys.EVAL: ("loss",),
    ModeKeys.PREDICT: ("predictions",),
}
_FIXES = {
    "loss": "loss=losses.mean()",
    "train_op": "train_op=optax.sgd(0.1)",
    "predictions": "predictions={'logits': logits}",
}


def _check_spec(spec: Any, mode: ModeKeys) -> EstimatorSpec:
    """Returns what a model function returned, if it is good for a mode."""
    if not isinstance(spec, EstimatorSpec):
        raise EstimatorError(
            f"`model_fn` returned {spec!r:.80} of type {type(spec).__name__}, but it "
            "must return an `EstimatorSpec`. Write `return EstimatorSpec(mode, ...)` "
            "on every path."
        )
    if spec.mode != mode:
        raise EstimatorError(
            f"`mode` of the `EstimatorSpec` is {str(spec.mode)!r}, but `model_fn` was "
            f"called with {str(mode)!r}. Write `EstimatorSpec(mode, ...)`."
        )
    for name in _NEEDED[mode]:
        value = getattr(spec, name)
        if value is None:
            problem = f"is None, but the mode {str(mode)!r} needs it"
        elif name == "loss" and jnp.shape(value):
            problem = f"has the shape {jnp.shape(value)}, but it must be a scalar"
        elif name == "train_op" and not isinstance(value, optax.GradientTransformation):
            kind = type(value).__name__
            problem = f"is {value!r:.80} of type {kind}, which is none of Optax"
        else:
            continue
        fix = f"Write `{_FIXES[name]}`"
        raise EstimatorError(f"`{name}` of the `EstimatorSpec` {problem}. {fix}.")
    return spec


def call_with(fn: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Calls a user's function with those of some values that it has arguments for."""
    names = inspect.signature(fn).parameters
    return fn(**{name: values[name] for name in names if name in values})


class ModuleStore(nnx.Module):
    """Holds the modules of a model function as attributes, by their names."""


class Modules:
    """The modules of a model function, each of which is made once."""

    def __init__(
        self, store: ModuleStore, make: Callable[..., Any] | None = None
    ) -> None:
        # Without `make`, as in a step that is traced, all of them must be there.
        self._store, self._make = store, make

    def make(self, name: str, make_fn: Callable[[nnx.Rngs], Any]) -> Any:
        """Returns the module of a name.

        Args:
            name: Its name, in checkpoints too: a Python identifier.
            make_fn: Makes it from an `nnx.Rngs`, whose seed follows from the name and
                `RunConfig(tf_random_seed=...)`. It is called once.

        Raises:
            EstimatorError: If the name is none, `make_fn` makes no module, or the
                module cannot be made any more.
        """
        if not isinstance(name, str) or not name.isidentifier() or name[0] == "_":
            raise EstimatorError(
                f"`modules.make` was given the name {name!r}, but it must be a Python "
                'identifier that does not begin with "_". Use `"model"`.'
            )
        if (found := vars(self._store).get(name)) is not None:
            return found
        if self._make is None:
            raise EstimatorError(
                f"`modules.make({name!r}, ...)` was called in a step that is traced, "
                "but not in the call of `model_fn` that made the modules. Make every "
                "module in every call, whatever the features and the mode are."
            )
        return self._make(name, make_fn)


class ModelFn:
    """A model function of the user's, and what it is called with."""

    def __init__(self, fn: Callable[..., Any], params: Any, config: Any) -> None:
        check_callable("model_fn", fn)
        self._fn, self._values = fn, {"params": params, "config": config}

    def __call__(
        self, modules: Modules, features: PyTree, labels: PyTree, mode: ModeKeys
    ) -> EstimatorSpec:
        """Calls the function."""
        values = {"features": features, "labels": labels, "mode": mode}
        values |= {"modules": modules, **self._values}
        return _check_spec(call_with(self._fn, values), mode)


class Model:
    """The modules of a model function, and the optimizer that trains them."""

    def __init__(self, model_fn: ModelFn, seed: int) -> None:
        self.model_fn, self._seed = model_fn, seed
        self.store = ModuleStore()
        self._optimizer: nnx.Optimizer[Any] | None = None
        # What slots of modules held before the function was called in Python.
        self._before: list[tuple[Any, list[Any]]] = []

    @property
    def is_built(self) -> bool:
        """Whether the model was built for training."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> nnx.Optimizer[Any]:
        """The optimizer, once the model was built for training."""
        assert self._optimizer is not None
        return self._optimizer

    def build_training(self, features: PyTree, labels: PyTree) -> None:
        """Makes the modules and the optimizer, unless they are there."""
        if self._optimizer is not None:
            return
        spec = self.build(features, labels, ModeKeys.TRAIN)
        if not jax.tree.leaves(nnx.state(self.store, nnx.Param)):
            raise EstimatorError(
                "`model_fn` made no module that has an `nnx.Param`, so there is "
                "nothing to train. Make each module by `modules.make(name, make_fn)`."
            )
        assert spec.train_op is not None  # It was checked.
        self._optimizer = nnx.Optimizer(self.store, spec.train_op, wrt=nnx.Param)

    def build(self, features: PyTree, labels: PyTree, mode: ModeKeys) -> EstimatorSpec:
        """Calls the function once in Python, on zeros, and undoes what it writes."""
        features, labels = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (features, labels)
        )
        self._before = _read(self.store)
        # One replica, whatever strategy is in effect.
        strategy = DefaultStrategy()
        try:
            with Scope(strategy, ReplicaContext(strategy, None, active=1)):
                modules = Modules(self.store, self._make)
                return self.model_fn(modules, features, labels, mode)
        finally:
            for slot, leaves in self._before:
                slot.write(leaves)
            self._before = []

    def _make(self, name: str, make_fn: Callable[..., Any]) -> Any:
        if self._optimizer is not None:
            raise EstimatorError(
                f"`modules.make({name!r}, ...)` was not called when the model was "
                "built for training, and a checkpoint holds the modules of all modes. "
                "Make every module in every mode, before looking at `mode`."
            )
        key = jax.random.key(self._seed)
        module = make_fn(nnx.Rngs(jax.random.fold_in(key, zlib.crc32(name.encode()))))
        if not isinstance(module, nnx.Module):
            raise EstimatorError(
                f"`make_fn` of the module {name!r} returned {module!r:.80} of type "
                f"{type(module).__name__}, but it must be an `nnx.Module`. Write "
                f"`modules.make({name!r}, lambda rngs: nnx.Linear(4, 3, rngs=rngs))`."
            )
        setattr(self.store, name, module)
        self._before += _read(module)
        return module


def _read(holder: Any) -> list[tuple[Any, list[Any]]]:
    return [(slot, slot.read()) for slot in find_slots(holder, "modules")]
