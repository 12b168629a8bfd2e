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


def save_below_a_file(directory: Path) -> None:
    (directory / "file").touch()
    make(directory / "file" / "run").save(1)


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
NUMERIC = {"array": jnp.zeros(1)}
NUMBER = "`checkpoint_number` is %s, .* not negative"
NOTHING = r"(?s)`thing` is of %s, .*Checkpoint\(thing=\{"


@mistakes(
    {
        TypeError: {
            # What a checkpoint may hold.
            NOTHING % "type int": lambda _: Checkpoint(thing=3),
            NOTHING % "type Position": lambda _: Checkpoint(thing=Position),
            NOTHING % "type SimpleNamespace": (
                lambda _: Checkpoint(thing=SimpleNamespace(name="x"))
            ),
            r"Checkpoint\(w=\{'value': value\}\)": lambda _: Checkpoint(w=jnp.zeros(3)),
            # A step would put another one in its place, and this one be saved.
            r"`net` is of type Frozen, .*Checkpoint\(trainer=trainer\)`, with "
            r"`trainer.net`, .*{'net': net}`": lambda _: Checkpoint(net=FROZEN),
            "`data` of type Position.*ndarray": (
                lambda _: Checkpoint(
                    data=Position({"array": np.zeros(3)})
                ).read_content()
            ),
        },
        ValueError: {
            "names no objects": lambda _: Checkpoint(),
            "finds 1 paths that name two arrays.*h/1": (
                lambda _: Checkpoint(h={1: jnp.zeros(1), "1": jnp.zeros(2)})
            ),
            r"`may_differ` is \['ema', ''\], .* none of them empty": (
                lambda d: make(d, may_differ=["ema", ""])
            ),
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
            "Saving `.*file/run/checkpoint_1` failed: (FileExists|NotADir)": (
                save_below_a_file
            ),
            "no complete checkpoint: .*json` is missing. Use one of `man": (
                lambda d: make(d).restore(d)
            ),
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
