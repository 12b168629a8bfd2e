"""Tests of the content of a checkpoint, of restoring it, and of refusals."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from armillary.checkpoint import Checkpoint, CheckpointManager
from armillary.checkpoint._put import put_all
from armillary.errors import CheckpointError, DatasetStateError
from tests.mistakes import mistakes


class Position:
    """An object whose state has no arrays, like the state of a dataset."""

    def __init__(self, state: Any = 0) -> None:
        self.state = state
        self.log: list[Any] = []

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.log.append(state)
        if state == "refused":
            raise DatasetStateError("This position does not fit.")
        self.state = state


def test_paths_begin_with_the_keywords():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    checkpoint = Checkpoint(
        model=model,
        step=nnx.Variable(jnp.asarray(4)),
        params={"w": jnp.zeros(2), "inner": {"b": jnp.ones(1)}},
        # A shared object is saved once, under its first path.
        trainer=SimpleNamespace(weights=(jnp.zeros(1), jnp.zeros(2)), net=model),
    )

    assert set(checkpoint.read_content().leaves) == {
        "model/kernel",
        "model/bias",
        "step",
        "params/w",
        "params/inner/b",
        "trainer/weights/0",
        "trainer/weights/1",
    }
    # It answers to every name, also to the names of methods.
    assert not Checkpoint(rngs=nnx.Rngs(0)).states


def test_places_made_later_are_found_and_states_are_copies():
    holder, position = SimpleNamespace(first=jnp.zeros(1)), Position({"epoch": 1})
    checkpoint = Checkpoint(holder=holder, data=position)
    holder.second = jnp.zeros(1)
    content = checkpoint.read_content()
    position.state["epoch"] = 2

    assert set(content.leaves) == {"holder/first", "holder/second"}
    assert content.states == {"data": {"epoch": 1}}
    position.array = jnp.ones(2)
    assert set(Checkpoint(both=position).read_content().leaves) == {"both/array"}


def test_arrays_are_written_before_states():
    holder = SimpleNamespace(array=jnp.zeros(1))
    seen: list[float] = []

    class Watcher(Position):
        def set_state(self, state: Any) -> None:
            seen.append(float(holder.array[0]))

    checkpoint = Checkpoint(data=Watcher(), holder=holder)
    put_all(checkpoint, {"holder/array": jnp.ones(1)}, {"data": 1})

    assert seen == [1.0]


def test_a_refused_state_puts_everything_back():
    holder = SimpleNamespace(array=jnp.zeros(1))
    first, second = Position("one"), Position("two")
    checkpoint = Checkpoint(holder=holder, first=first, second=second)
    before = holder.array

    with pytest.raises(DatasetStateError, match="does not fit"):
        new = {"holder/array": jnp.ones(1)}
        put_all(checkpoint, new, {"first": 9, "second": "refused"})

    assert holder.array is before
    assert (first.state, second.state) == ("one", "two")
    assert second.log == ["refused", "two"]


class Source(Position):
    def check_repositionable(self) -> None:
        raise DatasetStateError("A generator cannot be repositioned.")


def test_a_tuple_of_modules_is_saved():
    modules = tuple(nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    assert len(Checkpoint(models=modules).read_leaves()) == 4


def make(directory: Path, h: Any = None, **options: Any) -> CheckpointManager:
    return CheckpointManager(
        Checkpoint(h=h or {"x": jnp.zeros(1)}), directory, **options
    )


def read_donated(_: Path) -> None:
    holder = SimpleNamespace(array=jnp.zeros(1), other=jnp.zeros(1))
    checkpoint = Checkpoint(holder=holder)
    jax.jit(lambda x: x + 1, donate_argnums=0)(holder.array)
    checkpoint.read_content()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    layers: Any


FROZEN = Frozen([jnp.zeros(1)])
PARTLY = "`thing` is of type tuple, .*an array in a tuple.*%s.*{'value': value}"
NOTHING = r"(?s)`thing` is of %s, .*Checkpoint\(thing=\{"


@mistakes(
    {
        TypeError: {
            # Objects that a checkpoint may hold.
            r"got a `Frozen` without a name.*`Checkpoint\(trainer=trainer\)`": (
                lambda _: Checkpoint(FROZEN)
            ),
            NOTHING % "type int": lambda _: Checkpoint(thing=3),
            NOTHING % "type SimpleNamespace": (
                lambda _: Checkpoint(thing=SimpleNamespace(name="x"))
            ),
            r"of type dict, .*`Checkpoint\(x=thing\['x'\]\)`": (
                lambda _: Checkpoint(thing={"x": np.zeros(3)})
            ),
            # The dictionaries in it could be saved, and the rest would be lost.
            PARTLY % "must be an object": (
                lambda _: Checkpoint(thing=({"w": jnp.zeros(3)}, jnp.int32(5)))
            ),
            PARTLY % "bare array of JAX or a pytree": (
                lambda _: Checkpoint(thing=optax.adam(0.1).init({"w": jnp.zeros(3)}))
            ),
            # A step would put another one in its place, and this one be saved.
            r"`net` is of type Frozen, .*Checkpoint\(trainer=trainer\)`, with "
            r"`trainer.net`, .*{'net': net}`": lambda _: Checkpoint(net=FROZEN),
            "`data`, of type Position, returned .* of type set at `names`": (
                lambda _: Checkpoint(data=Position({"names": {1}})).read_content()
            ),
        },
        ValueError: {
            "finds 1 paths that name two arrays.*h/1": (
                lambda _: Checkpoint(h={1: jnp.zeros(1), "1": jnp.zeros(2)})
            ),
            "finds 1 paths that name two arrays.*h/a/": (
                lambda d: make(d, h={"a": jnp.ones(2), "a/": jnp.zeros(2)}).save(1)
            ),
            "is 'Auto', .*Or use `\"auto\"`": (
                lambda d: make(d, checkpoint_interval="Auto")
            ),
            "is given, but there is no `step_counter`": (
                lambda d: make(d, checkpoint_interval=5).save(check_interval=True)
            ),
        },
        DatasetStateError: {
            "cannot be repositioned": lambda _: Checkpoint(data=Source()),
        },
        CheckpointError: {
            r"holds 1 arrays .*\n  holder/array\n": read_donated,
            "not a complete checkpoint: .*json` is missing. Use one of `man": (
                lambda d: make(d).restore(d)
            ),
        },
    }
)
def test_an_error_names_the_fault_and_writes_nothing(tmp_path, call, error, message):
    with pytest.raises(error, match=message):
        call(tmp_path)

    assert not list(tmp_path.iterdir())


def test_the_directory_of_a_run_is_answered_with_its_checkpoints(tmp_path):
    checkpoint = Checkpoint(weights={"w": jnp.zeros(1)})
    manager = CheckpointManager(checkpoint, tmp_path / "run", max_to_keep=None)
    for step in (1, 2):
        manager.save(step)
    manager.sync()

    for path in (tmp_path / "run", tmp_path / "run" / "checkpoint_best"):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.read(path)
        text = str(caught.value)
        assert "is not a complete checkpoint: " in text
        assert text.endswith(f"in {manager.directory!r} is `checkpoint_2`.")
    with pytest.raises(CheckpointError, match="checkpoint: it does not exist"):
        checkpoint.read(tmp_path / "rum" / "checkpoint_2")


def test_a_path_of_none_names_where_it_comes_from(tmp_path):
    checkpoint = Checkpoint(weights={"w": jnp.zeros(1)})
    manager = CheckpointManager(checkpoint, tmp_path)

    for read in (checkpoint.read, manager.restore):
        with pytest.raises(TypeError, match=r"`path` is None, .*`manager\.best_check"):
            read(manager.best_checkpoint)


def test_a_trainer_instead_of_a_checkpoint_is_answered_with_the_line(tmp_path):
    with pytest.raises(TypeError, match=r"Use `Checkpoint\(trainer=trainer\)`"):
        CheckpointManager(Position(), tmp_path)  # pyright: ignore[reportArgumentType]
