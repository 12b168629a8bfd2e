"""Adds notes to errors of a user's step that JAX and Flax cannot write.

A note gives the shapes of the batch that the step was traced with, or says what to do
where Python needs the value of an array: `if loss > 0:`, `float(loss)`. JAX names the
function that it traces, which is the library's; the note names the user's.
"""

import jax

from armillary._jaxpr import is_in_trace
from armillary.distribute.replica._context import get_strategy
from armillary.distribute.replica._values import AXIS_NAME
from armillary.errors import ArmillaryError
from armillary.state._slots import describe
from armillary.typing import PyTree

INSTEAD_OF_JIT = (
    "Decorate the function that calls `strategy.run` with `@armillary.function` in "
    "place of `jax.jit`; inside the function that `strategy.run` gets, `nnx.jit` and "
    "the others work."
)
_VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_READING = {
    "the trainer": "hold it in an array of the trainer, made in the constructor, and "
    "return that from `train_loop_end`. On one device, "
    "`StandardTrainerOptions(compile_step=False)` runs the step line by line.",
    "the evaluator": "return it from `eval_step`, for `eval_reduce`. On one device, "
    "`StandardEvaluatorOptions(compile_step=False)` runs the step line by line.",
    "the function": "return it, and read it after the call.",
}
_MOST_ARRAYS = 20


def add_part_note(error: RuntimeError) -> None:
    """Adds a note to an error, if it is for an array of which a part is elsewhere."""
    if "spans non-addressable" in str(error):
        error.add_note(
            "Each process has a part of this array. `strategy.gather(array, axis=0)`, "
            "called in all of them, gives it whole to each."
        )


def add_trace_note(error: Exception) -> None:
    """Adds a note to Flax's error for variables from outside of a transformation."""
    if is_in_trace() and "different trace level" in str(error):
        error.add_note(INSTEAD_OF_JIT)


def add_notes(
    error: Exception, step_name: str, owner: str, arguments: tuple[PyTree, ...]
) -> None:
    """Adds notes to what a step raised, if there is something to say."""
    if isinstance(error, ArmillaryError):
        return
    if isinstance(error, _VALUE_ERRORS):
        error.add_note(
            f"`{step_name}` uses the value of an array in Python, but in a compiled "
            "step, and on several replicas, an array has no value for Python. To "
            "choose by it, use `jnp.where` or `jax.lax.cond`; to print it, use "
            f"`jax.debug.print`; to read it, {_READING[owner]}"
        )
        return
    if "unbound axis name" in str(error):
        error.add_note(
            f"The axis of replicas is called {AXIS_NAME!r}, and is there inside "
            "`strategy.run`, under every strategy: put the code into a function, and "
            "call it with `strategy.run(replica_fn, args=(batch,))`."
        )
    if arguments and owner != "the function":
        error.add_note(_batch_note(step_name, arguments))


def _batch_note(step_name: str, arguments: tuple[PyTree, ...]) -> str:
    """Returns what a step of a trainer or evaluator was traced with."""
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
