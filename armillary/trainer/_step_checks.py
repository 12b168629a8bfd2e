"""What is checked of a step when it is traced.

Its batches must have the shapes that it was traced for. An evaluation leaves the model
as it is, and training that advances an optimizer changes what is trained.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax

from armillary._checks import counted, list_lines
from armillary._logging import logger
from armillary.errors import RetraceError, StateStructureError
from armillary.state._keras import KerasSlot
from armillary.state._lift import State
from armillary.state._nnx import NnxSlot
from armillary.state._slots import Role, Slot, describe
from armillary.trainer._runner import StepMethod
from armillary.typing import PyTree


def check_shapes(
    method: StepMethod, seen: list[Sequence[PyTree]], batches: Sequence[PyTree]
) -> None:
    """Checks that batches are like the first ones, and adds those of a new shape.

    Whatever the number of examples is; `seen` has the first batches of each shape.
    """
    axis = 1 if method.strategy.layout.stacked else 0
    changes = [_compare(first, batches, axis) for first in seen]
    if not all(changes):
        return
    most = method.options.max_shapes
    is_shape_only = not seen or _kind(seen[0]) == _kind(batches)
    if not seen or (is_shape_only and len(seen) < most):
        seen.append(batches)
        return
    kind = "Evaluator" if method.is_evaluation else "Trainer"
    fix = (
        "Only the number of examples may be smaller at the end of the data. Pad "
        "sequences to a few lengths (buckets), and say how many there are: "
        f"`Standard{kind}Options(max_shapes={2 * most if most > 1 else 8})`."
        if is_shape_only
        else "Give all batches one dtype and one structure, for example with `.astype` "
        "where they are made; `max_shapes` allows other shapes only."
    )
    shown = "\n".join(changes[0])
    raise RetraceError(
        f"Batches changed after `{method.name}` was compiled for "
        f"{counted(len(seen), 'shape')} of them:\n{shown}\n{fix}"
    )


def _kind(batches: Sequence[PyTree]) -> Any:
    leaves, structure = jax.tree.flatten(list(batches))
    return structure, [(len(leaf.shape), str(leaf.dtype)) for leaf in leaves]


def _compare(first: PyTree, batches: PyTree, axis: int) -> list[str]:
    """Returns what differs in more than the number of examples."""
    first, batches = list(first), list(batches)
    old, new = jax.tree.structure(first), jax.tree.structure(batches)
    if old != new:
        return [f"  structure {old} became {new}"]
    changes = []
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(first),
        jax.tree.leaves(batches),
        strict=True,
    )
    for (path, was), leaf in pairs:
        if (was.dtype, *was.shape[axis + 1 :]) != (leaf.dtype, *leaf.shape[axis + 1 :]):
            name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
            now = describe(leaf)
            changes.append(f"  {name or 'the batch'}: {describe(was)} became {now}")
    return changes


def check_evaluation(name: str, state: State, changed: Sequence[int]) -> None:
    """Checks what a step changes that is to leave a model as it is."""
    owners = {i: state.owners[i] for i in changed}
    learned = [
        i
        for i, slot in owners.items()
        if slot.role is Role.BATCH_STATISTIC or _is_parameter(slot)
    ]
    if learned:
        raise StateStructureError(
            f"`{name}` changes {counted(len(learned), 'array')} of a model, which an "
            f"evaluation leaves as it is:\n{_list(state, learned)}\n"
            "Evaluate a view of it, which shares its variables (`self.model = "
            "nnx.view(model, use_running_average=True)`, with `deterministic=True` if "
            "it has dropout), and call a Keras model with `training=False`."
        )
    nnx = sys.modules.get("flax.nnx")
    dropouts = [n for n in state._nodes if nnx and isinstance(n, nnx.Dropout)]
    counts = {id(dropout.rngs.count) for dropout in dropouts if dropout.rngs}
    if drawn := [i for i, slot in owners.items() if slot.key in counts]:
        logger.warning(
            "`%s` draws random numbers for dropout, so that its results are those of a "
            "model in training mode:\n%s\nEvaluate a view of it, which shares its "
            "variables: `self.model = nnx.view(model, deterministic=True)`.",
            name,
            _list(state, drawn),
        )


def check_training(name: str, state: State, changed: Sequence[int]) -> None:
    """Warns of a step that advances an optimizer and changes no parameter."""
    owners = state.owners
    of_optimizer = {
        i
        for i, slot in enumerate(owners)
        if any(slot.is_of_optimizer()) or _is_nnx(slot, "OptState")
    }
    trained = [i for i, slot in enumerate(owners) if _is_parameter(slot)]
    others = {i for i in changed if owners[i].role is Role.PLAIN} - of_optimizer
    if not trained or others or of_optimizer.isdisjoint(changed):
        return
    logger.warning(
        "`%s` advances an optimizer, but changes none of the %d arrays of parameters "
        "that it reaches, so nothing is trained:\n%s\nPass the model itself to "
        "`optimizer.update(model, gradients)`, not a copy (`nnx.clone`, `nnx.merge`), "
        "and assign that model to the trainer.",
        name,
        len(trained),
        _list(state, trained),
    )


def _is_parameter(slot: Slot) -> bool:
    if isinstance(slot, KerasSlot):
        return slot.variable.trainable
    return _is_nnx(slot, "Param")


def _is_nnx(slot: Slot, kind: str) -> bool:
    """Returns whether a slot is a variable of a kind of Flax, which may be unloaded."""
    if not isinstance(slot, NnxSlot):
        return False
    return isinstance(slot.variable, getattr(sys.modules["flax.nnx"], kind))


def _list(state: State, indices: Sequence[int]) -> str:
    return list_lines((state.paths[i] for i in indices), most=10)
