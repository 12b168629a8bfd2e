"""Learns to balance a pole on a cart by policy gradients, without a dataset.

Every training step plays its own episodes, on all replicas at once: CartPole, the
environment of Barto, Sutton and Anderson (1983), is written with `jax.numpy` and runs
inside the step. An episode lasts at most 200 moves, and each of them is worth 1.

    python examples/reinforcement.py --devices 2

It prints the moves of an average episode after each loop, and reaches 200 of 200.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import armillary

NUM_MOVES = 200
DISCOUNT = 0.99


class Policy(nnx.Module):
    """Decides between a push to the left and one to the right."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 32, rngs=rngs)
        self.output = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, states: jax.Array) -> jax.Array:
        """Returns the logits, `(...)`, of pushing right in the states, `(..., 4)`."""
        return self.output(nnx.tanh(self.hidden(states)))[..., 0]


def move(states: jax.Array, pushes_right: jax.Array) -> jax.Array:
    """Returns the states of carts 0.02 seconds after a push.

    A state is the position of the cart, its velocity, the angle of the pole and its
    angular velocity: shape `(..., 4)`.
    """
    _, velocity, angle, spin = jnp.moveaxis(states, -1, 0)
    force = jnp.where(pushes_right, 10.0, -10.0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    # A cart of 1 kg; a pole of 0.1 kg, whose center is 0.5 m from the cart.
    push = (force + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    acceleration = push - 0.05 * turn * cos / 1.1
    rates = jnp.stack([velocity, acceleration, spin, turn], axis=-1)
    return states + 0.02 * rates


def has_fallen(states: jax.Array) -> jax.Array:
    """Returns whether carts left the track, or their poles lean over 12 degrees."""
    return (abs(states[..., 0]) > 2.4) | (abs(states[..., 2]) > jnp.deg2rad(12.0))


def play(policy: Policy, starts: jax.Array, draws: jax.Array) -> tuple:
    """Plays one episode from each start.

    Args:
        policy: Makes the moves.
        starts: First states, `(episodes, 4)`.
        draws: Uniform random numbers that decide the moves, `(NUM_MOVES, episodes)`.

    Returns:
        The states before each move, the moves, and whether they count: they do until
        the pole falls. The first axis of each is the move.
    """

    def step(carry, draw):
        states, is_up = carry
        pushes_right = draw < nnx.sigmoid(policy(states))
        after = move(states, pushes_right)
        return (after, is_up & ~has_fallen(after)), (states, pushes_right, is_up)

    return jax.lax.scan(step, (starts, ~has_fallen(starts)), draws)[1]


def discounted_sums(rewards: jax.Array) -> jax.Array:
    """Returns, for each move, the discounted sum of the rewards from there on."""

    def step(total, reward):
        total = reward + DISCOUNT * total
        return total, total

    return jax.lax.scan(step, jnp.zeros_like(rewards[0]), rewards, reverse=True)[1]


class Trainer(armillary.StandardTrainer):
    """Trains a policy; each loop reports how many moves its episodes lasted.

    There is no dataset, so the step never calls `next(iterator)`.
    """

    def __init__(
        self,
        strategy: armillary.distribute.Strategy,
        policy: Policy,
        optimizer: nnx.Optimizer[Policy],
        *,
        num_episodes: int,
    ) -> None:
        super().__init__(None)
        self.strategy = strategy
        self.policy = policy
        self.optimizer = optimizer
        self.num_episodes = num_episodes // strategy.num_replicas_in_sync
        self.rngs = nnx.Rngs(1)
        self.num_moves = nnx.metrics.Average("num_moves")

    def train_loop_begin(self) -> None:
        self.num_moves.reset()

    def train_step(self, iterator) -> None:
        del iterator
        self.strategy.run(self.improve)

    def train_loop_end(self) -> dict:
        return {"num_moves": self.num_moves.compute()}

    def improve(self) -> None:
        """Plays this replica's episodes, and makes good moves more likely."""
        # Each replica draws numbers of its own.
        starts = self.rngs.uniform((self.num_episodes, 4), minval=-0.05, maxval=0.05)
        draws = self.rngs.uniform((NUM_MOVES, self.num_episodes))
        states, pushes_right, counts = play(self.policy, starts, draws)

        # A move is good if more follows than on average over the episodes that have
        # come as far, on all replicas.
        rewards = counts.astype("float32")
        future = discounted_sums(rewards)
        sums = jnp.sum(future, axis=1), jnp.sum(rewards, axis=1)
        sums = armillary.all_reduce("sum", sums)
        average = sums[0] / jnp.maximum(sums[1], 1.0)
        advantages = rewards * (future - average[:, None])

        def loss_fn(policy):
            surprises = optax.sigmoid_binary_cross_entropy(policy(states), pushes_right)
            return jnp.mean(surprises * advantages)

        gradients = armillary.all_reduce("mean", nnx.grad(loss_fn)(self.policy))
        self.optimizer.update(self.policy, gradients)
        self.num_moves.update(num_moves=jnp.sum(rewards, axis=0))


class Evaluator(armillary.AbstractEvaluator):
    """Reports how long episodes last in which the policy makes its preferred moves."""

    def __init__(self, policy: Policy, *, num_episodes: int = 100) -> None:
        self.policy = policy
        self.starts = jax.random.uniform(
            jax.random.key(2), (num_episodes, 4), minval=-0.05, maxval=0.05
        )

    def evaluate(self, num_steps: int) -> dict:
        del num_steps  # There are no batches to count.
        return {"num_moves": self.play_all()}

    @armillary.function
    def play_all(self) -> jax.Array:
        draws = jnp.full((NUM_MOVES, len(self.starts)), 0.5)
        _, _, counts = play(self.policy, self.starts, draws)
        return jnp.mean(jnp.sum(counts, axis=0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Learns to balance a pole.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--episodes", type=int, default=32, help="in each step")
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    strategy = armillary.MirroredStrategy()
    num_replicas = strategy.num_replicas_in_sync
    if options.episodes < 1 or options.episodes % num_replicas:
        parser.error(f"--episodes must be a multiple of {num_replicas}, the devices")
    with strategy.scope():
        policy = Policy(nnx.Rngs(0))
        optimizer = nnx.Optimizer(policy, optax.adam(1e-2), wrt=nnx.Param)
    controller = armillary.Controller(
        trainer=Trainer(strategy, policy, optimizer, num_episodes=options.episodes),
        evaluator=Evaluator(policy),
        global_step=optimizer.step,
        strategy=strategy,
        steps_per_loop=20,
    )
    before = controller.evaluate()["num_moves"]
    after = controller.train_and_evaluate(train_steps=options.steps)["num_moves"]
    print(f"Episodes last {before:.0f} moves before training, {after:.0f} after it")


if __name__ == "__main__":
    main()
