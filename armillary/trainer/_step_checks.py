"""Checks a traced step: does it train, or only evaluate, the model that it reaches?"""

from collections.abc import Sequence

import jax.numpy as jnp

from armillary._checks import counted, list_lines
from armillary._logging import logger
from armillary._owners import Owner, owner_of_class
from armillary.advice._foreign_names import NAMES
from armillary.errors import StateStructureError
from armillary.state._adapters import (
    NodePart,
    counts_updates,
    node_adapter,
    plays,
)
from armillary.state._lift import State, as_array
from armillary.state._slots import Role
from armillary.trainer._options import LoopOptions

_RATES = {"learning_rate", "lr"}


def check_evaluation(name: str, state: State, changed: Sequence[int]) -> None:
    """Raises if an evaluation step changes a model; warns if it uses dropout."""
    learned: list[int] = []
    for index in changed:
        slot = state.owners[index]
        if slot.role is Role.BATCH_STATISTIC or slot.is_parameter():
            learned.append(index)
    if learned:
        raise StateStructureError(
            f"`{name}` changes {counted(len(learned), 'array')} of a model, but an "
            f"evaluation must not change a model:\n{_list(state, learned)}\n"
            "Evaluate a view of it, which shares its variables (`self.model = "
            "nnx.view(model, use_running_average=True)`, with `deterministic=True` if "
            "it has dropout), and call a Keras model with `training=False`."
        )

    counts = _find_dropout_counts(state)
    drawn = [index for index in changed if state.owners[index].key in counts]
    if drawn:
        logger.warning(
            "`%s` draws random numbers for dropout, so it evaluates the model in "
            "training mode:\n%s\nEvaluate a view of the model, which shares its "
            "variables: `self.model = nnx.view(model, deterministic=True)`.",
            name,
            _list(state, drawn),
        )


def _find_dropout_counts(state: State) -> set[int]:
    """Returns the `id`s of the variables that count the draws of dropout layers."""
    counts: set[int] = set()
    for node in state.nodes:
        adapter = node_adapter(type(node.value))
        if adapter is not None:
            counts.update(map(id, adapter.draw_counts(node.value)))
    return counts


def warn_of_rates(state: State) -> None:
    """Warns if a learning rate was assigned to an optimizer of Flax."""
    for node in state.nodes:
        if not plays(node.value, NodePart.OPTIMIZER):
            continue
        # A class that the user wrote may use such an attribute itself.
        if owner_of_class(type(node.value)) is Owner.USER:
            continue
        for name in sorted(_RATES & vars(node.value).keys()):
            logger.warning(
                "`%s/%s` was assigned, but nothing reads it: the rate of an optimizer "
                "of Flax is in its Optax transformation. %s",
                node.path,
                name,
                NAMES["Optimizer.learning_rate"],
            )


def check_training(name: str, state: State, changed: Sequence[int]) -> None:
    """Warns if a step advances an optimizer, but changes no parameter."""
    leaves = [as_array(leaf) for leaf in state.read()]
    flags = state.of_optimizer

    def is_of_optimizer(index: int) -> bool:
        return flags[index] or counts_updates(state.owners[index].variable)

    def is_float(index: int) -> bool:
        return jnp.issubdtype(leaves[index].dtype, jnp.inexact)

    # Metrics, counters and random state change in a step that trains nothing, too.
    moved = [i for i in changed if state.owners[i].role is Role.PLAIN]
    advanced = [i for i in moved if is_of_optimizer(i)]
    trained = [i for i in moved if is_float(i) and not is_of_optimizer(i)]
    if trained or not advanced:
        return

    # A moment of an optimizer has the shape of its parameter.
    shapes = {leaves[i].shape for i in advanced if is_float(i)}

    def has_moment(index: int) -> bool:
        is_plain = state.owners[index].role is Role.PLAIN and is_float(index)
        return is_plain and leaves[index].shape in shapes

    parameters: list[int] = []
    for index, slot in enumerate(state.owners):
        looks_trained = not is_of_optimizer(index) and has_moment(index)
        if slot.is_parameter() or looks_trained:
            parameters.append(index)
    if not parameters:
        return
    logger.warning(
        "`%s` advances an optimizer, but changes none of the parameters that it "
        "reaches, so nothing is trained:\n%s\nWith Flax, the model comes before the "
        "gradients: `optimizer.update(model, gradients)`. Pass the model itself, not a "
        "copy (`nnx.clone`, `nnx.merge`), and assign that model to the trainer. "
        "With Optax alone, apply the updates, and keep the result: `params = "
        "optax.apply_updates(params, updates)`.",
        name,
        _list(state, parameters),
    )


def _list(state: State, indices: Sequence[int]) -> str:
    return list_lines((state.paths[i] for i in indices), most=10)


def check_precision(name: str, state: State, options: LoopOptions) -> None:
    """Raises if a layer has a dtype of its own, which `precision` cannot change."""
    compute = options.compute_dtype
    assert compute is not None
    lines: list[str] = []
    fixes: list[str] = []
    for node in state.nodes:
        adapter = node_adapter(type(node.value))
        found = adapter and adapter.explain_dtype(node.value, compute)
        if found:
            reason, fix = found
            lines.append(f"{node.path}: {reason}")
            if fix not in fixes:
                fixes.append(fix)
    if lines:
        raise ValueError(
            f"`precision` is {options.precision!r}, but {counted(len(lines), 'layer')} "
            f"that `{name}` reaches have a dtype of their own:\n"
            f"{list_lines(lines, most=5)}\n{' '.join(fixes)}"
        )
