"""Calls a model function, and keeps the modules that it makes."""

import enum
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from armillary._checks import check_callable
from armillary.distribute.replica._context import Scope
from armillary.distribute.replica._replica import ReplicaContext
from armillary.distribute.strategies._single import DefaultStrategy
from armillary.errors import EstimatorError
from armillary.state._lift import find_slots
from armillary.typing import Action, PyTree


class ModeKeys(enum.StrEnum):
    """The purpose of a call of a model function."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True)
class EstimatorSpec:
    """The result of a model function.

    `docs/advanced/model_functions.md` has an example.

    Args:
        mode: The mode that the function was called with.
        predictions: A dictionary of arrays with an entry for each example. Needed to
            predict.
        loss: A scalar: the mean over the examples of this replica's batch. It is then
            averaged over replicas, so do not divide by the global batch size. Needed
            to train and to evaluate.
        train_op: An Optax transformation for the gradients of `loss` with respect to
            all `nnx.Param` of the modules. The transformation of the first call in a
            process counts. Needed to train.
        eval_metric_ops: Further values that an evaluation reports, by name. A value is
            an array with an entry for each example, whose mean is reported. Or it is a
            pair: a function that makes a metric of `nnx.metrics` or
            `armillary.metrics`, and the keyword arguments of the metric's `update`.
        training_hooks: Functions of the output of a loop, as `hooks` of
            `Estimator.train`. The hooks of the first call in a process count.
        training_chief_hooks: Hooks that run only in the chief.
        evaluation_hooks: Functions of the output of an evaluation.
    """

    mode: ModeKeys
    predictions: PyTree = None
    loss: Any = None
    train_op: optax.GradientTransformation | None = None
    eval_metric_ops: Mapping[str, Any] = field(default_factory=dict)
    training_hooks: Sequence[Action] = ()
    training_chief_hooks: Sequence[Action] = ()
    evaluation_hooks: Sequence[Action] = ()


# The fields that each mode needs, with examples of their values.
_NEEDED = {
    ModeKeys.TRAIN: {"loss": "losses.mean()", "train_op": "optax.sgd(0.1)"},
    ModeKeys.EVAL: {"loss": "losses.mean()"},
    ModeKeys.PREDICT: {"predictions": "{'logits': logits}"},
}


def _check_spec(spec: Any, mode: ModeKeys) -> EstimatorSpec:
    """Returns the result of a model function, or raises if it does not fit the mode."""
    if not isinstance(spec, EstimatorSpec):
        raise EstimatorError(
            f"`model_fn` returned {spec!r:.80} of type {type(spec).__name__}, but it "
            "must return an `EstimatorSpec`. Write `return EstimatorSpec(mode, ...)` "
            "on every path."
        )
    for name, fix in _NEEDED[mode].items():
        value = getattr(spec, name)
        is_optax = isinstance(value, optax.GradientTransformation)
        if value is None:
            problem = f"is None, but the mode {str(mode)!r} needs it"
        elif name == "loss" and jnp.shape(value):
            problem = f"has the shape {jnp.shape(value)}, but it must be a scalar"
        elif name == "train_op" and not is_optax:
            problem = f"is {value!r:.80}, but it must be a transformation of Optax"
        else:
            continue
        raise EstimatorError(
            f"`{name}` of the `EstimatorSpec` {problem}. Write `{name}={fix}`."
        )
    return spec


_MODEL_FN_ARGUMENTS = ("features", "labels", "mode", "params", "config", "modules")
_INPUT_FN_ARGUMENTS = ("input_context", "mode", "params", "config")


def check_model_fn(model_fn: Any, params: Any) -> None:
    """Raises if a model function cannot be called as one, or ignores `params`."""
    check_callable("model_fn", model_fn)
    names = _check_signature("model_fn", model_fn, _MODEL_FN_ARGUMENTS)
    if names is None:
        return
    if "features" not in names:
        raise EstimatorError(
            f"`model_fn` has the arguments {', '.join(names) or '(none)'}, but it "
            "needs `features`. Write `def model_fn(features, labels, mode, modules):`."
        )
    if params is not None and "params" not in names:
        raise EstimatorError(
            f"`params` is {params!r:.80}, but `model_fn` has no argument `params` and "
            "would ignore it. Write `def model_fn(features, labels, mode, params, "
            "modules):`, or leave out `params=`."
        )


def check_input_fn(input_fn: Any) -> None:
    """Raises if an input function cannot be called as one."""
    check_callable("input_fn", input_fn)
    _check_signature("input_fn", input_fn, _INPUT_FN_ARGUMENTS)


def _check_signature(
    name: str, fn: Callable[..., Any], known: Sequence[str]
) -> list[str] | None:
    """Returns the names of a function's arguments; `None` if it takes any name."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # Some builtins have no signature.
        return None
    unknown: list[str] = []
    for parameter in parameters:
        takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        is_needed = parameter.default is parameter.empty and not takes_any
        if is_needed and parameter.name not in known:
            unknown.append(parameter.name)
    if unknown:
        shown = ", ".join(f"`{argument}`" for argument in known)
        raise EstimatorError(
            f"`{name}` has the argument `{unknown[0]}`, but it can have {shown}. "
            "Rename it, or give it a default value; numbers of your own go into "
            "`params`."
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def call_with(fn: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Calls a user's function with the values for which it has arguments."""
    parameters = inspect.signature(fn).parameters
    if any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return fn(**values)
    return fn(**{name: values[name] for name in parameters if name in values})


class Modules(nnx.Module):
    """The modules of a model function, as attributes; each module is made once."""

    def __init__(self) -> None:
        # It is None in a traced step, because all modules must have been made before.
        self._maker: Callable[..., Any] | None = None

    def make(self, name: str, make_fn: Callable[[nnx.Rngs], Any]) -> Any:
        """Returns the module with a name.

        Args:
            name: The name of the module, in checkpoints too: a Python identifier.
            make_fn: Makes the module from an `nnx.Rngs`, whose seed depends on the name
                and on `RunConfig(tf_random_seed=...)`. It is called once.

        Raises:
            EstimatorError: If the name is not valid, `make_fn` does not return a
                module, or it is too late to make the module.
        """
        is_name = isinstance(name, str) and name.isidentifier()
        is_free = is_name and not name.startswith("_") and name != "make"
        if not is_free:
            raise EstimatorError(
                f"`modules.make` was given the name {name!r}, but it must be a Python "
                'identifier that does not begin with "_". Use `"model"`.'
            )
        found = vars(self).get(name)
        if found is not None:
            return found
        if self._maker is None:
            raise EstimatorError(
                f"`modules.make({name!r}, ...)` was not called when `model_fn` was "
                "called to make the modules, but a checkpoint holds the modules of all "
                "modes. Make every module in every call, before you look at the mode."
            )
        return self._maker(name, make_fn)


class Model:
    """A model function, its modules, and the optimizer that trains them."""

    def __init__(self, fn: Callable[..., Any], seed: int, **values: Any) -> None:
        self.fn = fn
        self._seed = seed
        self._values = values
        self.modules = Modules()
        self.optimizer: nnx.Optimizer[Any] | None = None
        # The spec of the first call that trains.
        self.train_spec: EstimatorSpec | None = None
        # The values of the modules' slots before the function was called in Python.
        self._before: list[tuple[Any, list[Any]]] = []

    def call(
        self,
        modules: Modules,
        features: PyTree,
        labels: PyTree,
        mode: ModeKeys,
    ) -> EstimatorSpec:
        given = {"features": features, "labels": labels, "mode": mode}
        values = {**given, "modules": modules, **self._values}
        return _check_spec(call_with(self.fn, values), mode)

    def build_training(self, features: PyTree, labels: PyTree) -> nnx.Optimizer[Any]:
        """Makes the modules and the optimizer, unless they exist already."""
        if self.optimizer is None:
            spec = self.build(features, labels, ModeKeys.TRAIN)
            if not jax.tree.leaves(nnx.state(self.modules, nnx.Param)):
                raise EstimatorError(
                    "`model_fn` made no module that has an `nnx.Param`, so there is "
                    "nothing to train. Make each by `modules.make(name, make_fn)`."
                )
            assert spec.train_op is not None  # It was checked.
            self.optimizer = nnx.Optimizer(self.modules, spec.train_op, wrt=nnx.Param)
            self.train_spec = spec
        return self.optimizer

    def build(self, features: PyTree, labels: PyTree, mode: ModeKeys) -> EstimatorSpec:
        """Calls the function once in Python, on zeros, and undoes its writes."""
        features, labels = jax.tree.map(_as_zeros, (features, labels))
        self._before = _read(self.modules)
        if self.optimizer is None:
            self.modules._maker = self._make
        # The call runs as one replica, whatever strategy is in effect.
        strategy = DefaultStrategy()
        try:
            with Scope(strategy, ReplicaContext(strategy, None, active=(0,))):
                return self.call(self.modules, features, labels, mode)
        finally:
            self.modules._maker = None
            for slot, leaves in self._before:
                slot.write(leaves)
            self._before = []

    def _make(self, name: str, make_fn: Callable[..., Any]) -> Any:
        # The seed depends on the name, so the order of the modules does not matter.
        hashed_name = zlib.crc32(name.encode())
        key = jax.random.fold_in(jax.random.key(self._seed), hashed_name)
        module = make_fn(nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise EstimatorError(
                f"`make_fn` of the module {name!r} returned {module!r:.80} of type "
                f"{type(module).__name__}, but it must be an `nnx.Module`. Write "
                f"`modules.make({name!r}, lambda rngs: nnx.Linear(4, 3, rngs=rngs))`."
            )
        setattr(self.modules, name, module)
        self._before += _read(module)
        return module


def _as_zeros(leaf: Any) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype)


def _read(holder: Any) -> list[tuple[Any, list[Any]]]:
    return [(slot, slot.read()) for slot in find_slots(holder, "modules")]
