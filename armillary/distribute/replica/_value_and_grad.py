"""Gradients with respect to variables: what a tape is in TensorFlow, in one call.

A loss is a function of the variables that it reads. They are swapped for the values
that JAX differentiates by; what the loss writes to any other variable comes out as a
result, and is written when the derivative is done.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from armillary._checks import check_callable
from armillary._traceback import hides_frames
from armillary.distribute.replica._context import lifted_state
from armillary.errors import CapturedStateError
from armillary.state._keras import is_variable as is_keras_variable
from armillary.state._lift import State
from armillary.state._nnx import is_variable as is_nnx_variable


@hides_frames
def value_and_grad(
    loss_fn: Callable[[], Any], variables: Iterable[Any], *, has_aux: bool = False
) -> tuple[Any, list[Any]]:
    """Returns a loss, and its gradients with respect to variables.

    In place of `tf.GradientTape`, for variables of Keras and of Flax NNX::

        def loss_fn():
            predictions = model(images, training=True)
            losses = loss_object(labels, predictions)
            return armillary.compute_average_loss(losses)

        loss, gradients = armillary.value_and_grad(loss_fn, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    Inside `strategy.run`, gradients with respect to mirrored variables arrive summed
    over replicas. What `loss_fn` writes to variables (batch statistics, metrics, random
    state) stays written.

    Args:
        loss_fn: Computes the loss, a scalar, from what the variables hold.
        variables: The variables to differentiate by.
        has_aux: Whether `loss_fn` returns a pair of the loss and something else, as in
            `jax.value_and_grad`.

    Returns:
        What `loss_fn` returned, and one gradient for each variable, in their order.

    Raises:
        TypeError: If `loss_fn` cannot be called, or one of `variables` is not a
            variable.
        CapturedStateError: If the trainer does not reach one of them.
    """
    check_callable("loss_fn", loss_fn)
    wanted = list(variables)
    for variable in wanted:
        if not (is_keras_variable(variable) or is_nnx_variable(variable)):
            raise TypeError(
                f"`variables` holds {variable!r:.60} of type "
                f"{type(variable).__name__}, but it must be a list of variables of "
                "Keras or Flax NNX. Use `model.trainable_variables`, or "
                "`jax.value_and_grad` for arrays."
            )
    state = lifted_state() or State([(loss_fn, ""), (wanted, "variables")])
    ranges = [_find(state, variable) for variable in wanted]
    before = state.read()

    def pure(values: Sequence[Any]) -> tuple[Any, Any]:
        start = list(before)
        for (first, stop), value in zip(ranges, values, strict=True):
            start[first:stop] = jax.tree.leaves(value)
        with state.swapped(start):
            result = loss_fn()
            after = state.read()
        loss, aux = result if has_aux else (result, None)
        changed.update(i for i, leaf in enumerate(after) if leaf is not start[i])
        return loss, (aux, {i: after[i] for i in changed})

    changed: set[int] = set()
    values = [_join(before[first:stop]) for first, stop in ranges]
    (loss, (aux, new)), gradients = jax.value_and_grad(pure, has_aux=True)(values)
    state.write([new.get(i, leaf) for i, leaf in enumerate(before)], set(new))
    return ((loss, aux) if has_aux else loss), gradients


def _find(state: State, variable: Any) -> tuple[int, int]:
    """Returns which arrays of the state belong to a variable.

    Raises:
        CapturedStateError: If none do.
    """
    for slot, first, stop in state.ranges:
        if slot.key == id(variable):
            return first, stop
    name = getattr(variable, "path", type(variable).__name__)
    raise CapturedStateError(
        f"`variables` of `value_and_grad` holds a variable (`{name}`) that the step "
        "does not reach, so there is nothing to differentiate by. Assign what holds it "
        "to the trainer (`self.model = model` in `__init__`)."
    )


def _join(leaves: Sequence[Any]) -> Any:
    # Nearly every variable is one array.
    return leaves[0] if len(leaves) == 1 else list(leaves)
