"""Responses depend on the step and the prompt alone, and the reward rises."""

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

policy_gradient = load_example("policy_gradient")
decoding = load_example("decoding")
NUM_STEPS = 3


def read(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def test_rewards_count_letters_that_follow_the_letter_before_them():
    last = policy_gradient.NUM_LETTERS
    sequences = [
        [1, 2, 3, 4, 5, 6, 7],
        [last, 1, 2, 3, 3, 3, 4],
        [3, 3, 3, 3, 3, 3, 3],
        [1, 0, 1, 2, 0, 0, 1],
    ]
    rewards = policy_gradient.compute_rewards(jnp.array(sequences))
    # An edge is no letter, but a letter may follow it: the first of the alphabet.
    np.testing.assert_allclose(rewards, [1, 4 / 6, 0, 3 / 6], rtol=1e-6)


def test_advantages_compare_a_response_with_its_group():
    rewards = jnp.array([[0.0, 1.0, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0]])
    found = policy_gradient.compare_in_groups(rewards)
    deviation = np.std([0.0, 1.0, 0.5, 0.5]) + 1e-4
    expected = np.array([[-0.5, 0.5, 0, 0], [0, 0, 0, 0]]) / deviation
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@functools.cache
def train(name):
    """Returns the reward of each step, and the trained policy's scores of some rows.

    The policy itself is no measure: Adam makes a step of full size from the rounding of
    a gradient of zero, such as the gradient of the biases of keys.
    """
    trainer, _ = policy_gradient.make_trainer(STRATEGIES[name](), batch_size=8)
    rewards = [float(trainer.train(1)["reward"]) for _ in range(NUM_STEPS)]

    with nnx.use_eager_sharding(False):
        graph = nnx.graphdef(policy_gradient.make_policy())
    parameters = jax.tree.map(np.asarray, trainer.state["policy"])
    rows = np.random.default_rng(0).integers(1, 9, size=(8, 7))
    policy = nnx.merge(graph, parameters)
    scores = nnx.jit(decoding.score)(policy, rows, np.ones(rows.shape))
    return rewards, np.asarray(scores)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_any_devices_draw_the_responses_of_one_device(name):
    expected_rewards, expected_scores = train("one device")
    rewards, scores = train(name)
    # A reward is a mean of 768 letters, so one other letter would show.
    np.testing.assert_allclose(rewards, expected_rewards, rtol=1e-6)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-4)


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_responses(tmp_path):
    def make_trainer():
        strategy = STRATEGIES["one device"]()
        return policy_gradient.make_trainer(strategy, batch_size=8)[0]

    trainer = make_trainer()
    trainer.train(2)
    path = armillary.Checkpoint(trainer=trainer).write(tmp_path / "saved")
    reward = float(trainer.train(2)["reward"])

    resumed = make_trainer()
    armillary.Checkpoint(trainer=resumed).restore(path)
    assert float(resumed.train(2)["reward"]) == reward
    for expected, found in zip(read(trainer.state), read(resumed.state), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_the_program_raises_the_reward_and_continues(tmp_path):
    arguments = ("--run-dir", tmp_path, "--steps")
    run_well("policy_gradient.py", *arguments, 50)
    result = run_well("policy_gradient.py", *arguments, 100)
    assert read_steps(result.stderr) == [75, 100]
    before, after = re.findall(r"reward is ([\d.]+) .*, ([\d.]+)", result.stdout)[0]
    assert float(before) < 0.3
    assert float(after) > 0.8
