"""Trains a small GPT by policy gradients, on responses that it writes itself (GRPO).

Each step takes prompts of one letter. The current policy writes a group of responses
to each prompt, with a key-value cache. A function gives each response a reward: the
share of its letters that follow the letter before them in the alphabet. Responses that
are better than the rest of their group become more likely.

    python examples/policy_gradient.py --devices 2

Samples depend on the step and on the number of the prompt, so any number of devices
draws the same responses. It prints the reward before training and after it. Run the
same command again, and training continues from the last checkpoint.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import armillary
from decoding import Sampling, generate, make_keys, score
from gpt import GPT

NUM_LETTERS = 8
SIZE = 6  # letters of a response
GROUP = 16  # responses to a prompt
MODEL = {"num_tokens": NUM_LETTERS + 1, "width": 32, "depth": 2, "remat": False}


def make_policy() -> GPT:
    """Returns a policy that writes every letter with about the same probability.

    The embedding of tokens is also the last layer, so a new GPT repeats its last token.
    Then the groups would hold too few other letters to learn from.
    """
    model = GPT(**MODEL, rngs=nnx.Rngs(0))
    model.norm.scale[...] *= 0.1
    return model


def compute_rewards(tokens: jax.Array) -> jax.Array:
    """Returns a reward from 0 to 1 for each sequence, `(batch,)`.

    It is the share of the letters that follow the letter before them. After the last
    letter of the alphabet comes the first. Token 0 is no letter.
    """
    expected = tokens[:, :-1] % NUM_LETTERS + 1
    return jnp.mean(tokens[:, 1:] == expected, axis=1)


def respond(
    policy: GPT, letters: jax.Array, keys: jax.Array, sampling: Sampling
) -> jax.Array:
    """Returns the prompts with responses of a policy: `(batch, 1 + SIZE)`."""
    prompts = letters[:, None]
    sizes = jnp.ones_like(letters)
    responses = generate(policy, prompts, sizes, keys, SIZE, sampling)
    return jnp.concatenate([prompts, responses], axis=1)


def compare_in_groups(rewards: jax.Array) -> jax.Array:
    """Returns how much better each reward is than the mean of its group.

    The unit is the standard deviation of the group, as in section 4.1 of Shao et al.
    (2024), "DeepSeekMath", arXiv:2402.03300. The shape is `(prompts, GROUP)`.
    """
    means = jnp.mean(rewards, axis=1, keepdims=True)
    deviations = jnp.std(rewards, axis=1, keepdims=True)
    return (rewards - means) / (deviations + 1e-4)


def make_step(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation
) -> Callable[[dict, dict], tuple[dict, dict]]:
    """Returns the step, which draws responses and makes the better ones more likely."""
    seed = jax.random.key(1)

    def step(state: dict, batch: dict) -> tuple[dict, dict]:
        # A key for each response: not the keys of a replica, which would depend on the
        # number of replicas.
        numbers = batch["number"][:, None] * GROUP + jnp.arange(GROUP)[None]
        step_key = jax.random.fold_in(seed, state["step"])
        keys = make_keys(step_key, numbers.ravel())
        letters = jnp.repeat(batch["letter"], GROUP)
        policy = nnx.merge(graph, state["policy"])
        tokens = respond(policy, letters, keys, Sampling())

        rewards = compute_rewards(tokens).reshape(-1, GROUP)
        advantages = compare_in_groups(rewards).ravel()

        # Each response is used once, so the ratio of new and old probabilities is 1,
        # and nothing is clipped.
        def loss_fn(policy: nnx.State) -> jax.Array:
            weights = jnp.ones(tokens.shape)
            likelihoods = score(nnx.merge(graph, policy), tokens, weights)
            return -jnp.mean(advantages * likelihoods) / SIZE

        gradients = armillary.all_reduce("mean", jax.grad(loss_fn)(state["policy"]))
        updates, moments = optimizer.update(gradients, state["moments"])
        state = {
            "policy": optax.apply_updates(state["policy"], updates),
            "moments": moments,
            "step": state["step"] + 1,
        }
        return state, {"reward": rewards}

    return step


def make_trainer(
    strategy: armillary.distribute.Strategy, batch_size: int
) -> tuple[armillary.StepTrainer, armillary.StepEvaluator]:
    """Returns a trainer, and an evaluator of the best response to each letter."""
    graph, policy = nnx.split(strategy.make(make_policy))
    optimizer = optax.adam(3e-3)
    state = {
        "policy": policy,
        "moments": strategy.make(optimizer.init, policy),
        "step": jnp.zeros((), jnp.int32),
    }

    def evaluate(state: dict, batch: dict) -> dict:
        policy = nnx.merge(graph, state["policy"])
        keys = make_keys(jax.random.key(0), batch["number"])  # which greedy ignores
        tokens = respond(policy, batch["letter"], keys, Sampling(temperature=0.0))
        return {"reward": compute_rewards(tokens)}

    numbers = np.arange(8 * NUM_LETTERS, dtype=np.int32)
    prompts = {"number": numbers, "letter": 1 + numbers % NUM_LETTERS}
    source = armillary.data.from_arrays(
        prompts, batch_size=batch_size, shuffle_seed=0, repeat=True
    )
    trainer = armillary.StepTrainer(
        make_step(graph, optimizer), state, source, strategy=strategy
    )
    each_letter = {name: rows[:NUM_LETTERS] for name, rows in prompts.items()}
    letters = armillary.data.from_arrays(each_letter, batch_size=NUM_LETTERS)
    return trainer, armillary.StepEvaluator(evaluate, trainer, letters)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a GPT by policy gradients.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/policy_gradient"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--prompts", type=int, default=16, help="in each step")
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    strategy = armillary.MirroredStrategy()
    trainer, evaluator = make_trainer(strategy, options.prompts)
    before = evaluator.evaluate(-1)["reward"]
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=evaluator,
        global_step=trainer.global_step,
        steps_per_loop=25,
        summary_dir=options.run_dir / "train",
        eval_summary_dir=options.run_dir / "eval",
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer),
            options.run_dir / "checkpoints",
            checkpoint_interval=50,
        ),
    )
    after = controller.train_and_evaluate(train_steps=options.steps)["reward"]
    print(f"The reward is {before:.2f} before training, {after:.2f} after it")


if __name__ == "__main__":
    main()
