"""Peers run the same tasks, each where its environment exists."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.__main__ import find_peer_pythons
from benchmarks.peers._case import check_case, check_steps, cut_batches, import_peer
from benchmarks.peers._keras_models import make_model as make_keras_model
from benchmarks.peers._torch_models import make_model as make_torch_model
from benchmarks.peers.keras import KerasContestant
from benchmarks.peers.lightning import LightningContestant
from benchmarks.peers.orbit import OrbitContestant, OrbitXlaContestant
from benchmarks.processes import REPOSITORY, WorkerProcess
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
    library = peer.partition("-")[0]
    python = find_peer_pythons([]).get(library)
    if python is None:
        pytest.skip(
            f"There is no environment for {library}: `make bench-peers` makes it."
        )
    command = [python, "-m", "benchmarks.worker", "--contestant", peer]
    command += ["--task", task, "--size", "small", "--steps-per-loop", "5", *options]
    return WorkerProcess(peer, command, SETTINGS)


def count_parameters(task: str) -> int:
    model = nnx.eval_shape(
        lambda: make_task(task, "small").make_model(nnx.Rngs(0), np.float32)
    )
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def assert_trains(peer: str, task: str, *options: str) -> None:
    with start(peer, task, *options) as worker:
        facts = worker.wait_ready(SECONDS)["facts"]
        assert facts["parameters"] == count_parameters(task)
        losses = [worker.run(100, SECONDS)["loss"] for _ in range(3)]
    assert losses[-1] < 0.97 * losses[0], losses


@pytest.mark.slow
@pytest.mark.parametrize("task", [*TASKS, "many-leaves"])
def test_keras_trains_the_same_model(task):
    assert_trains("keras", task)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_orbit_trains_the_same_model(task):
    assert_trains("orbit", task)


@pytest.mark.slow
def test_orbit_trains_compiled_by_xla():
    assert_trains("orbit-xla", "mlp")


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_lightning_trains_the_same_model(task):
    assert_trains("lightning", task)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["keras", "orbit"])
def test_peers_train_on_several_devices(peer):
    assert_trains(peer, "mlp", "--devices", "2")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("data", "grain", "`data` is 'grain', but `keras` reads arrays in memory"),
        ("dtype", "bf16", "`dtype` is 'bf16', but peers are compared in float32"),
    ],
)
def test_unfair_options_are_refused(option, value, message):
    with pytest.raises(UnsupportedError, match=message):
        KerasContestant().setup(make_task("mlp"), Options(**{option: value}))


@pytest.mark.parametrize("contestant", [OrbitContestant, LightningContestant])
def test_tasks_without_a_model_are_refused(contestant):
    with pytest.raises(UnsupportedError, match="`task` is 'many-leaves', but"):
        contestant().setup(make_task("many-leaves"), Options())


def test_lightning_and_xla_are_refused_on_several_devices():
    with pytest.raises(UnsupportedError, match="`devices` is 2, but Lightning starts"):
        LightningContestant().setup(make_task("mlp"), Options(devices=2))
    with pytest.raises(UnsupportedError, match="`devices` is 2, but XLA in TensorFlow"):
        OrbitXlaContestant().setup(make_task("mlp"), Options(devices=2))


def test_canonical_convolutions_do_not_concern_peers():
    options = Options(convolutions="canonical")
    check_case("orbit", make_task("cnn"), options, tasks=("cnn",))


def test_an_absent_library_tells_how_to_install_it():
    assert "absent_library" not in sys.modules
    with pytest.raises(UnsupportedError, match="`make bench-peers`, which installs"):
        import_peer("absent_library", "keras")


@pytest.mark.parametrize("num_steps", [0, -10, 15])
def test_bursts_are_whole_loops(num_steps):
    with pytest.raises(ValueError, match=f"`num_steps` is {num_steps}, but it must be"):
        check_steps(num_steps, 10)


def test_models_exist_for_known_tasks_only():
    with pytest.raises(TypeError, match="`task` is a object, but there is no Keras"):
        make_keras_model(None, object())
    with pytest.raises(TypeError, match="`task` is a object, but there is no PyTorch"):
        make_torch_model(None, object())


def test_batches_are_cut_from_the_tasks_arrays_in_order():
    task = make_task("mlp", "small")
    arrays, cut = task.make_arrays(), cut_batches(task)
    assert cut["image"].shape == (12, 16, 784)
    np.testing.assert_array_equal(cut["label"][1], arrays["label"][16:32])
    np.testing.assert_array_equal(cut["image"][11], arrays["image"][176:192])


@pytest.mark.parametrize("peer", ["keras", "orbit", "lightning"])
def test_environments_are_plain_sorted_pins(peer):
    lines = Path(REPOSITORY, "benchmarks", "peers", f"{peer}.txt").read_text().split()
    names = [line.partition("==")[0] for line in lines]
    assert all("==" in line for line in lines) and lines == sorted(lines)
    assert len(set(names)) == len(names)
