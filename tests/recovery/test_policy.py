"""Tests of automatic reactions to bad checkpoints and absent workers."""

import itertools
import json

import numpy as np
import pytest

from armillary.launch import ExitCode
from tests.checkpoint.soak_program import Plain, train
from tests.environment import REPOSITORY, forget_devices
from tests.launch.conftest import launcher as launcher
from tests.patience import patience
from tests.problems import make_strategy

pytestmark = pytest.mark.slow

NUM_STEPS = 40
# A checkpoint is saved after step 4, and every 8 steps from there.
CRASH = """
import pathlib
import armillary
from tests.checkpoint.soak_program import train

begun = []

def report(step):
    begun.append(step)
    print("at", begun[0], step, flush=True)
    if begun[0] == 12 or begun == [0, 4, 8, 12, 16]:
        raise RuntimeError(f"bad weights in process {os.getpid()}")

strategy = armillary.MirroredStrategy()
train(strategy, pathlib.Path("run"), 26, report)
"""
ELASTIC = """
import pathlib
import armillary
from tests.checkpoint.soak_program import Plain, train

count = os.environ["TF_CONFIG"].count("127.0.0.1:")
if index == 3 and os.path.exists("away"):
    sys.exit("no device")

def report(step):
    if step >= 12 and restarts == 0 or step >= 24 and count == 3:
        if index == 3 or count == 3 and index == 1:
            os.unlink("away") if count == 3 else mark("away")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)

strategy = armillary.MultiWorkerMirroredStrategy()
if index == 0:
    mark(f"count_{restarts}", count)
final = train(strategy, pathlib.Path("run"), int(sys.argv[1]), report, Plain())
mark(f"final_{index}", json.dumps([final["seen"], final["trace"]]))
"""


def start_alike(launcher, script, options, args=()):
    """Runs a job, each of whose processes has one device."""
    flags = forget_devices()["XLA_FLAGS"]
    environment = {"PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": flags}
    return launcher.run(script, options, args=args, **environment)


def test_a_checkpoint_that_always_fails_is_stepped_over_once(launcher):
    code, stdout, stderr = start_alike(
        launcher, CRASH, "--max-restarts 5 --pause-seconds 0"
    )
    assert code == ExitCode.OK, stderr
    begun = [line.split()[3] for line in stdout.splitlines() if "] at " in line]
    # In the order of the attempts: from the start, twice from 12, and from 4.
    assert [key for key, _ in itertools.groupby(begun)] == ["0", "12", "4"]
    assert begun.count("12") == 2
    path = launcher.folder / "run" / "checkpoints" / "checkpoint_12"
    why = f"the first steps after `{path}` failed twice: without it."
    assert f"[launcher] restart 3 of 5 in 0 s: {why}\n" in stderr
    assert f"`{path}` is skipped, but not removed, because the first steps" in stderr
    assert "ends with exit code 0 (OK) after 3 restarts." in stderr


def test_a_job_shrinks_and_grows_reads_each_example_once_and_computes_the_same(
    launcher, tmp_path
):
    # The budget is one failure: progress renews it, and a worker that is away costs
    # nothing.
    code, _, stderr = start_alike(
        launcher,
        ELASTIC,
        "--workers 2:4 --wait-seconds 0 --pause-seconds 0.1 --max-restarts 1 "
        f"--grace-seconds {patience(20):g}",
        args=[str(NUM_STEPS)],
    )
    assert code == ExitCode.OK, stderr
    names = sorted(launcher.folder.glob("count_*"))
    assert [name.read_text() for name in names] == ["4", "3", "4"], stderr
    assert "worker 3 of 4 failed first: killed by SIGKILL" in stderr
    assert "worker 3 of 4 failed first: exit code 1" in stderr
    assert "1 of 4 workers did not come, so it continues with 3." in stderr
    assert "worker 1 of 3 failed first: killed by SIGKILL" in stderr
    whole = train(
        make_strategy(4), tmp_path / "whole", NUM_STEPS, lambda step: None, Plain()
    )
    finals = [json.loads(launcher.wait_for_mark(f"final_{i}")) for i in range(4)]
    for seen, losses in finals:
        ids = [number for step in seen for number in step]
        for epoch in range(len(ids) // 78):
            assert sorted(ids[epoch * 78 :][:78]) == list(range(78))
        assert seen == finals[0][0]
        assert [sorted(step) for step in seen] == [sorted(s) for s in whole["seen"]]
        np.testing.assert_allclose(losses, whole["trace"], atol=1e-5)
