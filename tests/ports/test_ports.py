"""Public training programs: their ports train to the losses of the original loops."""

import functools
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import armillary
from tests.environment import REPOSITORY
from tests.patience import patience
from tests.ports import (
    byol,
    clip,
    dcgan,
    dqn,
    imagenet,
    keras_stateless,
    lm1b,
    lookahead,
    multi_steps,
    nnx_mnist,
    nnx_own_optimizer,
    orbit_resnet,
    ppo,
    private_sgd,
    score_diffusion,
    vae,
    vision_transformer,
    vq_vae,
)
from tests.ports.port import Port, Result
from tests.problems import assert_identical, read_state

PORTS = {
    "byol": byol.PORT,
    "clip": clip.PORT,
    "dcgan": dcgan.PORT,
    "dqn": dqn.PORT,
    "imagenet": imagenet.PORT,
    "imagenet_float16": imagenet.HALF_PORT,
    "keras_stateless": keras_stateless.PORT,
    "lm1b": lm1b.PORT,
    "lookahead": lookahead.PORT,
    "multi_steps": multi_steps.PORT,
    "nnx_mnist": nnx_mnist.PORT,
    "nnx_own_optimizer": nnx_own_optimizer.PORT,
    "orbit_resnet": orbit_resnet.PORT,
    "ppo": ppo.PORT,
    "private_sgd": private_sgd.PORT,
    "score_diffusion": score_diffusion.PORT,
    "vae": vae.PORT,
    "vision_transformer": vision_transformer.PORT,
    "vq_vae": vq_vae.PORT,
}
# Its first setup stays in the short tier.
QUICK = ("imagenet",)
SETUPS = ("one device", "four mirrored", "four sharded")


@pytest.fixture(autouse=True)
def as_programs_are_written() -> Iterator[None]:
    """Allows arrays of different ranks in one operation, as JAX does by default."""
    with jax.numpy_rank_promotion("allow"):
        yield


def make_strategy(port: Port, setup: str) -> armillary.distribute.Strategy:
    devices = jax.devices()[:4]
    names = {"axis_name": port.axis_name}
    if setup == "one device":
        return armillary.OneDeviceStrategy("cpu:0", **names)
    if setup == "four mirrored":
        return armillary.MirroredStrategy(devices, **names)
    mesh_shape = port.mesh_shape or {"data": 2, "fsdp": 2}
    return armillary.ShardedStrategy(
        dict(mesh_shape), rules=port.rules, devices=devices, **names
    )


@functools.cache
def run_original(name: str, num_replicas: int) -> Result:
    return PORTS[name].run_original(num_replicas)


def make_cases() -> Iterator[object]:
    for name, setup in itertools.product(PORTS, SETUPS):
        is_quick = name in QUICK and setup == SETUPS[0]
        marks = [] if is_quick else [pytest.mark.slow]
        yield pytest.param(name, setup, marks=marks, id=f"{name}-{setup}")


@pytest.mark.parametrize(("name", "setup"), [*make_cases()])
def test_a_port_has_the_losses_of_its_original(name, setup):
    port = PORTS[name]
    strategy = make_strategy(port, setup)
    original = run_original(name, strategy.num_replicas_in_sync)

    trainer = port.make_trainer(strategy)
    losses = [float(trainer.train(1)["loss"]) for _ in range(port.num_steps)]

    tolerance = 0 if setup in port.exact else port.tolerance
    np.testing.assert_allclose(losses, original.losses, rtol=tolerance)
    assert len(set(losses)) == port.num_steps
    if port.make_evaluator is None:
        return
    output = port.make_evaluator(trainer).evaluate(-1)
    assert output.keys() == original.evaluation.keys()
    for metric, value in original.evaluation.items():
        np.testing.assert_allclose(output[metric], value, rtol=port.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", PORTS)
def test_a_port_that_is_stopped_and_resumed_is_one_that_was_not(name, tmp_path):
    port = PORTS[name]
    strategy = make_strategy(port, "four mirrored")

    def train(folder, *stops):
        state, begun_at = {}, 0
        for stop in stops:
            trainer = port.make_trainer(strategy)
            controller = armillary.Controller(
                trainer=trainer,
                global_step=trainer.global_step,
                steps_per_loop=2,
                checkpoint_manager=armillary.CheckpointManager(
                    port.make_checkpoint(trainer), tmp_path / folder
                ),
            )
            assert int(trainer.global_step[...]) == begun_at
            controller.train(stop)
            state, begun_at = read_state(trainer), stop
        return state

    assert_identical(train("stopped", 2, 4), train("not", 4))


@pytest.mark.slow
def test_a_port_that_is_killed_is_one_that_was_not(tmp_path):
    def train(folder, *arguments):
        result = tmp_path / f"{folder}.npz"
        command = [sys.executable, "-m", "tests.ports.train_and_kill"]
        process = subprocess.run(
            [*command, tmp_path / folder, result, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "JAX_NUMPY_RANK_PROMOTION": "allow"},
            timeout=patience(120),
        )
        return process.returncode, result

    assert train("killed", "5")[0] == -signal.SIGKILL
    again, resumed = train("killed")
    once, whole = train("whole")
    assert again == once == 0
    with np.load(resumed) as actual, np.load(whole) as expected:
        assert (actual["begun_at"], expected["begun_at"]) == (3, 0)
        paths = [path for path in expected.files if path != "begun_at"]
        assert_identical(
            {path: actual[path] for path in paths},
            {path: expected[path] for path in paths},
        )
