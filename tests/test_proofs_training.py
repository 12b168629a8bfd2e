"""Proofs: a run is the same however it is divided, on all replicas, and stopped."""

import functools
import itertools
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import armillary
from armillary.data import from_arrays
from tests.environment import REPOSITORY
from tests.patience import patience
from tests.problems import (
    CNN,
    MLP,
    Classifier,
    Snapshot,
    assert_identical,
    find_changed,
    make_strategy,
    read_state,
)
from tests.tiers import slow_after_first

pytestmark = pytest.mark.usefixtures("optimized")

NUM_STEPS = 50
MODELS = {"mlp": MLP, "cnn": CNN}
TRANSFORMS = {"sgd": optax.sgd(0.05, momentum=0.9), "adam": optax.adam(3e-3)}
PROGRAM = """
import sys
from tests.test_proofs_training import run
run(*sys.argv[1:])
"""


@pytest.fixture(scope="module", autouse=True)
def compiled_anew():
    """Forgets operations that tests before these have compiled in another way."""
    jax.clear_caches()


# How steps are divided into loops and chunks changes no bit


@functools.cache
def make_run(model, **options):
    """Returns a trainer, compiled once, and a snapshot of its start."""
    trainer = Classifier(
        make_strategy(4), MODELS[model](nnx.Rngs(0)), optax.adam(3e-3), **options
    )
    return trainer, Snapshot(trainer)


def train(run, sizes):
    """Returns the state and the data position after loops of the given sizes."""
    trainer, start = run
    start.restore()
    for size in sizes:
        trainer.train(size)
    assert trainer.optimizer.step[...] == NUM_STEPS
    return read_state(trainer), trainer.train_dataset.get_state()


@functools.cache
def get_reference(model):
    return train(make_run(model), [NUM_STEPS])


def assert_same_as_reference(model, run, sizes):
    state, position = train(run, sizes)
    expected, expected_position = get_reference(model)
    assert_identical(state, expected)
    assert position == expected_position


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [*({"steps_per_chunk": size} for size in (1, 3, 7, 100)), {"compile_loop": False}],
    ids=str,
)
@pytest.mark.parametrize("model", MODELS)
def test_chunks_and_loops_of_any_size_give_identical_state(model, options):
    run = make_run(model, **options)

    for steps_per_loop in (1, 5, 50):
        sizes = [steps_per_loop] * (NUM_STEPS // steps_per_loop)
        assert_same_as_reference(model, run, sizes)


@pytest.mark.slow
def test_the_reference_moves_every_kind_of_state():
    trainer, start = make_run("mlp")
    start.restore()
    before = read_state(trainer)

    after, _ = get_reference("mlp")

    # The stored keys stay; the rest must have moved.
    assert before.keys() - find_changed(before, after) == {"model/dropout/rngs/key"}


@pytest.mark.slow
def test_chunks_limited_by_memory_give_identical_state():
    run = make_run("mlp", max_chunk_bytes=3 * 16 * (64 + 1) * 4)

    assert_same_as_reference("mlp", run, [NUM_STEPS])


@pytest.mark.slow
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    cuts=st.sets(st.integers(1, NUM_STEPS - 1), max_size=12),
    steps_per_chunk=st.sampled_from([3, 7, 100]),
)
def test_any_division_into_loops_gives_identical_state(cuts, steps_per_chunk):
    ends = [0, *sorted(cuts), NUM_STEPS]
    sizes = [stop - start for start, stop in itertools.pairwise(ends)]

    for model in MODELS:
        run = make_run(model, steps_per_chunk=steps_per_chunk)
        assert_same_as_reference(model, run, sizes)


# The number of replicas changes losses and parameters by rounding only


@functools.cache
def train_on(transform, num_replicas):
    """Returns the loss of each step, and the parameters at the end."""
    trainer = Classifier(
        make_strategy(num_replicas), CNN(nnx.Rngs(0)), TRANSFORMS[transform]
    )
    trainer.train(NUM_STEPS)
    parameters = {
        path: value
        for path, value in read_state(trainer).items()
        if path.startswith("model/")
    }
    return np.asarray(trainer.losses[:NUM_STEPS]), parameters


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_replicas_give_the_losses_and_parameters_of_one(transform, num_replicas):
    expected_losses, expected = train_on(transform, 1)

    losses, parameters = train_on(transform, num_replicas)

    assert expected_losses[-1] < expected_losses[0] / 2
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert parameters.keys() == expected.keys()
    for path, value in expected.items():
        error = np.linalg.norm(parameters[path] - value) / np.linalg.norm(value)
        assert error < 1e-5, path


@pytest.mark.slow
def test_thousands_of_tiny_steps_on_four_devices():
    strategy = make_strategy(4)

    class Counter(armillary.StandardTrainer):
        def __init__(self, **options):
            batches = from_arrays(
                {"x": np.ones(4, np.int32)}, batch_size=4, repeat=True
            )
            super().__init__(batches, armillary.StandardTrainerOptions(**options))
            self.strategy = strategy
            self.total = nnx.Variable(jnp.zeros((), jnp.int32))

        def train_step(self, iterator):
            def step_fn(batch):
                context = armillary.get_replica_context()
                self.total[...] += context.all_reduce("sum", jnp.sum(batch["x"]))

            strategy.run(step_fn, args=(next(iterator),))

    one_by_one, chunked = Counter(compile_loop=False), Counter(steps_per_chunk=100)
    one_by_one.train(2500)
    for _ in range(25):
        chunked.train(100)

    assert int(one_by_one.total[...]) == int(chunked.total[...]) == 4 * 2500


# A run that was stopped, or killed, ends as the one that was not


def make_controller(directory, num_replicas, model, actions=(), interval=None):
    strategy = make_strategy(num_replicas)
    trainer = Classifier(
        strategy,
        MODELS[model](nnx.Rngs(0)),
        optax.adam(3e-3),
        # Its position lies in the middle of chunks and of epochs at every save.
        steps_per_chunk=7,
    )
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer, data=trainer.train_dataset),
        directory,
        checkpoint_interval=interval,
    )
    return armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=4,
        train_actions=actions,
        checkpoint_manager=manager,
    )


def run(directory, output, model, interval):
    """Trains to the end in a process of its own, and writes the final state."""

    def report(_):
        print("loop", flush=True)  # noqa: T201

    controller = make_controller(directory, 4, model, [report], int(interval) or None)
    controller.train(NUM_STEPS)
    np.savez(output, **read_state(controller.trainer))


def start(directory, output, model, interval=0):
    """Starts `run` in a new process."""
    return subprocess.Popen(
        [
            *(sys.executable, "-c", PROGRAM),
            *(str(directory), str(output), model, str(interval)),
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def finish(child):
    _, errors = child.communicate(timeout=patience(120))
    assert child.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_steps"), [("mlp", 23), ("cnn", 10)])
def test_stop_and_resume_in_a_new_process_is_bit_identical(tmp_path, model, num_steps):
    expected, _ = get_reference(model)
    make_controller(tmp_path / "stopped", 4, model).train(num_steps)

    finish(start(tmp_path / "stopped", tmp_path / "final.npz", model))

    with np.load(tmp_path / "final.npz") as final:
        assert_identical(dict(final), expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2, 8])
def test_resume_on_another_number_of_replicas_continues_alike(tmp_path, num_replicas):
    expected, _ = get_reference("cnn")
    make_controller(tmp_path / "stopped", 4, "cnn").train(23)

    resumed = make_controller(tmp_path / "stopped", num_replicas, "cnn")
    resumed.train(NUM_STEPS)

    losses = np.asarray(resumed.trainer.losses)
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-5)
    for path, value in read_state(resumed.trainer).items():
        if path.startswith("model/"):
            error = np.linalg.norm(value - expected[path])
            assert error <= 1e-5 * np.linalg.norm(expected[path]), path
    kernel = resumed.trainer.model.dense.kernel[...]
    assert len(kernel.sharding.device_set) == num_replicas


@slow_after_first(("num_loops", "delay"), [(1, 0.0), (3, 0.02), (8, 0.05)])
def test_a_killed_run_resumes_bit_identically(tmp_path, num_loops, delay):
    expected, _ = get_reference("mlp")
    child = start(tmp_path / "killed", tmp_path / "none.npz", "mlp", interval=4)
    try:
        for _ in range(num_loops):
            assert child.stdout.readline() == "loop\n"
        time.sleep(delay)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=patience(120))
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "none.npz").exists()

    resumed = make_controller(tmp_path / "killed", 4, "mlp", interval=4)
    # A save begins after the one before is on disk, so only the last two can be lost.
    assert int(resumed.trainer.optimizer.step[...]) >= 4 * (num_loops - 2)
    resumed.train(NUM_STEPS)

    assert_identical(read_state(resumed.trainer), expected)


@pytest.mark.slow
def test_restoring_compiles_nothing(tmp_path, no_retrace):
    controller = make_controller(tmp_path, 2, "mlp")
    controller.train(8)
    controller.train(12)
    expected = read_state(controller.trainer)
    first = controller.checkpoint_manager.checkpoints[0]
    controller.restore_checkpoint(first)
    controller.train(10)

    with no_retrace():
        controller.restore_checkpoint(first)
        controller.train(12, checkpoint_at_completion=False)

    assert_identical(read_state(controller.trainer), expected)
