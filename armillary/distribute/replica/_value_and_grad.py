"""Gradients with respect to variables: what a tape is in TensorFlow, in one call.

A loss is a function of the variables that it reads. They are swapped for the values
that JAX differentiates by; what the loss writes to any other variable comes out as a
result, and is written when the derivative is done.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from armillary._checks import check_callable, check_one_of, check_positive_int
from armillary._traceback import hides_frames
from armillary.distribute.replica._accumulate import (
    Part,
    accumulate,
    split_aux,
    wanted_count,
)
from armillary.distribute.replica._context import lifted_state
from armillary.errors import CapturedStateError
from armillary.state._keras import is_variable as is_keras_variable
from armillary.state._lift import State, strong
from armillary.state._nnx import is_node
from armillary.state._nnx import is_variable as is_nnx_variable
from armillary.typing import PyTree


@hides_frames
def value_and_grad(
    loss_fn: Callable[..., Any],
    variables: Any,
    *,
    batch: PyTree = None,
    accumulate_steps: int | None = None,
    op: str | None = None,
    has_aux: bool = False,
) -> tuple[Any, Any]:
    """Returns a loss, and its gradients with respect to variables.

    In place of `tf.GradientTape`, for variables of Keras and of Flax NNX::

        def loss_fn():
            predictions = model(images, training=True)
            return jnp.mean(loss_object(labels, predictions))

        loss, gradients = armillary.value_and_grad(loss_fn, model.trainable_variables)
        gradients = armillary.all_reduce("mean", gradients)
        optimizer.apply(gradients, model.trainable_variables)

    Inside `strategy.run` they are this replica's, as those of `jax.grad` are. What
    `loss_fn` writes to variables (batch statistics, metrics, random state) stays
    written.

    With `batch`, gradients can be accumulated: the loss of one part of the batch after
    the other is computed and differentiated, which needs the memory of one part. The
    result is that of this replica's whole share::

        def loss_fn(batch):
            return jnp.mean(cross_entropy(model(batch["image"]), batch["label"]))

        loss, gradients = armillary.value_and_grad(
            loss_fn, model, batch=batch, op="mean"
        )
        optimizer.update(model, armillary.all_reduce("mean", gradients))

    That holds for a mean or a sum over examples, with any penalties for a mean. It does
    not for a loss that is not linear in its examples: the root of a mean of squares, a
    contrastive loss between examples, a ratio of sums such as Dice. The mean of the
    losses of the parts is another loss there. (`weighted_mean` is refused.) Batch
    statistics, metrics and random state that `loss_fn` writes are written once for each
    part, in order.

    Args:
        loss_fn: Computes the loss, a scalar, from what the variables hold; it is called
            with (a part of) `batch`, if there is one.
        variables: The variables to differentiate by: a list of them, or an NNX module
            for its parameters (`nnx.Param`).
        batch: The share of a replica, as the function given to `strategy.run` gets it:
            arrays whose first axis is that of examples.
        accumulate_steps: Parts to take `batch` in; a divisor of the examples of a
            replica. By default that of the trainer's `StandardTrainerOptions`, or 1.
        op: How the loss is made of those of the parts: `"mean"` or `"sum"`. It may be
            left out if `compute_average_loss` makes the loss, or for one part.
        has_aux: Whether `loss_fn` returns a pair of the loss and something else, as in
            `jax.value_and_grad`. Of several parts, values of each example are joined.

    Returns:
        What `loss_fn` returned, and one gradient for each variable, in their order; for
        a module what `nnx.value_and_grad` returns for it.

    Raises:
        TypeError: If `loss_fn` cannot be called, or one of `variables` is not a
            variable.
        ValueError: If `batch` is missing or has no such parts, `op` is none of the two
            or does not fit, or something that `loss_fn` does cannot be accumulated.
        CapturedStateError: If the trainer does not reach one of them.
    """
    check_callable("loss_fn", loss_fn)
    check_one_of("has_aux", has_aux, (True, False))
    fix = "Say which of examples the loss is, or leave it out."
    check_one_of("op", op, (None, "mean", "sum"), fix)
    count = _count_parts(batch, accumulate_steps)
    wanted, treedef = _variables_of(variables)
    state = lifted_state() or State([(loss_fn, ""), (wanted, "variables")])
    ranges = [_find(state, variable) for variable in wanted]
    before = state.read()

    def compute(
        values: Sequence[Any], slots: dict[int, Any], part: PyTree
    ) -> tuple[Any, Any]:
        start = [slots.get(i, leaf) for i, leaf in enumerate(before)]
        for (first, stop), value in zip(ranges, values, strict=True):
            start[first:stop] = jax.tree.leaves(value)
        with state.swapped(start):
            result = loss_fn() if batch is None else loss_fn(part)
            after = state.read()
        loss, aux = split_aux(result, has_aux)
        new = {i: leaf for i, leaf in enumerate(after) if leaf is not start[i]}
        # What an earlier part has changed stays, if this one does not.
        return loss, (aux, {i: strong(leaf) for i, leaf in {**slots, **new}.items()})

    def differentiate(
        values: Sequence[Any], slots: dict[int, Any], part: PyTree
    ) -> Part:
        compute_both = jax.value_and_grad(compute, has_aux=True)
        (loss, (aux, new)), gradients = compute_both(values, slots, part)
        return Part(loss, aux, new, gradients)

    values = [_join(before[first:stop]) for first, stop in ranges]
    if count == 1:
        found = differentiate(values, {}, batch)
    else:
        found = accumulate(differentiate, values, before, batch, count, op)
    new = found.slots
    state.write([new.get(i, leaf) for i, leaf in enumerate(before)], set(new))
    gradients = found.gradients
    if treedef is not None:
        pairs = zip(wanted, gradients, strict=True)
        gradients = treedef.unflatten(
            variable.replace(gradient) for variable, gradient in pairs
        )
    return ((found.loss, found.outputs) if has_aux else found.loss), gradients


def _count_parts(batch: PyTree, accumulate_steps: int | None) -> int:
    """Returns in how many parts to take the batch.

    Raises:
        ValueError: If there is none to take in parts.
    """
    wanted = wanted_count(is_used=batch is not None)
    count = wanted if accumulate_steps is None else accumulate_steps
    check_positive_int("accumulate_steps", count)
    if batch is None and accumulate_steps not in (None, 1):
        raise ValueError(
            f"`accumulate_steps` is {accumulate_steps}, but `value_and_grad` was given "
            "no `batch` to take in parts. Let the loss take it: `value_and_grad("
            "loss_fn, variables, batch=batch, ...)`."
        )
    return 1 if batch is None else count


def _variables_of(variables: Any) -> tuple[list[Any], Any]:
    """Returns a list of variables, and the structure of gradients for a module.

    Raises:
        TypeError: If one is not a variable.
    """
    if is_node(variables):
        from flax import nnx

        state = nnx.state(variables, nnx.Param)
        return jax.tree.flatten(state, is_leaf=is_nnx_variable)
    # What cannot be gone through is one that is none.
    wanted = list(variables) if np.iterable(variables) else [variables]
    for variable in wanted:
        if not (is_keras_variable(variable) or is_nnx_variable(variable)):
            raise TypeError(
                f"`variables` holds {variable!r:.60} of type "
                f"{type(variable).__name__}, but it must be a list of variables of "
                "Keras or Flax NNX. Use `model.trainable_variables`, or "
                "`jax.value_and_grad` for arrays."
            )
    return wanted, None


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
