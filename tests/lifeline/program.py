"""Programs for the tests of this folder: trainings that fail in different ways."""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import armillary
from armillary.checkpoint import _commit
from armillary.lifeline import _ending
from tests.patience import patience

VICTIM = 1
# On a busy machine, six seconds may not be enough for the lifeline to notice a death.
_ending._ABORT_HANDLER = "pause"


class Sum(armillary.StandardTrainer):
    """Adds up numbers, over all replicas."""

    def __init__(self, strategy: Any, dataset: Any) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.step = armillary.create_global_step()
        self.total = nnx.metrics.Average("x")

    def train_step(self, iterator: Any) -> None:
        self.strategy.run(lambda x: self.total.update(x=x), (next(iterator),))
        self.step[...] += 1

    def train_loop_end(self) -> Any:
        return {"mean": self.total.compute()}


def train(scenario: str, folder: Path, limit_seconds: float | None) -> None:
    strategy = armillary.MultiWorkerMirroredStrategy()
    is_victim = jax.process_index() == VICTIM

    def read() -> Any:
        for number in range(10**9):
            if scenario == "sleep" and is_victim and number == 40:
                time.sleep(3600)  # the reader sleeps
            if scenario == "slow" and is_victim:
                time.sleep(patience(0.02))
            if scenario == "raise" and is_victim and number == 37:  # Inside a chunk.
                raise OSError("the disk is on fire")
            yield np.full((2,), number, np.float32)

    def load() -> None:
        if scenario == "restore" and is_victim:
            time.sleep(3600)  # it is stuck

    def be_stuck(*_: Any) -> None:
        time.sleep(3600)  # the disk is stuck

    if scenario == "save" and is_victim:
        _commit.sync_files = be_stuck

    trainer = Sum(strategy, strategy.distribute_datasets_from_function(lambda _: read))

    def act(output: Any) -> None:
        step = int(trainer.step[...])
        (folder / f"at_{jax.process_index()}").write_text(str(step))
        if scenario == "act" and is_victim and step >= 20:
            time.sleep(3600)  # the action sleeps
        if scenario == "gil" and jax.process_index() == 0 and step >= 20:
            # The second call waits forever, and keeps the interpreter's lock.
            lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, bytes(128)
            lock(mutex)
            lock(mutex)

    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.step,
        strategy=strategy,
        steps_per_loop=5,
        train_actions=[act],
        hang_timeout_seconds=limit_seconds,
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(step=trainer.step),
            folder / "checkpoints",
            checkpoint_interval=20 if scenario == "save" else None,
            init_fn=load,
        ),
    )
    controller.train()


if __name__ == "__main__":
    arguments = json.loads(sys.argv[3])
    train(sys.argv[1], Path(sys.argv[2]).parent, arguments.get("limit_seconds"))
