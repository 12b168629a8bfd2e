"""Trains the port of ImageNet in a process of its own, which may kill itself.

    python -m tests.ports.train_and_kill FOLDER RESULT [STEP]

The state after the last step is written to the file `RESULT`. With `STEP`, the process
sends itself SIGKILL after that step. An earlier checkpoint is complete then.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

import armillary
from tests.ports import imagenet
from tests.problems import read_state

NUM_STEPS = 6


def main(folder: Path, result: Path, kill_at: int) -> None:
    strategy = armillary.MirroredStrategy(jax.devices()[:4], axis_name="batch")
    trainer = imagenet.PORT.make_trainer(strategy)
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer),
        folder,
        step_counter=trainer.global_step,
        checkpoint_interval=2,
    )

    def kill(_: object) -> None:
        if int(trainer.global_step[...]) == kill_at:
            manager.sync()
            os.kill(os.getpid(), signal.SIGKILL)

    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.global_step,
        steps_per_loop=1,
        checkpoint_manager=manager,
        train_actions=[kill],
    )
    begun_at = int(trainer.global_step[...])
    controller.train(NUM_STEPS)
    np.savez(result, begun_at=begun_at, **read_state(trainer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:4] or ["0"]))
