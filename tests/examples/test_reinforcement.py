"""CartPole and the sums of rewards, against the same in plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from tests.examples.loading import load_example

reinforcement = load_example("reinforcement")


def push(state: list[float], force: float) -> list[float]:
    """Returns the state 0.02 seconds later, by the equations of Barto et al."""
    _, x_dot, theta, theta_dot = state
    gravity, cart, pole, half_length = 9.8, 1.0, 0.1, 0.5
    turn = gravity * math.sin(theta) + math.cos(theta) * (
        (-force - pole * half_length * theta_dot**2 * math.sin(theta)) / (cart + pole)
    )
    turn /= half_length * (4 / 3 - pole * math.cos(theta) ** 2 / (cart + pole))
    shift = theta_dot**2 * math.sin(theta) - turn * math.cos(theta)
    acceleration = (force + pole * half_length * shift) / (cart + pole)
    rates = [x_dot, acceleration, theta_dot, turn]
    return [value + 0.02 * rate for value, rate in zip(state, rates, strict=True)]


@pytest.mark.slow
def test_cart_moves_as_the_equations_say():
    rng = np.random.default_rng(0)
    states = rng.uniform(-1.0, 1.0, (20, 4))
    pushes_right = rng.random(20) < 0.5
    moved = reinforcement.move(jnp.asarray(states), jnp.asarray(pushes_right))
    for state, is_right, found in zip(states, pushes_right, moved, strict=True):
        expected = push(list(state), 10.0 if is_right else -10.0)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_rewards_to_come_are_discounted():
    rewards = np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]], "float32")
    sums = reinforcement.discounted_sums(jnp.asarray(rewards))
    expected = [[1 + 0.99 + 0.99**2, 1 + 0.99], [1 + 0.99, 1], [1, 0], [0, 0]]
    np.testing.assert_allclose(sums, expected, rtol=1e-6)


@pytest.mark.slow
def test_moves_count_until_the_pole_falls():
    policy = reinforcement.Policy(nnx.Rngs(0))
    starts = jnp.array([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.3, 0.0]])
    draws = jnp.full((reinforcement.NUM_MOVES, 2), -1.0)  # always to the right
    _, pushes_right, counts = reinforcement.play(policy, starts, draws)
    assert pushes_right.all()

    state, num_moves = [0.0] * 4, 0
    while abs(state[0]) <= 2.4 and abs(state[2]) <= math.radians(12):
        state, num_moves = push(state, 10.0), num_moves + 1
    assert counts[:num_moves, 0].all() and not counts[num_moves:, 0].any()
    assert not counts[:, 1].any()  # It had fallen before the first move.


@pytest.mark.slow
def test_replicas_play_different_episodes_and_agree_on_the_policy():
    strategy = armillary.MirroredStrategy(jax.devices("cpu")[:4])
    policy = reinforcement.Policy(nnx.Rngs(0))
    optimizer = nnx.Optimizer(policy, reinforcement.optax.adam(1e-2), wrt=nnx.Param)
    trainer = reinforcement.Trainer(strategy, policy, optimizer, num_episodes=16)
    starts = strategy.run(lambda: trainer.rngs.uniform((4,)))
    assert len({float(part[0]) for part in strategy.local_results(starts)}) == 4

    first = trainer.train(5)["num_moves"]
    assert trainer.num_moves.count[...] == 5 * 16
    assert optimizer.step[...] == 5
    later = trainer.train(40)["num_moves"]
    assert float(later) > 2 * float(first)
