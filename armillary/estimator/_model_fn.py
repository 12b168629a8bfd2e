"""Calls a model function, and keeps the modules that it makes.

Modules are made in a call of the function in Python, on zeros. All later calls are part
of a traced step, and find them.

What a model function returns, and what of it each mode needs.
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


NO_EXPORT = (
    "Read a module from a checkpoint, `armillary.Checkpoint(net=net).read(path, "
    "rename={'model/net': 'net'})`, and export it by `armillary.actions.ExportModel`."
)


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


_NEEDED = {
    ModeKeys.TRAIN: {
        "loss": "the mean of the losses of the batch, as `loss=losses.mean()`",
        "train_op": "an Optax transformation, as `train_op=optax.sgd(0.1)`",
    },
    ModeKeys.EVAL: {
        "loss": "the mean of the losses of the batch, as `loss=losses.mean()`"
    },
    ModeKeys.PREDICT: {
        "predictions": "a dictionary, as `predictions={'logits': logits}`"
    },
}


def check_spec(spec: Any, mode: ModeKeys) -> EstimatorSpec:
    """Returns what a model function returned, if it is good for a mode.

    Raises:
        EstimatorError: If it is not.
    """
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
    for name, what in _NEEDED[mode].items():
        if getattr(spec, name) is None:
            raise EstimatorError(
                f"`{name}` of the `EstimatorSpec` is None, but the mode {str(mode)!r} "
                f"needs it. Give {what}."
            )
    if mode is not ModeKeys.PREDICT and jnp.shape(spec.loss):
        raise EstimatorError(
            f"`loss` of the `EstimatorSpec` has the shape {jnp.shape(spec.loss)}, but "
            "it must be a scalar, the mean over the batch. Write `loss=losses.mean()`."
        )
    train_op = spec.train_op
    if mode is ModeKeys.TRAIN and not isinstance(
        train_op, optax.GradientTransformation
    ):
        raise EstimatorError(
            f"`train_op` of the `EstimatorSpec` is {train_op!r:.80} of type "
            f"{type(train_op).__name__}, but it must be an Optax transformation, to "
            "which the gradients of `loss` are given. Write "
            "`train_op=optax.sgd(0.1)`."
        )
    return spec


_ARGUMENTS = ("features", "labels", "mode", "params", "config", "modules")
_EXAMPLE = "`def model_fn(features, labels, mode, params, modules):`"


class ModuleStore(nnx.Module):
    """Holds the modules of a model function as attributes, by their names."""


class Modules:
    """The modules of a model function, each of which is made once.

    Args:
        store: Where they are.
        make: Makes one that is not there, from its name and a function. By default, as
            in a step that is traced, there is an error.
    """

    def __init__(
        self, store: ModuleStore, make: Callable[..., Any] | None = None
    ) -> None:
        self._store, self._make = store, make or _refuse_in_step

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
        found = vars(self._store).get(name) if _is_name(name) else None
        return self._make(name, make_fn) if found is None else found


class ModelFn:
    """A model function of the user's, and what it is called with.

    Raises:
        EstimatorError: If its arguments are not those of a model function.
        TypeError: If it cannot be called.
    """

    def __init__(self, fn: Callable[..., Any], params: Any, config: Any) -> None:
        self._names = _find_arguments(fn)
        self._fn, self._params, self._config = fn, params, config

    def __call__(
        self, modules: Modules, features: PyTree, labels: PyTree, mode: ModeKeys
    ) -> EstimatorSpec:
        """Calls it.

        Raises:
            EstimatorError: If it takes no labels and there are some, or returns what
                the mode cannot use.
        """
        if labels is not None and "labels" not in self._names:
            raise EstimatorError(
                "`model_fn` has no argument `labels`, but `input_fn` returns batches "
                f"with labels. Write it as {_EXAMPLE}"
            )
        values = {
            "features": features,
            "labels": labels,
            "mode": mode,
            "params": self._params,
            "config": self._config,
            "modules": modules,
        }
        spec = self._fn(**{name: values[name] for name in self._names})
        return check_spec(spec, mode)


class Model:
    """The modules of a model function, and the optimizer that trains them.

    Args:
        model_fn: The function.
        seed: What the modules' random numbers begin with.

    Attributes:
        model_fn: As given.
        store: The modules.
    """

    def __init__(self, model_fn: ModelFn, seed: int) -> None:
        self.model_fn, self._seed = model_fn, seed
        self.store = ModuleStore()
        self._optimizer: nnx.Optimizer[Any] | None = None
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
        """Makes the modules and the optimizer, unless they are there.

        Raises:
            EstimatorError: If the function makes no module with parameters.
        """
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
        modules = Modules(self.store, self._make)
        # One replica, whatever strategy is in effect.
        strategy = DefaultStrategy()
        context = ReplicaContext(strategy, None, active=1)
        try:
            with Scope(strategy, context):
                return self.model_fn(modules, features, labels, mode)
        finally:
            for slot, leaves in self._before:
                slot.write(leaves)
            self._before = []

    def _make(self, name: str, make_fn: Callable[..., Any]) -> Any:
        if not _is_name(name):
            raise EstimatorError(
                f"`modules.make` was given the name {name!r}, but it must be a Python "
                'identifier that does not begin with "_". Use `"model"`.'
            )
        if self._optimizer is not None:
            raise EstimatorError(
                f"`modules.make({name!r}, ...)` was not called when the model was "
                "built for training, and a checkpoint holds the modules of all modes. "
                "Make every module in every mode, before looking at `mode`."
            )
        key = jax.random.key(self._seed)
        rngs = nnx.Rngs(jax.random.fold_in(key, zlib.crc32(name.encode())))
        module = make_fn(rngs)
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


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not name.startswith("_")


def _refuse_in_step(name: str, make_fn: Callable[..., Any]) -> Any:
    del make_fn
    raise EstimatorError(
        f"`modules.make({name!r}, ...)` was called in a step that is traced, but not "
        "in the call of `model_fn` that made the modules. Make every module in every "
        "call, whatever the features, the mode and the parameters are."
    )


def _find_arguments(fn: Callable[..., Any]) -> list[str]:
    check_callable("model_fn", fn)
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # Of some builtins.
        parameters = {}
    unknown = [
        name
        for name, parameter in parameters.items()
        if name not in _ARGUMENTS and parameter.default is parameter.empty
    ]
    missing = [name for name in ("features", "modules") if name not in parameters]
    if missing or unknown:
        what = f"lacks `{missing[0]}`" if missing else f"has `{unknown[0]}`"
        raise EstimatorError(
            f"`model_fn` {what}, but its arguments are `features` and `modules`, and "
            f"any of `labels`, `mode`, `params` and `config`. Write it as {_EXAMPLE}"
        )
    return [name for name in parameters if name in _ARGUMENTS]
