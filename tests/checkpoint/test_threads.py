"""Tests of threads that save at the same time, each in its own directory."""

import threading

import jax.numpy as jnp
import numpy as np

from armillary.checkpoint import Checkpoint, CheckpointManager
from tests.patience import patience


class Model:
    def __init__(self, value: float) -> None:
        self.weight = jnp.full(3, value)


def test_threads_may_save_at_the_same_time(tmp_path) -> None:
    count = 4
    failures: list[BaseException] = []
    begin = threading.Barrier(count)

    def work(index: int) -> None:
        try:
            model = Model(float(index))
            manager = CheckpointManager(
                Checkpoint(model=model), tmp_path / str(index), max_to_keep=2
            )
            begin.wait(patience(60))
            for number in range(4):
                manager.save(number)
            manager.sync()
            model.weight = jnp.zeros(3)
            assert manager.restore_or_initialize() is not None
            np.testing.assert_array_equal(model.weight, np.full(3, float(index)))
            assert len(manager.checkpoints) == 2
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
