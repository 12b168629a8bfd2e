"""Scales the losses of a compiled model for the replicas that share a batch.

A loss object may average over its examples, sum them, or neither, and only it knows. So
Keras asks two functions of its own to scale each mean, and a third one to scale what
layers add; they do so under TensorFlow. Inside `scaled_for_replicas` they do it here.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax


class _Local(threading.local):
    num_replicas: int = 1


_local = _Local()


@contextlib.contextmanager
def scaled_for_replicas(num_replicas: int) -> Iterator[None]:
    """Lets the sum over replicas of a model's losses be that of the whole batch."""
    _install()
    before, _local.num_replicas = _local.num_replicas, num_replicas
    try:
        yield
    finally:
        _local.num_replicas = before


def _scale(value: jax.Array) -> jax.Array:
    return value / _local.num_replicas if _local.num_replicas > 1 else value


def _unscale(value: jax.Array) -> jax.Array:
    return value * _local.num_replicas if _local.num_replicas > 1 else value


@functools.cache
def _install() -> None:
    from keras.src.losses import loss as keras_loss
    from keras.src.trainers.trainer import Trainer

    aggregate: Any = Trainer._aggregate_additional_loss

    @functools.wraps(aggregate)
    def aggregate_and_scale(self: Any, loss: Any) -> Any:
        return _scale(aggregate(self, loss))

    keras_loss.scale_loss_for_distribution = _scale
    keras_loss.unscale_loss_for_distribution = _unscale
    Trainer._aggregate_additional_loss = aggregate_and_scale
