"""Explains JAX's errors for Python code that needs a value which is not there.

In a traced step `if loss > 0:`, `float(loss)` and `numpy.log(loss)` need one. JAX names
the function that it traces, which is the library's; the note names the user's, and what
to do. Outside, an array may be divided between processes.
"""

import jax

VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_COMPILE_STEP = (
    " On one device, `Standard{}Options(compile_step=False)` runs the step line by "
    "line, with values."
)
_READING = {
    "the trainer": "hold it in an array of the trainer, made in the constructor, and "
    "return that from `train_loop_end`." + _COMPILE_STEP.format("Trainer"),
    "the evaluator": "return it from `eval_step`, for `eval_reduce`."
    + _COMPILE_STEP.format("Evaluator"),
    "the function": "return it, and read it after the call.",
}


def add_value_note(error: Exception, step_name: str, owner: str) -> None:
    """Adds a note to an error, if it is one for the value of a traced array."""
    if isinstance(error, VALUE_ERRORS):
        error.add_note(
            f"`{step_name}` uses the value of an array in Python, but in a compiled "
            "step, and on several replicas, an array has no value for Python. To "
            "choose by it, use `jnp.where` or `jax.lax.cond`; to print it, use "
            f"`jax.debug.print`; to read it, {_READING[owner]}"
        )


def add_part_note(error: RuntimeError) -> None:
    """Adds a note to an error, if it is for an array of which a part is elsewhere."""
    if "spans non-addressable" in str(error):
        error.add_note(
            "Each process has a part of this array. `strategy.gather(array, axis=0)`, "
            "called in all of them, gives it whole to each."
        )
