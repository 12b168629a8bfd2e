"""What a model function returns, and what of it each mode needs."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import optax

from armillary._checks import answers_old_names
from armillary.errors import EstimatorError
from armillary.typing import PyTree


class ModeKeys(enum.StrEnum):
    """What a model function is called for."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


NO_HOOKS = (
    "Leave it out: there is no session that hooks could run in. A `Controller` of your "
    "own has actions, which run between loops."
)
NO_EXPORT = (
    "Read a module from a checkpoint, `armillary.Checkpoint(net=net).read(path, "
    "rename={'model/net': 'net'})`, and export it by `armillary.actions.ExportModel`."
)


@answers_old_names(
    training_chief_hooks=NO_HOOKS,
    training_hooks=NO_HOOKS,
    evaluation_hooks=NO_HOOKS,
    prediction_hooks=NO_HOOKS,
    scaffold="Leave it out: `make_fn` of `modules.make` sets a module up.",
    export_outputs=f"Leave it out. {NO_EXPORT}",
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
