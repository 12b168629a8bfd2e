"""Refuses Keras losses that are a mean over one replica's examples.

Gradients are summed over replicas, so the mean of each replica's share would make them
as many times too large as there are replicas. As in `tf.distribute`, such a reduction
is an error inside `run`, also on a single replica, where it would be right: a program
must not get other gradients when it gets more devices.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from armillary.distribute.replica._context import get_replica_context, has_strategy
from armillary.state import _keras

if TYPE_CHECKING:
    import keras

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class _Local(threading.local):
    are_scaled: bool = False


_local = _Local()


def check_keras_losses() -> None:
    """Lets Keras losses be checked when they are called, from now on."""
    _keras.check_losses(_check)


@contextlib.contextmanager
def scaled_losses() -> Iterator[None]:
    """Allows any reduction, for code that divides by the number of replicas itself."""
    before, _local.are_scaled = _local.are_scaled, True
    try:
        yield
    finally:
        _local.are_scaled = before


def _check(loss: "keras.Loss") -> None:
    if _local.are_scaled or loss.reduction not in _MEANS or not has_strategy():
        return
    if get_replica_context() is None:
        return
    raise ValueError(
        f"`reduction` of `{type(loss).__name__}` is {loss.reduction!r}, and it was "
        "called inside `strategy.run`: it divides by the number of examples of one "
        "replica, but gradients are summed over all replicas. Make it with "
        "`reduction=None` and average over the global batch, "
        "`armillary.compute_average_loss(loss_object(labels, predictions))`, or with "
        '`reduction="sum"` and divide by the global batch size. A loss that is given '
        "to `model.compile` may keep its reduction."
    )
