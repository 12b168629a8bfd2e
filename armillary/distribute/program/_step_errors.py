"""Adds notes to errors of a user's step that JAX, Flax and Optax cannot write.

A note gives the shapes of the batch that the step was traced with, or the difference
between a model and an optimizer that was made for another one.
"""

import types
from collections.abc import Iterator

import jax

from armillary.distribute.replica._context import get_strategy
from armillary.distribute.replica._values import AXIS_NAME
from armillary.state._slots import describe
from armillary.typing import PyTree

_MOST_ARRAYS = 20


def add_step_notes(
    error: Exception, step_name: str, owner: str, arguments: tuple[PyTree, ...]
) -> None:
    """Adds notes to what a step raised, if there is something to say."""
    notes = (
        _axis_note(error),
        _optimizer_note(error),
        _batch_note(step_name, owner, arguments),
    )
    for note in filter(None, notes):
        error.add_note(note)


def _axis_note(error: Exception) -> str | None:
    if "unbound axis name" not in str(error):
        return None
    return (
        f"The axis of replicas is called {AXIS_NAME!r}, and is there inside "
        "`strategy.run`, under every strategy: put the code into a function, and call "
        "it with `strategy.run(replica_fn, args=(batch,))`."
    )


def _batch_note(
    step_name: str, owner: str, arguments: tuple[PyTree, ...]
) -> str | None:
    """Returns what a step of a trainer or evaluator was traced with."""
    if owner == "the function" or not arguments:
        return None
    is_stacked = get_strategy().layout.stacked
    shown = []
    for dataset, batches in enumerate(arguments):
        for path, leaf in jax.tree_util.tree_leaves_with_path(batches[0]):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if len(arguments) > 1:
                name = f"{dataset}/{name}" if name else str(dataset)
            shape = leaf.shape[1:] if is_stacked else leaf.shape
            array = describe(jax.ShapeDtypeStruct(shape, leaf.dtype))
            shown.append(f"{name}: {array}" if name else array)
    if len(shown) > _MOST_ARRAYS:
        shown[_MOST_ARRAYS:] = [f"and {len(shown) - _MOST_ARRAYS} more"]
    where = " on each replica" if is_stacked else ""
    return f"The batch that `{step_name}` was traced with{where}: {', '.join(shown)}."


def _optimizer_note(error: Exception) -> str | None:
    """Returns what does not fit, if an optimizer was made for another model."""
    for frame in _frames(error):
        optimizer = frame.f_locals.get("self")
        state = getattr(optimizer, "opt_state", None)
        if frame.f_code.co_name != "update" or state is None:
            continue
        held = _shapes(state)
        changes = [
            f"  {path[1:].removesuffix('/value')}: shape {there} in the optimizer, "
            f"{shape} in the gradient"
            for path, shape in _shapes(frame.f_locals.get("grads")).items()
            for there in sorted({s for p, s in held.items() if p.endswith(path)})
            if there != shape
        ]
        if changes:
            return (
                "The optimizer was made for another model than the one it was to "
                "update:\n" + "\n".join(changes[:_MOST_ARRAYS]) + "\nMake it of the "
                "model that is trained: `nnx.Optimizer(model, transform, "
                "wrt=nnx.Param)`."
            )
    return None


def _frames(error: Exception) -> Iterator[types.FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {
        "/" + jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(leaf, "shape")
    }
