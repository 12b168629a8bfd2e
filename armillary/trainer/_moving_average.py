"""A model whose parameters are the average of those of a model that is trained.

This file imports Flax NNX: it is loaded when the class is first used.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from armillary._checks import check_instance
from armillary._traceback import hides_frames

_OTHER_MODELS = (
    "Optimizers of Keras have `use_ema=True`; for other pytrees, call "
    "`optax.incremental_update` in the step."
)


class ExponentialMovingAverage(nnx.Module):
    """Keeps a copy of a model with the moving average of its parameters.

    After each update of the model, the step moves the copy a little towards it:
    `average = decay * average + (1 - decay) * parameter`. The copy is a model like the
    first one, to evaluate, to save and to export::

        ema = armillary.ExponentialMovingAverage(model, 0.999)   # under the scope

        self.optimizer.update(self.model, gradients)             # in the step
        self.ema.update(self.model)

        logits = self.ema.model(batch["image"])                  # in an evaluation
        armillary.Checkpoint(model=model, optimizer=optimizer, ema=ema)

    It is state of the trainer that holds it, so it is in the compiled loop, equal on
    all replicas, and the same with any number of them. Averaged is every `nnx.Param`;
    other state, such as the statistics of batches, is that of the model at the last
    update, and random state stays. Averages of parameters in 16 bits have 32, in which
    small steps count.

    Args:
        model: The model. The average begins with its parameters.
        decay: How much of the average stays in an update, above 0 and below 1, or a
            function from the number of earlier updates to that. Common are 0.99 for
            thousands of steps and 0.9999 for millions. With `lambda n: 1 - (1 - d) /
            (1 - d ** (n + 1))` the first parameters count for nothing once there is an
            update, as in `optax.ema(d, debias=True)`.

    Attributes:
        model: The copy.
        num_updates: How many updates there were, a variable.

    Raises:
        TypeError: If `model` is no NNX module.
        ValueError: If `decay` is out of range.
    """

    @hides_frames
    def __init__(
        self, model: nnx.Module, decay: float | Callable[[jax.Array], Any]
    ) -> None:
        check_instance("model", model, nnx.Module, _OTHER_MODELS)
        is_number = isinstance(decay, int | float | np.floating | jax.Array)
        is_share = is_number and jnp.ndim(decay) == 0 and bool(0 < decay < 1)
        if not callable(decay) and not is_share:
            raise ValueError(
                f"`decay` is {decay!r}, but it must be above 0 and below 1: the part "
                "of the average that stays in an update. Use `decay=0.999`."
            )
        self.decay = decay
        self.model = nnx.clone(model)
        # Buffers of its own, since a program may take those of the model over.
        nnx.update(self.model, jax.tree.map(_copy, nnx.state(model, nnx.Param)))
        self.num_updates = nnx.Variable(jnp.zeros((), jnp.int32))

    def update(self, model: nnx.Module) -> None:
        """Moves the average towards the parameters of a model, in a step or outside.

        Args:
            model: The model, after its own update.

        Raises:
            ValueError: If it is the average itself.
        """
        check_instance("model", model, nnx.Module, _OTHER_MODELS)
        if model is self.model:
            raise ValueError(
                "`model` is the model of the average itself, which would never move. "
                "Pass the model that is trained: `self.ema.update(self.model)`."
            )
        filters, decay = (nnx.Param, nnx.RngState, ...), self.decay
        new, _, others = nnx.state(model, *filters)
        old, _, _ = nnx.state(self.model, *filters)
        averages: Any = optax.incremental_update(
            jax.tree.map(jnp.asarray, nnx.to_pure_dict(new)),
            nnx.to_pure_dict(old),
            1.0 - (decay(self.num_updates[...]) if callable(decay) else decay),
        )
        nnx.replace_by_pure_dict(old, averages)
        nnx.update(self.model, old, others)
        self.num_updates[...] += 1


def _copy(value: jax.Array) -> jax.Array:
    is_short = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
    return jnp.array(value, jnp.float32 if is_short else None, copy=True)
