"""Notes on errors in a user's step, which JAX and Flax cannot give."""

import types

import jax

from armillary._jaxpr import VALUE_ERRORS
from armillary._owners import Owner, owner_of_file
from armillary.advice._called_arrays import explain_called_array
from armillary.distribute.replica._axis import explain_unbound_axis
from armillary.distribute.replica._context import get_strategy
from armillary.errors import ArmillaryError
from armillary.state._adapters import NodePart, plays
from armillary.state._slots import describe, is_array
from armillary.typing import PyTree

_READING = {
    "the trainer": "return it from `train_loop_end`, or as a metric of a pure step",
    "the evaluator": "return it from `eval_step`, for `eval_reduce`",
    "the function": "return it, and read it after the call",
}
_MAX_ARRAYS = 20
# Parts of error messages, and the note to add.
_MISTAKES = {
    "StepIterator": "The step gets an iterator, and takes each batch from it: "
    "`batch = next(iterator)`, or `x, y = next(iterator)`.",
    "PerReplica": "Outside `strategy.run`, a batch holds a `PerReplica`: a value for "
    "each replica. Put the code into a function, and call it with "
    "`strategy.run(replica_fn, args=(batch,))`.",
    # JAX's error for a loss that is not one number.
    "scalar-output functions. Output had shape": "A gradient needs one number, but the "
    "loss is an array, such as one number for each example. Return `loss.mean()` and "
    'write `armillary.all_reduce("mean", gradients)`, or return '
    "`armillary.compute_average_loss(loss)` and write "
    '`armillary.all_reduce("sum", gradients)`.',
    "scalar-output functions. Output was None": "The function of the loss returns "
    "nothing. End it with `return loss`.",
    "scalar-output functions. Output was (": "To return other values next to the loss, "
    "write `nnx.value_and_grad(loss_fn, has_aux=True)`: the function returns "
    "`loss, others`.",
    "should match the mesh passed to shard_map": "In a step, the mesh of the strategy "
    "is set. Make the strategy over your mesh, `armillary.ShardedStrategy(mesh)`, or "
    "leave `mesh=` out if it has the same axes. For another mesh, write `with "
    "jax.sharding.use_abstract_mesh(mesh.abstract_mesh):` around the call.",
    "should match the aval mesh": "An array that the step captures is on a mesh with "
    "axes of the type `Explicit`. In a step under a strategy, axes are `Auto`. Pass "
    "the array as an argument of `run`, or put it on the mesh of the strategy: "
    "`jax.device_put(x, NamedSharding(strategy.mesh, x.sharding.spec))`.",
    "can only refer to Auto axes": "In a step under a strategy, axes are `Auto`. Write "
    "the `PartitionSpec` alone, or `NamedSharding(strategy.mesh, spec)`.",
    "context mesh cannot be empty": "This strategy has no mesh with axes of yours. Use "
    'a strategy that has them, such as `armillary.ShardedStrategy({"context": 8})`. A '
    "step that also runs elsewhere can look at "
    "`jax.sharding.get_abstract_mesh().axis_names`.",
    "different trace level": "Flax transforms the arguments of a function, but not the "
    "variables that it captures. Pass the model, as in "
    "`nnx.jit(fn)(self.model, batch)`.",
}

# Functions of libraries that raise for wrong arguments, and the note to add.
_ARGUMENTS = {
    "softmax_cross_entropy_with_integer_labels": "The labels of `optax."
    "softmax_cross_entropy_with_integer_labels` are the numbers of classes, in an "
    "array with one axis less than the logits: write `labels.astype(jnp.int32)`, and "
    "`labels[:, 0]` if there is an axis of length 1. For one-hot labels, write "
    "`optax.softmax_cross_entropy(logits, labels)`.",
}


def add_notes(
    error: Exception,
    step_name: str,
    owner: str,
    arguments: tuple[PyTree, ...],
) -> None:
    """Adds notes to an error in a step, unless Armillary raised it.

    Args:
        error: The error.
        step_name: The name of the step.
        owner: The owner of the step, such as "the trainer".
        arguments: For each dataset, the batches that the step was traced with.
    """
    if isinstance(error, ArmillaryError):
        return
    if isinstance(error, VALUE_ERRORS):
        error.add_note(_explain_value(step_name, owner))
        return
    unbound = explain_unbound_axis(error, get_strategy())
    if unbound:
        # `strategy.run` may already have added this note, for its own strategy.
        if not getattr(error, "__notes__", ()):
            error.add_note(unbound)
        return
    note = _explain_mistake(error) or _explain_call(error)
    if note is not None:
        error.add_note(note)
        return
    if arguments and owner != "the function":
        error.add_note(_describe_batch(step_name, arguments))
        layer = _describe_layer(error)
        if layer is not None:
            error.add_note(layer)


def _explain_value(step_name: str, owner: str) -> str:
    return (
        f"`{step_name}` uses the value of an array in Python, but in a compiled "
        "step, and on several replicas, an array has no value for Python. To "
        "choose by it, use `jnp.where` or `jax.lax.cond`. To print it, use "
        f"`jax.debug.print`. To read it, {_READING[owner]}. On one device, a "
        "trainer with `compile_step=False` in its options runs line by line."
    )


def _explain_mistake(error: Exception) -> str | None:
    """Returns a note on a known mistake, by the words of its error, or `None`."""
    text = str(error)
    for words, note in _MISTAKES.items():
        if words in text:
            return note
    return None


def _describe_batch(step_name: str, arguments: tuple[PyTree, ...]) -> str:
    """Returns a note with the shapes of the batch that a step was traced with."""
    is_stacked = get_strategy().layout.stacked
    first = [batches[0] for batches in arguments]
    tree = first if len(first) > 1 else first[0]
    shown: list[str] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = leaf.shape[1:] if is_stacked else leaf.shape
        array = describe(jax.ShapeDtypeStruct(shape, leaf.dtype))
        shown.append(f"{name}: {array}" if name else array)
    if len(shown) > _MAX_ARRAYS:
        shown[_MAX_ARRAYS:] = [f"and {len(shown) - _MAX_ARRAYS} more"]
    where = " on each replica" if is_stacked else ""
    return f"The batch that `{step_name}` was traced with{where}: {', '.join(shown)}."


def _entries_of(error: Exception) -> list[types.TracebackType]:
    """Returns the entries of an error's traceback, the last one first."""
    entries: list[types.TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.insert(0, entry)
        entry = entry.tb_next
    return entries


def _explain_call(error: Exception) -> str | None:
    """Returns a note on a wrong call of a library in the user's code, or `None`."""
    # Older releases of Optax use assertions of Chex.
    if not isinstance(error, AssertionError | TypeError | ValueError):
        return None
    if isinstance(error, TypeError):
        called = explain_called_array(error)
        if called is not None:
            return called
    for entry in _entries_of(error):
        code = entry.tb_frame.f_code
        if owner_of_file(code.co_filename) is Owner.USER:
            return None
        if code.co_name in _ARGUMENTS:
            return _ARGUMENTS[code.co_name]
    return None


def _describe_layer(error: Exception) -> str | None:
    """Names the layer that an error came from, by its plain attributes."""
    for entry in _entries_of(error):
        names = entry.tb_frame.f_locals
        layer = names.get("self")
        if not plays(layer, NodePart.LAYER):
            continue
        sizes: list[str] = []
        for name, value in vars(layer).items():
            if type(value) is int and not name.startswith("_"):
                sizes.append(f"{name}={value}")
        # The first argument of a method comes after `self`.
        arguments = entry.tb_frame.f_code.co_varnames[1:2]
        arrays = [names[name] for name in arguments if is_array(names.get(name))]
        got = f", which got {describe(arrays[0])}" if arrays else ""
        return f"It comes from `{type(layer).__name__}({', '.join(sizes)})`{got}."
    return None
