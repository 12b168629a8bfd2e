"""The program of two processes that train adapters, are killed, and continue."""

import hashlib
import os
import signal
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import armillary
from armillary.errors import ArmillaryError
from tests.lora.training import Trainer, make_manager
from tests.multiprocess.scenarios import run_scenario
from tests.problems import read_state


def describe(trainer: Trainer) -> dict[str, Any]:
    digests = {
        path: hashlib.sha256(value.tobytes()).hexdigest()[:12]
        for path, value in read_state(trainer).items()
    }
    return {"step": int(trainer.optimizer.step[...]), "state": digests}


def train(run_dir: str | None, steps: int, kill_after: int | None = None) -> Any:
    """Trains up to a step, and saves at every second step."""
    trainer = Trainer(armillary.ShardedStrategy())
    if run_dir is None:
        while trainer.optimizer.step[...] < steps:
            trainer.train(1)
        return describe(trainer)

    manager = make_manager(trainer, run_dir)
    manager.restore_or_initialize()
    while (step := int(trainer.optimizer.step[...])) < steps:
        if step == kill_after:
            manager.sync()
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.train(1)
        if step % 2:
            manager.save()
    manager.sync()
    return describe(trainer)


def refuse(run_dir: str) -> Any:
    """Restores with a wrong base."""
    trainer = Trainer(armillary.ShardedStrategy(), seed=1)
    return find_error(make_manager(trainer, run_dir).restore_or_initialize)


def refuse_one(run_dir: str) -> Any:
    """Restores with a base that is wrong in the second process alone."""
    armillary.MultiWorkerMirroredStrategy()  # which joins the processes
    base = {"value": jnp.ones(3)}
    head = {"value": jnp.zeros(3)}
    checkpoint = armillary.Checkpoint(base=base, head=head, leave_out="base")
    path = checkpoint.write(f"{run_dir}_small")

    head["value"] += 1
    base = {"value": jnp.ones(3) + jax.process_index()}
    checkpoint = armillary.Checkpoint(base=base, head=head, leave_out="base")
    return [find_error(lambda: checkpoint.read(path)), float(head["value"][0])]


def find_error(function: Callable[[], Any]) -> str:
    try:
        function()
    except ArmillaryError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    run_scenario(globals())
