"""Looks at what a traced step writes: whether that is what such a step is for.

An evaluation leaves the model as it is. Training that advances an optimizer changes
what is trained.
"""

from collections.abc import Sequence

from armillary._checks import counted, list_lines
from armillary._logging import logger
from armillary.errors import StateStructureError
from armillary.state._keras import KerasSlot
from armillary.state._lift import State
from armillary.state._nnx import NnxSlot
from armillary.state._slots import Role, Slot


def check_writes(name: str, state: State, changed: Sequence[int]) -> None:
    """Checks which arrays a step changes, and warns of what is not meant."""
    check = check_evaluation if name.startswith("eval") else _check_training
    check(name, state, changed)


def check_evaluation(name: str, state: State, changed: Sequence[int]) -> None:
    """Checks what a step changes that is to leave a model as it is."""
    learned = [i for i in changed if _is_learned(state.owners[i])]
    if learned:
        raise StateStructureError(
            f"`{name}` changes {counted(len(learned), 'array')} of a model, which an "
            f"evaluation leaves as it is:\n{_list(state, learned)}\n"
            "A model in training mode does that. Evaluate a view of it, which shares "
            "its variables: `self.model = nnx.view(model, use_running_average=True)`, "
            "with `deterministic=True` if it has dropout. Call a Keras model with "
            "`training=False`. To change a model on purpose, use a `StandardTrainer`."
        )
    drawn = [i for i in changed if state.owners[i].key in _dropout_counts(state)]
    if drawn:
        logger.warning(
            "`%s` draws random numbers for dropout, so that its results are those of a "
            "model in training mode:\n%s\nEvaluate a view of it, which shares its "
            "variables: `self.model = nnx.view(model, deterministic=True)`.",
            name,
            _list(state, drawn),
        )


def _check_training(name: str, state: State, changed: Sequence[int]) -> None:
    of_optimizer = {i for i, slot in enumerate(state.owners) if _is_of_optimizer(slot)}
    trained = {i for i, slot in enumerate(state.owners) if _is_parameter(slot)}
    others = {i for i in changed if state.owners[i].role is Role.PLAIN} - of_optimizer
    if not trained or others or of_optimizer.isdisjoint(changed):
        return
    logger.warning(
        "`%s` advances an optimizer, but changes none of the %d arrays of parameters "
        "that it reaches, so nothing is trained:\n%s\nPass the model itself, before "
        "the gradients (`optimizer.update(model, gradients)`), not a copy "
        "(`nnx.clone`, `nnx.merge`), and assign that model to the trainer.",
        name,
        len(trained),
        _list(state, sorted(trained)),
    )


def _is_learned(slot: Slot) -> bool:
    return slot.role is Role.BATCH_STATISTIC or _is_parameter(slot)


def _is_parameter(slot: Slot) -> bool:
    if isinstance(slot, KerasSlot):
        return slot.variable.trainable
    if not isinstance(slot, NnxSlot):
        return False
    from flax import nnx  # It takes long to import, for nothing without its variables.

    return isinstance(slot.variable, nnx.Param)


def _is_of_optimizer(slot: Slot) -> bool:
    if any(slot.is_of_optimizer()) or not isinstance(slot, NnxSlot):
        return any(slot.is_of_optimizer())
    from flax import nnx

    return isinstance(slot.variable, nnx.OptState)


def _dropout_counts(state: State) -> set[int]:
    """Returns the keys of the slots that count what `nnx.Dropout` draws."""
    if not any(isinstance(slot, NnxSlot) for slot in state.slots):
        return set()
    from flax import nnx

    return {
        id(node.rngs.count)
        for node in state._nodes
        if isinstance(node, nnx.Dropout) and node.rngs is not None
    }


def _list(state: State, indices: Sequence[int]) -> str:
    return list_lines((state.paths[i] for i in indices), most=10)
