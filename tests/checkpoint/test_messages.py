"""Tests of what a user reads: one table of errors."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from armillary.checkpoint import Checkpoint, CheckpointManager
from armillary.errors import CheckpointError, DatasetStateError
from tests.mistakes import mistakes


class Position:
    """Has a state that is not made of arrays, as a dataset has."""

    def __init__(self, state: Any = 0) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        raise AssertionError


class Source(Position):
    def check_repositionable(self) -> None:
        raise DatasetStateError("A generator cannot be repositioned.")


def make(directory: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(Checkpoint(h={"x": jnp.zeros(1)}), directory, **options)


def make_below_a_file(directory: Path, *names: str) -> None:
    (directory / "file").touch()
    make(directory.joinpath("file", *names))


def read_donated(_: Path) -> None:
    holder = SimpleNamespace(array=jnp.zeros(1), other=jnp.zeros(1))
    checkpoint = Checkpoint(holder=holder)
    jax.jit(lambda x: x + 1, donate_argnums=0)(holder.array)
    checkpoint.read_content()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    layers: Any


def make_equinox() -> Any:
    eqx = pytest.importorskip("equinox", reason="This test needs Equinox.")
    return eqx.nn.Linear(2, 1, key=jax.random.key(0))


FROZEN = Frozen([jnp.zeros(1)])
NUMERIC = {"array": jnp.zeros(1)}
NOT_NUMERIC = {"name": nnx.Variable("text"), "array": nnx.Variable(jnp.zeros(1))}
NUMBER = "`checkpoint_number` is %s, .* not negative"
NOTHING = r"(?s)`thing` is of %s, .*Checkpoint\(thing=\{"
IS_FILE = r"`directory` is .*file' is a file"


@mistakes(
    {
        TypeError: {
            # What a checkpoint may hold.
            NOTHING % "type int": lambda _: Checkpoint(thing=3),
            NOTHING % "type str": lambda _: Checkpoint(thing="text"),
            NOTHING % "type NoneType": lambda _: Checkpoint(thing=None),
            NOTHING % "class Linear": lambda _: Checkpoint(thing=nnx.Linear),
            NOTHING % "class Position": lambda _: Checkpoint(thing=Position),
            NOTHING % "type SimpleNamespace": (
                lambda _: Checkpoint(thing=SimpleNamespace(name="x"))
            ),
            r"Checkpoint\(w=\{'value': value\}\)": lambda _: Checkpoint(w=jnp.zeros(3)),
            # A step would put another one in its place, and this one be saved.
            r"`net` is of type Frozen, .*Checkpoint\(trainer=trainer\)`, with "
            r"`trainer.net`, .*{'net': net}`": lambda _: Checkpoint(net=FROZEN),
            "`net` is of type Linear, whose arrays cannot be assigned": (
                lambda _: Checkpoint(net=make_equinox())
            ),
            "`data` of type Position.*ndarray": (
                lambda _: Checkpoint(
                    data=Position({"array": np.zeros(3)})
                ).read_content()
            ),
            r"holds 1 values.*\n  h/name: str 'text'\n": (
                lambda _: Checkpoint(h=NOT_NUMERIC)
            ),
        },
        ValueError: {
            "names no objects": lambda _: Checkpoint(),
            "finds 1 paths that name two arrays.*h/1": (
                lambda _: Checkpoint(h={1: jnp.zeros(1), "1": jnp.zeros(2)})
            ),
            r"`may_differ` is \['ema', ''\] .* none of them empty": (
                lambda d: make(d, may_differ=["ema", ""])
            ),
            f"{IS_FILE}, .*": make_below_a_file,
            IS_FILE: lambda d: make_below_a_file(d, "run"),
            # The numbers of checkpoints.
            NUMBER % "-1": lambda d: make(d).save(-1),
            "is 5, but there is no `step_counter`": (
                lambda d: make(d, checkpoint_interval=5).save(check_interval=True)
            ),
        },
        DatasetStateError: {
            "cannot be repositioned": lambda _: Checkpoint(data=Source()),
        },
        CheckpointError: {
            r"holds 1 arrays .*\n  holder/array\n": read_donated,
            "folder `checkpoint_<number>` of one. Use one of `man": lambda d: make(
                d
            ).restore(d),
        },
    }
)
def test_an_error_says_what_is_wrong_and_writes_nothing(
    tmp_path: Path,
    call: Callable[[Path], object],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        call(tmp_path)

    assert {path.name for path in tmp_path.iterdir()} <= {"file"}
