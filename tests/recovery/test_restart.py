"""Proof: a job that loses a worker, and is started again, ends as one that did not.

Everything is compared bit for bit: the whole state of each worker with its losses, the
position in the data and each example in its order.
"""

import json

import pytest

from tests.checkpoint.soak_program import SAVE_INTERVAL, STEPS_PER_LOOP, train
from tests.problems import make_strategy
from tests.recovery.conftest import DEADLINE

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

NUM_STEPS = 48


def assert_alike(whole, killed):
    """Asserts that all workers of both jobs ended with the same."""
    assert len(whole[0]["seen"]) == NUM_STEPS
    for final in (*whole, *killed):
        different = [path for path in whole[0] if final[path] != whole[0][path]]
        assert not different, different
        assert final.keys() == whole[0].keys()


def test_the_death_of_a_worker_and_of_the_chief_within_a_save_cost_nothing(
    make_job, tmp_path
):
    killed = make_job("killed", workers=2).start(NUM_STEPS, saves_never_end_in=1)
    killed.wait_for_step(20, worker=0, attempt=0)
    killed.kill(worker=1, attempt=0)
    # Two replicas in one process give the bits of two processes: a sum of two numbers
    # does not depend on their order.
    whole = train(make_strategy(2), tmp_path / "whole", NUM_STEPS, lambda step: None)

    # The chief trains on while its save is being written, and then it dies.
    killed.launcher.wait_for_mark("saving", DEADLINE)
    began = killed.steps(worker=0, attempt=1)[0]
    saving = began + SAVE_INTERVAL
    killed.wait_for_step(saving + STEPS_PER_LOOP, worker=0, attempt=1)
    names = [path.name for path in (killed.folder / "run" / "checkpoints").iterdir()]
    assert any(name.startswith(f"checkpoint_{saving}.orbax") for name in names)
    killed.kill(worker=0, attempt=1)

    finals, said = killed.finish()
    assert_alike([json.loads(json.dumps(whole))], finals)
    assert "worker 1 of 2 failed first: killed by SIGKILL" in said
    assert "worker 0 of 2 failed first: killed by SIGKILL" in said
    assert "ends with exit code 0 (OK) after 2 restarts." in said
    # Each attempt went on from the last complete save; the first one is at step 4.
    assert began in range(STEPS_PER_LOOP + SAVE_INTERVAL, NUM_STEPS, SAVE_INTERVAL)
    assert killed.steps(worker=1, attempt=2)[0] == began


@pytest.mark.thorough
def test_the_death_of_one_of_three_workers_costs_nothing(make_job):
    killed = make_job("killed", workers=3).start(NUM_STEPS)
    killed.wait_for_step(20, worker=2, attempt=0)
    killed.kill(worker=1, attempt=0)
    whole = make_job("whole", workers=3).start(NUM_STEPS)

    finals, said = killed.finish()
    assert_alike(whole.finish()[0], finals)
    assert "worker 1 of 3 failed first: killed by SIGKILL" in said
    assert "ends with exit code 0 (OK) after 1 restart." in said
    assert killed.steps(worker=0, attempt=1)[0] >= STEPS_PER_LOOP + SAVE_INTERVAL
