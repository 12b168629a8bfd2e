"""The content of a checkpoint: slots of objects with arrays, and states of others.

Slots are looked up again at every save and restore, because objects may be built
lazily. Each place counts once, under the name by which it is found first.
"""

import dataclasses
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from armillary._checks import list_lines
from armillary._copy_refusal import OfOneProcess
from armillary._traceback import hides_frames
from armillary.checkpoint._content import Content, describe_leaves
from armillary.checkpoint._folder import (
    Saved,
    as_absolute,
    as_checkpoint,
    as_place,
    describe_new,
    find_all,
    number_after,
)
from armillary.checkpoint._left_out import LeftOut
from armillary.checkpoint._packed import Packed, read_state
from armillary.checkpoint._python_state import (
    FunctionAdapter,
    HostArray,
    adapt_loader,
    find_adapter,
)
from armillary.checkpoint._reader import restore
from armillary.checkpoint._selection import (
    Paths,
    RestoreReport,
    Selection,
    as_paths,
)
from armillary.checkpoint._writer import announcing_errors, write_once
from armillary.cluster._join import get_peers
from armillary.cluster._peers import Peers
from armillary.data.sources._source import IS_POSITION, MAY_BE_MISSING
from armillary.errors import CheckpointError
from armillary.state._adapters import node_adapter
from armillary.state._holders import is_frozen
from armillary.state._lift import find_slots
from armillary.state._slots import Role, Slot, Trait, has_trait
from armillary.state._walk import Walk, lasting_slots

_STATE_DICT = ("state_dict", "load_state_dict")


class Checkpoint(OfOneProcess):
    """Names the objects that make up a run.

    Each keyword is the first part of the paths of an object's arrays. So the keywords
    and attribute names of a program must stay the same between saving and restoring.
    Objects can be:

    - anything that holds JAX arrays in places that can be assigned: Flax NNX modules,
      optimizers, metrics and variables, objects with arrays or pytrees of arrays in
      their attributes, dictionaries and lists of arrays;
    - anything with `get_state()` and `set_state(state)`, or `state_dict()` and
      `load_state_dict(state)`: a distributed dataset, a replay buffer, a game. A state
      consists of numbers, strings, bytes, NumPy arrays, and lists, tuples and
      dictionaries of them;
    - a NumPy array, `np.random.Generator` or `random.Random`, and the modules `random`
      and `np.random` for their own generators. Each is restored in place.

    Dictionaries and lists inside a dictionary are restored in place. A tuple cannot
    change, so the dictionary gets a new tuple: read the arrays from the dictionary.

    NumPy arrays and Python values in plain attributes are not saved. A place that two
    objects share is saved once. If a program replaces a dictionary
    (`self.params = new_params`), do not pass the dictionary, which would be saved
    unchanged. Pass the object that refers to it (`Checkpoint(trainer=trainer)`). In a
    job of several processes, the first process saves its states, and all processes
    restore them.

    Arrays that training does not change, such as the frozen base of LoRA, can stay out
    of the checkpoints. A checkpoint then has a digest of each of these arrays. A
    restore compares it with the array of the program, and raises an error if they
    differ. So load such arrays before you make the `Checkpoint`, in every run.

    Args:
        leave_out: The arrays that are not saved: paths (`"trainer/teacher"`), or
            objects and pytrees that hold the arrays (`armillary.lora.base(model)`),
            alone or in a list. A save raises an error if one of them has changed.
        **objects: The objects by name.

    Raises:
        TypeError: If an object holds neither arrays nor a state, or a NumPy array does
            not hold numbers or cannot be written to.
        ValueError: If there is no object, two arrays have the same path, or `leave_out`
            names no arrays of the objects or all of them.
        CheckpointError: If the memory of an array in `leave_out` was donated.
        DatasetStateError: If a data source cannot be repositioned.
    """

    _why_not_copied = "it names the objects of this program"
    _copy_instead = (
        "Make a `Checkpoint` of the other objects, save this one, and read its folder "
        "there (`checkpoint.read(path)`)."
    )

    def __init__(self, *unnamed: Any, leave_out: Any = None, **objects: Any) -> None:
        if unnamed:
            raise TypeError(
                f"`Checkpoint` got a `{type(unnamed[0]).__name__}` without a name, but "
                "a restore finds objects by name. Use `Checkpoint(trainer=trainer)`."
            )
        if not objects:
            raise ValueError(
                "`Checkpoint()` names no objects, but it must hold at least one. Use "
                "`Checkpoint(model=model, optimizer=optimizer)`."
            )
        self.objects = MappingProxyType(objects)
        """The objects by name."""
        self.states: dict[str, Any] = {}
        """Objects with `get_state` and `set_state`, or their adapters, by name."""
        for name, value in objects.items():
            stateful = _find_state(name, value)
            if stateful is not None:
                self.states[name] = stateful
            if not isinstance(stateful, HostArray | FunctionAdapter):
                _check_holds_state(name, value, name in self.states)
        for value in self.states.values():
            if _has_method(value, "check_repositionable"):
                value.check_repositionable()
        leaves = self.read_leaves()
        describe_leaves(leaves)
        self.left_out = LeftOut(leave_out, self.find_slots(), leaves, self.states)
        """The arrays that are not saved."""

    @hides_frames
    def read(
        self,
        path: str | os.PathLike[str],
        *,
        only: Paths | None = None,
        skip: Paths = (),
        may_differ: Paths = (),
    ) -> RestoreReport:
        """Puts values of a saved checkpoint into some or all of the objects.

        For example, a program without an optimizer and training data can read the model
        of a training run. A model with a different head can read its backbone::

            armillary.Checkpoint(model=model).read("runs/digits/checkpoint_1000")
            armillary.Checkpoint(model=model).read(path, only="model/backbone")

        In the restored parts, the checkpoint and the program must hold the same leaves,
        unless `may_differ` names them. A part is named by its path, and includes
        everything below it. If the checkpoint uses a different name, set the path with
        a dictionary: `Checkpoint(model={"backbone": encoder})`. Only the arrays of
        these parts are read. Each array goes to the devices of the program's own array.
        If memory has no room for old and new arrays at once, about an eighth of them is
        replaced at a time, and an error in between deletes those that were replaced.
        The number of devices may differ from the number at the save. In a job of
        several processes, all processes must call this method.

        Args:
            path: The folder of the checkpoint.
            only: The parts to restore; by default all objects of this `Checkpoint`.
            skip: Parts inside `only` that are not restored.
            may_differ: Parts that may not fit. If such a part differs, is missing on
                either side, or is a data position that is refused, the whole part keeps
                the values of the program. If a part is inside another one, its
                differences count only for the inner part. A data position with the path
                of a trainer counts only for itself:
                `may_differ=["trainer", "trainer/state/extra"]`.

        Returns:
            A report of the restored parts, and of the parts that were not restored. It
            is logged as well.

        Raises:
            TypeError: If `path` is not a path.
            ValueError: If another argument is not a path, or one of its paths is empty.
            CheckpointError: If `path` is not a complete checkpoint, cannot be read, or
                is not the same for all processes that train together.
            CheckpointDamageError: If one of its files has changed since the save.
            CheckpointMismatchError: If it does not fit the program, a part is missing,
                or nothing would be restored. In each case, no object is changed.
        """
        if only is None:
            # Not all names, because an object may hold only places of another object.
            found = (*self.read_leaves(), *self.states)
            only = {path.partition("/")[0] for path in found}
        selection = Selection(
            as_paths("only", only),
            as_paths("skip", skip),
            as_paths("may_differ", may_differ),
        )
        folder = as_checkpoint("path", path)
        restored = restore(self, folder.parent, selection, folder)
        assert restored is not None  # or there is an error
        report, _ = restored
        return report

    @hides_frames
    def restore(
        self,
        path: str | os.PathLike[str] | None,
        *,
        only: Paths | None = None,
        skip: Paths = (),
        may_differ: Paths = (),
    ) -> RestoreReport:
        """Puts values of a saved checkpoint into the objects, if there is one.

        It is `read`, except that `None` restores nothing. So one line restores the
        newest checkpoint, or starts from scratch::

            checkpoint.restore(armillary.checkpoint.latest_checkpoint(directory))

        Args:
            path: The folder of the checkpoint, or `None`.
            only: As in `read`.
            skip: As in `read`.
            may_differ: As in `read`.

        Returns:
            A report of the restored parts, and of the parts that were not restored.

        Raises:
            CheckpointError: As in `read`.
        """
        if path is None:
            kept = (*self.read_leaves(), *self.states)
            return RestoreReport(path="", restored=(), kept=kept)
        return self.read(path, only=only, skip=skip, may_differ=may_differ)

    @hides_frames
    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Writes the current values into a new folder with the next number.

        The first folder of the prefix `"runs/ckpt"` is `runs/ckpt-1`, the next one
        `runs/ckpt-2`. This method waits until the files are on the disk, and removes
        nothing. For a training run, a `CheckpointManager` is the better choice. All
        processes must call it.

        Args:
            file_prefix: The path of the folders, without the number.

        Returns:
            The path of the new folder, for `restore`.

        Raises:
            TypeError: If `file_prefix` is not a path.
            CheckpointError: If the files cannot be written.
        """
        prefix = as_place("file_prefix", file_prefix)

        def choose() -> Saved:
            number = number_after(prefix)
            return describe_new(prefix.parent / f"{prefix.name}-{number}", number)

        return self._write(choose)

    @hides_frames
    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Writes the current values into one new folder.

        It is `save` without a number in the name.

        Args:
            file_prefix: The path of the folder, which must not exist yet.

        Returns:
            The path of the folder, for `read`.

        Raises:
            TypeError: If `file_prefix` is not a path.
            CheckpointError: If the folder exists, or the files cannot be written.
        """
        path = as_place("file_prefix", file_prefix)
        return self._write(lambda: describe_new(path, number=0))

    def _write(self, choose: Callable[[], Saved]) -> str:
        with announcing_errors():
            content = self.read_content()

        def choose_for_content() -> Saved:
            return dataclasses.replace(choose(), has_arrays=content.has_arrays)

        return write_once(choose_for_content, content)

    def find_missing(self, trainer: Any) -> list[str]:
        """Returns the paths in a trainer that this checkpoint lacks, except metrics."""
        own = {slot.key for slot in self.find_slots()}
        missing: list[str] = []
        for slot in find_slots(trainer):
            if slot.key not in own and slot.role is not Role.METRIC:
                missing += slot.paths
        return missing

    def read_content(self) -> Content:
        """Returns the values of all objects now, without copying arrays.

        Raises:
            CheckpointError: If the memory of an array was given to a program, or an
                array that is left out has changed.
        """
        leaves = self.read_leaves()
        donated = [
            path
            for path, leaf in leaves.items()
            if isinstance(leaf, jax.Array) and leaf.is_deleted()
        ]
        if donated:
            raise CheckpointError(
                f"`Checkpoint` holds {len(donated)} arrays whose memory was donated to "
                f"a program or deleted:\n{list_lines(donated)}\n"
                "Assign the results of a step before saving. After a step that failed, "
                "restore a checkpoint (`manager.restore_or_initialize()`)."
            )

        packed = {name: read_state(name, obj) for name, obj in self.states.items()}
        peers = get_peers()
        if not peers.is_alone:
            self._check_agreed(packed, peers)
        states = {name: part.state for name, part in packed.items()}
        arrays: dict[str, np.ndarray] = {}
        for part in packed.values():
            arrays |= part.arrays
        specs = describe_leaves(leaves)
        for path, digest in self.left_out.check(leaves).items():
            specs[path] = dataclasses.replace(specs[path], digest=digest)
        return Content(leaves, specs, states, arrays)

    def _check_agreed(self, packed: Mapping[str, Packed], peers: Peers) -> None:
        """Raises if the state of a Python object differs between processes."""
        names = [name for name in packed if not _is_ours(self.states[name])]
        if not names:
            return
        # A state in JSON may describe one process, for example by a time or a path.
        own = dict.fromkeys(names, "")
        for name in names:
            is_adapted = isinstance(self.states[name], HostArray | FunctionAdapter)
            if is_adapted or packed[name].has_arrays:
                own[name] = packed[name].fingerprint()
        texts = peers.gather("the states of Python objects", json.dumps(own))
        first = json.loads(texts[0])
        for index, text in enumerate(texts):
            for name, found in json.loads(text).items():
                if found != first[name]:
                    raise CheckpointError(
                        f"`{name}` has another state in process {index} than in "
                        "process 0, but a checkpoint holds only the state of process "
                        "0. Start with the same state in all processes (the same "
                        "seed), or leave it out of the `Checkpoint`."
                    )

    def read_leaves(self) -> dict[str, Any]:
        """Returns the current arrays of the slots, by path.

        Raises:
            ValueError: If two places have the same path.
        """
        leaves: dict[str, Any] = {}
        seen: set[str] = set()  # without slashes at the end, as on a disk
        twice: list[str] = []
        for slot in self.find_slots():
            for path, leaf in zip(slot.paths, slot.read(), strict=True):
                stored = path.rstrip("/")
                if stored in seen:
                    twice.append(path)
                seen.add(stored)
                leaves[path] = leaf
        if twice:
            raise ValueError(
                f"`Checkpoint` finds {len(twice)} paths that name two arrays each: "
                f"{', '.join(sorted(twice))}. Rename a key of the dictionaries on "
                "these paths, for example if there are `1` and `'1'`."
            )
        return leaves

    @property
    def data_positions(self) -> set[str]:
        """Names of states that are the position of an object in its data."""
        return {
            name
            for name, value in self.states.items()
            if hasattr(value.get_state, IS_POSITION)
        }

    @property
    def missing_before(self) -> set[str]:
        """Names of states that checkpoints of older releases lack."""
        return {
            name
            for name, value in self.states.items()
            if hasattr(value.get_state, MAY_BE_MISSING)
        }

    @property
    def passing(self) -> list[str]:
        """Paths of state that may exist at one save, and not at the next.

        These are the metrics of a compiled Keras model, and the metrics of a loop in
        checkpoints of older releases.
        """
        walk = Walk([(value, name) for name, value in self.objects.items()])
        paths: list[str] = []
        for node in walk.nodes.values():
            adapter = node_adapter(type(node.value))
            may_be_missing = adapter is not None and adapter.may_be_missing(node.value)
            if may_be_missing or has_trait(node.value, Trait.ONE_LOOP):
                paths.append(node.path)
        return paths

    def find_slots(self) -> Sequence[Slot]:
        """Returns the places of all arrays, as they are now."""
        roots = [(value, name) for name, value in self.objects.items()]
        return lasting_slots(Walk(roots, finds_plain=False))


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Returns the path of the newest complete checkpoint in a directory.

    It replaces `tf.train.latest_checkpoint`. It finds the folders of a
    `CheckpointManager`, of `Checkpoint.save` and of `Checkpoint.write`.

    Args:
        directory: The directory with the folders of the checkpoints.

    Returns:
        The path, or `None` if there is no complete checkpoint.

    Raises:
        TypeError: If `directory` is not a path.
    """
    saved = find_all(as_absolute("directory", directory))
    return str(saved[-1].path) if saved else None


def has_position(value: Any) -> bool:
    """Returns whether an object has a state of its own to save."""
    if isinstance(value, type):
        return False
    return _has_method(value, "get_state") and _has_method(value, "set_state")


def _has_method(value: Any, name: str) -> bool:
    # `hasattr` would run `__getattr__`, and `nnx.Rngs` answers to every name.
    return inspect.getattr_static(value, name, None) is not None


def _find_state(name: str, value: Any) -> Any:
    """Returns an object that reads and writes the state of `value`, or `None`."""
    adapter = find_adapter(name, value)
    if adapter is not None:
        return adapter
    if has_position(value):
        return value
    # If an object has arrays of JAX, these are saved instead, as in older releases.
    has_methods = all(_has_method(value, method) for method in _STATE_DICT)
    if has_methods and not find_slots(value, name):
        return adapt_loader(name, value)
    return None


def _is_ours(value: Any) -> bool:
    """Returns whether `get_state` of an object is a method of this library."""
    get_state = getattr(type(value), "get_state", None)
    module = getattr(get_state, "__module__", None) or ""
    is_adapter = isinstance(value, HostArray | FunctionAdapter)
    return module.startswith("armillary.") and not is_adapter


def _way_to_save(name: str, value: Any) -> str:
    """Returns the line that saves a value without places that can be assigned."""
    leaves = jax.tree.leaves(value) if isinstance(value, dict) else []
    if any(isinstance(leaf, np.ndarray) for leaf in leaves):
        arguments = ", ".join(f"{key}={name}[{key!r}]" for key in list(value)[:2])
        return f"Name each array of NumPy by itself: `Checkpoint({arguments})`."
    return (
        "Hold a bare array of JAX or a pytree in a dictionary, as in "
        f"`Checkpoint({name}={{'value': value}})`."
    )


def _check_holds_state(name: str, value: Any, has_state: bool) -> None:
    """Raises if nothing of an object, or only a part of it, would be saved."""
    slots = find_slots(value, name)
    is_partial = False
    if isinstance(value, tuple):  # It may also hold dictionaries, which are saved.
        lost = {id(each) for _, each in Walk([(value, name)]).constants}
        is_partial = not lost.isdisjoint(map(id, jax.tree.leaves(value)))
    is_saved = has_state or (slots and not is_partial)
    if not is_saved:
        shown = value if isinstance(value, type) else type(value)
        what = "an array in a tuple" if is_partial else "nothing to save"
        raise TypeError(
            f"`{name}` is of type {shown.__name__}, in which there is {what}. It must "
            "be an object with arrays in places that can be assigned, or with "
            f"`get_state()` and `set_state(state)`. {_way_to_save(name, value)}"
        )
    if is_frozen(value) and any(slot.holder == id(value) for slot in slots):
        raise TypeError(
            f"`{name}` is of type {type(value).__name__}, whose arrays cannot be "
            "assigned. So a step replaces it by a new object, but this old object "
            "would be saved forever. Pass the object that refers to it: "
            f"`Checkpoint(trainer=trainer)`, with `trainer.{name}`, or a dictionary, "
            f"`{{'{name}': {name}}}`."
        )
