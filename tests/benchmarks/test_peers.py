"""Tests that other libraries run the same tasks, each in its own environment."""

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.contestants import PEERS
from benchmarks.environments import find_pythons
from benchmarks.lifecycle import list_problems, measure
from benchmarks.models import make_model
from benchmarks.peers.kauldron import KauldronContestant
from benchmarks.peers.keras import KerasContestant
from benchmarks.peers.levanter import LevanterContestant
from benchmarks.peers.lightning import LightningContestant
from benchmarks.peers.orbit import OrbitContestant
from benchmarks.peers.tunix import TunixContestant
from benchmarks.processes import WorkerProcess
from benchmarks.protocol import Options, UnsupportedError
from benchmarks.tasks import make_task

SECONDS = 240.0
TASKS = ("mlp", "cnn", "bert")
# The tests' own devices and strictness are not the worker's. PyTorch gets one thread:
# on cores that other tests use, two would wait for each other most of the time.
SETTINGS = {
    "XLA_FLAGS": "",
    "JAX_NUMPY_RANK_PROMOTION": "allow",
    "OMP_NUM_THREADS": "1",
}


def start(peer: str, task: str, *options: str) -> WorkerProcess:
    python = find_pythons([]).get(peer)
    if python is None:
        pytest.skip(f"There is no environment for {peer}: `make bench-peers` makes it.")
    command = [python, "-m", "benchmarks.worker", "--contestant", peer]
    command += ["--task", task, "--size", "small", "--steps-per-loop", "5", *options]
    return WorkerProcess(peer, command, SETTINGS)


def count_parameters(task: str) -> int:
    model = nnx.eval_shape(
        lambda: make_model(make_task(task, "small"), nnx.Rngs(0), np.float32)
    )
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def assert_trains(peer: str, task: str, *options: str) -> None:
    with start(peer, task, *options) as worker:
        facts = worker.wait_ready(SECONDS)["facts"]
        assert facts["parameters"] == count_parameters(task)
        losses = [worker.run(100, SECONDS)["loss"] for _ in range(3)]
    assert losses[-1] < 0.97 * losses[0], losses


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("peer", PEERS)
def test_peers_train_the_same_model(peer, task):
    assert_trains(peer, task)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mlp", "bert", "gpt"])
@pytest.mark.parametrize("peer", ["kauldron", "tunix"])
def test_peers_on_jax_reach_the_losses_of_the_scan_also_after_a_restore(peer, task):
    pythons = find_pythons([])
    if peer not in pythons:
        pytest.skip(f"There is no environment for {peer}: `make bench-peers` makes it.")
    found = {task: measure(task, "small", [peer], pythons)}

    assert list_problems(found) == []
    assert len(found[task][peer]["warm"]["losses_after"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["keras", "orbit"])
def test_peers_train_on_several_devices(peer):
    assert_trains(peer, "mlp", "--devices", "2")


@pytest.mark.parametrize(
    ("contestant", "task", "options", "message"),
    [
        (
            KerasContestant,
            "mlp",
            {"data": "grain"},
            "`data` is 'grain', but `keras` r",
        ),
        (KerasContestant, "mlp", {"dtype": "bf16"}, "`dtype` is 'bf16', but peers are"),
        (OrbitContestant, "many-leaves", {}, "`task` is 'many-leaves', but"),
        (LightningContestant, "many-leaves", {}, "`task` is 'many-leaves', but"),
        (
            LightningContestant,
            "mlp",
            {"devices": 2},
            "`devices` is 2, but Lightning s",
        ),
        (TunixContestant, "gpt", {"devices": 2}, "`devices` is 2, but `tunix` is"),
        (KauldronContestant, "mlp", {"devices": 2}, "`devices` is 2, .*kauldron"),
        (KauldronContestant, "mlp", {"data": "resident"}, "`data` is 'resident'"),
        (LevanterContestant, "mlp", {}, "cannot be imported with JAX 0.10"),
    ],
)
def test_an_unfair_comparison_is_refused(contestant, task, options, message):
    with pytest.raises(UnsupportedError, match=message):
        contestant().setup(make_task(task), Options(**options))
