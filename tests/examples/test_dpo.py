"""DPO's loss is its formula, the reference stays, and devices change no number."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from tests.examples.loading import load_example
from tests.examples.running import read_steps, run_well
from tests.examples.strategies import SEVERAL, STRATEGIES

dpo = load_example("dpo")
decoding = load_example("decoding")
NUM_STEPS = 4


@functools.cache
def make_models():
    """Returns the structure of a model, and two sets of parameters."""
    with nnx.use_eager_sharding(False):
        models = [dpo.GPT(**dpo.MODEL, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
        graph, _ = nnx.split(models[0])
        return graph, *(nnx.state(model) for model in models)


def make_trainer(name="one device"):
    strategy = STRATEGIES[name]()

    def make(seed):
        return lambda: dpo.GPT(**dpo.MODEL, rngs=nnx.Rngs(seed))

    graph, policy = nnx.split(strategy.make(make(0)))
    reference = nnx.state(strategy.make(make(1)))
    state = {"policy": policy, "reference": reference}
    return dpo.make_trainer(dpo.prefer, graph, state, strategy)


def read(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def test_pairs_have_the_letters_of_their_prompt():
    pairs = dpo.make_pairs(50, seed=0)
    prompts = pairs["chosen"][:, 1 : 1 + dpo.SIZE]
    np.testing.assert_array_equal(pairs["rejected"][:, 1 : 1 + dpo.SIZE], prompts)
    chosen = pairs["chosen"][:, 1 + dpo.SIZE :]
    rejected = pairs["rejected"][:, 1 + dpo.SIZE :]
    np.testing.assert_array_equal(chosen, np.sort(prompts, axis=1))
    np.testing.assert_array_equal(np.sort(rejected, axis=1), chosen)
    assert np.all(np.any(chosen != rejected, axis=1))


def test_the_loss_is_the_formula_of_the_paper():
    graph, policy, reference = make_models()
    pairs = dpo.make_pairs(5, seed=0)
    losses, metrics = dpo.prefer(
        nnx.merge(graph, policy), {"reference": reference}, pairs
    )

    weights = np.zeros(pairs["chosen"].shape)
    weights[:, 1 + dpo.SIZE :] = 1
    logs = {
        (name, kind): np.asarray(
            decoding.score(nnx.merge(graph, parameters), pairs[kind], weights)
        )
        for name, parameters in (("policy", policy), ("reference", reference))
        for kind in pairs
    }
    ratios = {
        kind: logs["policy", kind] - logs["reference", kind]
        for kind in ("chosen", "rejected")
    }
    margins = 0.1 * (ratios["chosen"] - ratios["rejected"])
    np.testing.assert_allclose(metrics["margin"], margins, rtol=1e-4, atol=1e-5)
    expected = np.log1p(np.exp(-margins))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(metrics["accuracy"], margins > 0)


def test_a_policy_that_equals_the_reference_prefers_half():
    graph, policy, _ = make_models()
    pairs = dpo.make_pairs(5, seed=0)
    losses, metrics = dpo.prefer(nnx.merge(graph, policy), {"reference": policy}, pairs)
    np.testing.assert_array_equal(metrics["accuracy"], 0.5)
    np.testing.assert_allclose(losses, np.log(2), rtol=1e-6)


@functools.cache
def train(name):
    """Returns the loss of each step, and the metrics of the evaluation."""
    trainer, evaluator = make_trainer(name)
    losses = [float(trainer.train(1)["loss"]) for _ in range(NUM_STEPS)]
    return losses, evaluator.evaluate(-1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_losses_are_the_losses_of_one_device(name):
    expected, result = train("one device")
    assert expected[-1] < expected[0]
    losses, found = train(name)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert found == pytest.approx(result, rel=1e-4)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_and_the_reference_stays(tmp_path):
    trainer, _ = make_trainer()
    before = read(trainer.state["reference"])
    trainer.train(2)
    path = armillary.Checkpoint(trainer=trainer).write(tmp_path / "saved")
    trainer.train(2)

    resumed, _ = make_trainer()
    resumed.state = {
        **resumed.state,
        "reference": jax.tree.map(jnp.zeros_like, resumed.state["reference"]),
    }
    armillary.Checkpoint(trainer=resumed).restore(path)
    resumed.train(2)
    for expected, found in zip(read(trainer.state), read(resumed.state), strict=True):
        np.testing.assert_array_equal(found, expected)
    for expected, found in zip(before, read(resumed.state["reference"]), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_the_program_learns_the_preferences_and_continues(tmp_path):
    arguments = ("--run-dir", tmp_path, "--steps")
    run_well("dpo.py", *arguments, 50)
    result = run_well("dpo.py", *arguments, 100)
    assert read_steps(result.stderr) == [100, 100]
    before, after = re.findall(r"Preference accuracy ([\d.]+)%", result.stdout)
    assert float(before) == 50.0
    assert float(after) > 80.0
