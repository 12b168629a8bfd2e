"""Looks at what a traced step writes: whether that is what such a step is for.

An evaluation leaves the model as it is. Training that advances an optimizer changes
what is trained.

Which step a loop runs: whose it is, and under which strategy.

The types of the batches that a step is traced for, and which of them may change.

Records which attributes of a trainer a step looks at while it is traced.

A trainer counts epochs, keeps paths and names. A value that no step reads may change
between loops without a thought; one that a step has read is part of the compiled
program.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from armillary._checks import counted, list_lines
from armillary._logging import logger
from armillary.data._layout import Active
from armillary.data.sources._batch import describe_shapes
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._gradient import accumulating
from armillary.errors import RetraceError, StateStructureError
from armillary.state._keras import KerasSlot
from armillary.state._lift import State
from armillary.state._nnx import NnxSlot
from armillary.state._slots import Role, Slot, describe
from armillary.typing import PyTree


class StepMethod(NamedTuple):
    """A step of the user's.

    Attributes:
        owner: The trainer or evaluator, from which state is reached.
        fn: The step, a function of a nest of iterators.
        name: How messages call it.
        strategy: The strategy in effect while it runs.
    """

    owner: Any
    fn: Callable[[Any], PyTree]
    name: str
    strategy: Strategy
    accumulate_steps: int = 1

    def __call__(self, iterators: Any) -> PyTree:
        """Runs the step."""
        with accumulating(self.accumulate_steps, self.name):
            return self.fn(iterators)

    @property
    def owner_name(self) -> str:
        """What messages call the owner."""
        return "the evaluator" if self.name.startswith("eval") else "the trainer"


def key_of(batches: Sequence[PyTree], active: tuple[Active, ...]) -> Any:
    """Returns a key that is equal for batches which one trace serves."""
    leaves, treedef = jax.tree.flatten(list(batches))
    return treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves), active


class BatchShapes:
    """The shapes of batches that one step has met, whatever the number of examples."""

    def __init__(self, method: StepMethod, most: int) -> None:
        self._method, self._most = method, most
        self._axis = 1 if method.strategy.layout.stacked else 0
        # The first batches of each shape.
        self._seen: list[Sequence[PyTree]] = []

    def check(self, batches: Sequence[PyTree]) -> None:
        """Checks that batches are like the first ones, and counts a new shape."""
        changes = [self._compare(seen, batches) for seen in self._seen]
        if not all(changes):
            return
        if changes and (len(changes) == self._most or not self._is_shape_only(batches)):
            raise RetraceError(self._explain(changes[0], batches))
        self._seen.append(batches)

    def _explain(self, changes: list[str], batches: Sequence[PyTree]) -> str:
        name, most = self._method.name, self._most
        if most > 1 and self._is_shape_only(batches):
            shown = "\n".join(f"  {_show(seen)}" for seen in self._seen)
            return (
                f"`{name}` has been compiled for {most} shapes of batches, which is "
                f"`max_shapes`, and now there is another one:\n{shown}\n"
                f"  new: {_show(batches)}\n"
                "Each shape is a program of its own. Pad sequences to a few lengths "
                "(buckets), or allow more with `max_shapes`."
            )
        shown = "\n".join(changes)
        if not self._is_shape_only(batches):
            return (
                f"Batches changed after `{name}` was compiled, in more than their "
                f"shape:\n{shown}\n"
                "Give all batches one dtype and one structure, for example with "
                "`.astype` where they are made; `max_shapes` allows other shapes only."
            )
        return (
            f"Batches changed after `{name}` was compiled, and it would be compiled "
            f"again for each new shape:\n{shown}\n"
            "Only the number of examples may be smaller at the end of the data. Give "
            "all batches one shape and dtype, for example by padding sequences to a "
            "fixed length. For sequences padded to a few lengths (buckets), say how "
            f"many there are: `{_options_name(name)}(max_shapes=8)`."
        )

    def _is_shape_only(self, batches: Sequence[PyTree]) -> bool:
        return _kind(self._seen[0]) == _kind(batches)

    def _compare(self, first: Sequence[PyTree], batches: Sequence[PyTree]) -> list[str]:
        """Returns what differs in more than the number of examples."""
        pairs = zip(first, batches, strict=True)
        return [line for old, new in pairs for line in _compare(old, new, self._axis)]


def _options_name(step_name: str) -> str:
    kind = "Evaluator" if step_name.startswith("eval") else "Trainer"
    return f"Standard{kind}Options"


def _show(batches: Sequence[PyTree]) -> str:
    return "; ".join(describe_shapes(batch) for batch in batches)


def _kind(batches: Sequence[PyTree]) -> Any:
    leaves, structure = jax.tree.flatten(list(batches))
    return structure, [(len(leaf.shape), str(leaf.dtype)) for leaf in leaves]


def _compare(first: PyTree, batch: PyTree, axis: int) -> list[str]:
    old, new = jax.tree.structure(first), jax.tree.structure(batch)
    if old != new:
        return [f"  structure {old} became {new}"]
    changes = []
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(batch), strict=True
    )
    for (path, old_leaf), leaf in pairs:
        if _without(old_leaf, axis) != _without(leaf, axis):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            was, became = describe(old_leaf), describe(leaf)
            changes.append(f"  {name or 'the batch'}: {was} became {became}")
    return changes


def _without(leaf: Any, axis: int) -> tuple[Any, ...]:
    return (*leaf.shape[axis + 1 :], str(leaf.dtype))


_recorders: dict[int, Callable[[str], None]] = {}


class RecordsReads:
    """An object that tells which of its attributes are looked at, if someone asks."""

    if not TYPE_CHECKING:  # as a type checker would take every attribute to exist

        def __getattribute__(self, name: str) -> Any:
            if _recorders and (record := _recorders.get(id(self))) is not None:
                record(name)
            return super().__getattribute__(name)


@contextlib.contextmanager
def recorded_reads(owner: Any, record: Callable[[str], None]) -> Iterator[None]:
    """Calls `record` with the name of each attribute that is read from `owner`.

    An owner that does not tell counts as one of which everything is read.
    """
    if not isinstance(owner, RecordsReads):
        record("__dict__")
    _recorders[id(owner)] = record
    try:
        yield
    finally:
        del _recorders[id(owner)]


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
