"""What a checkpoint holds: the slots of objects, and the states of others.

An object takes part with the arrays in its slots, with what its `get_state` returns, or
with both. Slots are looked up again at every save and restore, because objects may be
built lazily, and each place counts once, under the name it is reached by first.
"""

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import jax

from armillary.checkpoint._leaf import LeafSpec, describe_leaf
from armillary.errors import CheckpointError
from armillary.state._lift import State, find_slots
from armillary.state._slots import Slot


@dataclasses.dataclass(frozen=True)
class Content:
    """The values of a checkpoint at one moment.

    Attributes:
        leaves: The arrays by path, as the slots hold them.
        states: What each object's `get_state` returned, in the types of JSON.
        stored: The plain arrays to store for the leaves, if they were made already.
    """

    leaves: dict[str, Any]
    states: dict[str, Any]
    stored: dict[str, Any] | None = None

    @property
    def specs(self) -> dict[str, LeafSpec]:
        """The description of each leaf."""
        return {path: describe_leaf(leaf) for path, leaf in self.leaves.items()}


_OF_MANAGER = {
    "save": "save()",
    "write": "save()",
    "restore": "restore(path)",
    "read": "restore_part(path, parts)",
    "sync": "sync()",
}


class Checkpoint:
    """Names the objects that make up a run.

    Each keyword is the first part of the paths of an object's arrays, so the keywords
    and attribute names of a program must stay the same between saving and restoring.
    What may be given:

    - anything that holds JAX arrays in places that can be assigned: Flax NNX modules,
      optimizers, metrics and variables, objects with arrays or pytrees of arrays in
      their attributes, dictionaries and lists of arrays;
    - anything with `get_state()` and `set_state(state)`, whose state can be written as
      JSON, such as a distributed dataset.

    NumPy arrays and Python values in plain attributes are not saved. A place that two
    objects share is saved once. A dictionary is saved as the object it is: if a program
    replaces it (`self.params = new_params`), give the object that refers to it
    (`Checkpoint(trainer=trainer)`).

    Args:
        **objects: The objects by name.

    Raises:
        TypeError: If an object holds neither arrays nor a state.
        ValueError: If there is no object, or two arrays have the same path.
        DatasetStateError: If a data source cannot be repositioned.
    """

    def __init__(self, **objects: Any) -> None:
        if not objects:
            raise ValueError(
                "`Checkpoint()` names no objects, but it must hold at least one. Use "
                "`Checkpoint(model=model, optimizer=optimizer)`."
            )
        self._objects = dict(objects)
        self._states = {
            name: value for name, value in objects.items() if _has_position(value)
        }
        for name, value in objects.items():
            if name not in self._states and not find_slots(value, name):
                raise _no_state_error(name, value)
        for value in self._states.values():
            if _has_method(value, "check_repositionable"):
                value.check_repositionable()
        self.read_leaves()

    def __getattr__(self, name: str) -> NoReturn:
        """Says who does what `tf.train.Checkpoint` does itself.

        Raises:
            AttributeError: Always.
        """
        call, fix = _OF_MANAGER.get(name), ""
        if call is not None:
            fix = (
                " A manager saves and restores: `manager = CheckpointManager("
                f"checkpoint, directory)`, and then `manager.{call}`."
            )
        raise AttributeError(f"`Checkpoint` has no attribute `{name}`.{fix}")

    @property
    def objects(self) -> Mapping[str, Any]:
        """The objects by name."""
        return MappingProxyType(self._objects)

    def read_content(self) -> Content:
        """Returns the values of all objects now, without copying arrays.

        Raises:
            TypeError: If a state cannot be written as JSON.
            CheckpointError: If the memory of an array was given to a program.
        """
        leaves = self.read_leaves()
        donated = [
            path
            for path, leaf in leaves.items()
            if isinstance(leaf, jax.Array) and leaf.is_deleted()
        ]
        if donated:
            paths = "\n".join(f"  {path}" for path in donated[:20])
            raise CheckpointError(
                f"`Checkpoint` holds {len(donated)} arrays whose memory was donated to "
                f"a program or deleted, so there is nothing to save:\n{paths}\n"
                "Assign the results of a step before saving; after a step that failed, "
                "restore a checkpoint (`manager.restore_or_initialize()`)."
            )
        states = {name: _read_state(name, obj) for name, obj in self._states.items()}
        return Content(leaves, states)

    def read_leaves(self) -> dict[str, Any]:
        """Returns what the slots hold now, by path.

        Raises:
            TypeError: If a slot holds a value that is not numeric.
            ValueError: If two places have the same path.
        """
        leaves: dict[str, Any] = {}
        twice: list[str] = []
        for slot in self._find_slots():
            for path, leaf in zip(slot.paths, slot.read(), strict=True):
                if path in leaves:
                    twice.append(path)
                leaves[path] = leaf
        if twice:
            raise ValueError(
                f"`Checkpoint` finds {len(twice)} paths that name two arrays each, but "
                f"a path must name one: {', '.join(sorted(twice))}. Rename a key of "
                "the dictionaries on these paths, such as `1` beside `'1'`."
            )
        _check_numeric(leaves)
        return leaves

    def write_content(self, content: Content) -> None:
        """Puts values into all objects; if one refuses, all get their old values back.

        Arrays come first, so that an object whose state depends on arrays sees the new
        ones in `set_state`.

        Args:
            content: A value for every leaf, and for the states that are to be set.
        """
        before = self.read_leaves()
        undo: list[tuple[Any, Any]] = []
        try:
            self._write_leaves(content.leaves)
            for name, state in content.states.items():
                value = self._states[name]
                undo.append((value, _read_state(name, value)))
                value.set_state(state)
        except BaseException:
            self._write_leaves(before)
            for value, state in reversed(undo):
                value.set_state(state)
            raise

    def _write_leaves(self, leaves: Mapping[str, Any]) -> None:
        for slot in self._find_slots():
            slot.write([leaves[path] for path in slot.paths])

    @property
    def state_names(self) -> list[str]:
        """Names of the objects with `get_state` and `set_state`."""
        return list(self._states)

    def _find_slots(self) -> Sequence[Slot]:
        return State([(value, name) for name, value in self._objects.items()]).slots


def _has_position(value: Any) -> bool:
    return not isinstance(value, type) and all(
        _has_method(value, name) for name in ("get_state", "set_state")
    )


def _has_method(value: Any, name: str) -> bool:
    # `hasattr` would run `__getattr__`, and `nnx.Rngs` answers to every name.
    return inspect.getattr_static(value, name, None) is not None


def _read_state(name: str, value: Any) -> Any:
    state = value.get_state()
    try:
        # The text is a copy too: the object may change its state while it is written.
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` of type {type(value).__name__} has a `get_state` whose result "
            f"cannot be written as JSON ({error}), and a checkpoint needs one that "
            "can. Return dictionaries, lists, strings and Python numbers "
            "(`int(value)`), and keep arrays in attributes."
        ) from error


def _check_numeric(leaves: Mapping[str, Any]) -> None:
    bad: list[str] = []
    for path, leaf in leaves.items():
        try:
            describe_leaf(leaf)
        except TypeError as error:
            bad.append(f"  {path}: {error}")
    if bad:
        lines = "\n".join(bad)
        raise TypeError(
            f"`Checkpoint` holds {len(bad)} values that are not numeric arrays, and "
            f"only those can be saved:\n{lines}\n"
            "Keep such values in plain attributes, outside variables."
        )


def _no_state_error(name: str, value: Any) -> TypeError:
    kind = "class" if isinstance(value, type) else "type"
    shown = value.__name__ if isinstance(value, type) else type(value).__name__
    return TypeError(
        f"`{name}` is of {kind} {shown}, in which there is nothing to save: it must "
        "hold arrays in places that can be assigned (an NNX module, optimizer or "
        "metric, an object with arrays in its attributes, a dictionary or list of "
        "arrays), or have `get_state()` and `set_state(state)`. Hold a bare array or "
        "pytree in an attribute or a dictionary, as in "
        f"`Checkpoint({name}={{'value': value}})`, or leave it out."
    )
