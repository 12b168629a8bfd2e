"""Teaches preferences to a small GPT, by direct preference optimization (DPO).

Each example has a prompt of six letters and two responses with the same letters. The
response in alphabetical order is preferred. First, a model learns to write both sorts.
It is the frozen reference. A copy of it, the policy, then learns the preferences.

    python examples/dpo.py --devices 2

It prints how often the policy prefers the right response of pairs that were held out:
50% before DPO, and over 95% after it. Run the same command again, and both trainings
continue from their last checkpoints.
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
from decoding import score
from gpt import EDGE, GPT

NUM_LETTERS = 10
SIZE = 6  # letters of a prompt, and of a response
BATCH_SIZE = 64
BETA = 0.1  # how much a policy far from the reference costs
MODEL = {"num_tokens": NUM_LETTERS + 1, "width": 32, "depth": 2, "remat": False}


def make_pairs(num_pairs: int, seed: int) -> dict[str, np.ndarray]:
    """Returns prompts with two responses: rows of `EDGE`, a prompt and a response."""
    rng = np.random.default_rng(seed)
    letters = np.tile(np.arange(1, NUM_LETTERS + 1), (num_pairs, 1))
    prompts = rng.permuted(letters, axis=1)[:, :SIZE]
    chosen = np.sort(prompts, axis=1)
    rejected = rng.permuted(chosen, axis=1)
    edges = np.full((num_pairs, 1), EDGE)
    pairs = {
        "chosen": np.concatenate([edges, prompts, chosen], axis=1),
        "rejected": np.concatenate([edges, prompts, rejected], axis=1),
    }
    is_pair = np.any(chosen != rejected, axis=1)  # not shuffled into order
    return {name: rows[is_pair].astype(np.int32) for name, rows in pairs.items()}


def score_pairs(model: GPT, pairs: dict) -> tuple[jax.Array, jax.Array]:
    """Returns the log-likelihoods of the chosen and of the rejected responses."""
    tokens = jnp.concatenate([pairs["chosen"], pairs["rejected"]])
    weights = jnp.ones(tokens.shape).at[:, : 1 + SIZE].set(0)  # of the prompt
    chosen, rejected = jnp.split(score(model, tokens, weights), 2)
    return chosen, rejected


def imitate(model: GPT, _state: dict, pairs: dict) -> tuple[jax.Array, dict]:
    """Returns the negative log-likelihood of both responses, for each pair."""
    chosen, rejected = score_pairs(model, pairs)
    return -(chosen + rejected) / 2, {}


def prefer(model: GPT, state: dict, pairs: dict) -> tuple[jax.Array, dict]:
    """Returns the loss of DPO, and whether the policy prefers the chosen response.

    The loss is equation 7 of Rafailov et al. (2023), "Direct Preference Optimization:
    Your Language Model is Secretly a Reward Model", arXiv:2305.18290. A policy that
    equals the reference prefers half of the responses.
    """
    reference = nnx.merge(nnx.graphdef(model), state["reference"])
    chosen, rejected = score_pairs(model, pairs)
    old_chosen, old_rejected = score_pairs(reference, pairs)
    margins = BETA * ((chosen - old_chosen) - (rejected - old_rejected))
    accuracy = (1 + jnp.sign(margins)) / 2
    return -nnx.log_sigmoid(margins), {"accuracy": accuracy, "margin": margins}


def make_trainer(
    compute_losses: Callable[[GPT, dict, dict], tuple[jax.Array, dict]],
    graph: nnx.GraphDef,
    state: dict,
    strategy: armillary.distribute.Strategy,
) -> tuple[armillary.StepTrainer, armillary.StepEvaluator]:
    """Returns a trainer of the policy in a state, and an evaluator on other pairs.

    Args:
        compute_losses: `imitate` or `prefer`: a function of a policy, the state and
            pairs. It returns a loss for each pair, and metrics.
        graph: The structure of the policy.
        state: The arrays of the `policy`, and of the `reference` if there is one.
        strategy: The strategy.
    """
    optimizer = optax.adam(1e-3)

    def step(state: dict, pairs: dict) -> tuple[dict, dict]:
        def loss_fn(policy: nnx.State) -> tuple[jax.Array, dict]:
            losses, metrics = compute_losses(nnx.merge(graph, policy), state, pairs)
            return jnp.mean(losses), {"loss": losses, **metrics}

        policy = state["policy"]
        gradients, metrics = jax.grad(loss_fn, has_aux=True)(policy)
        gradients = armillary.all_reduce("mean", gradients)
        updates, moments = optimizer.update(gradients, state["moments"])
        policy = optax.apply_updates(policy, updates)
        return {**state, "policy": policy, "moments": moments}, metrics

    def evaluate(state: dict, pairs: dict) -> dict:
        model = nnx.merge(graph, state["policy"])
        losses, metrics = compute_losses(model, state, pairs)
        return {"loss": losses, **metrics}

    state = {**state, "moments": strategy.make(optimizer.init, state["policy"])}
    source = armillary.data.from_arrays(
        make_pairs(2000, seed=0), batch_size=BATCH_SIZE, shuffle_seed=0, repeat=True
    )
    held_out = armillary.data.from_arrays(make_pairs(300, seed=1), batch_size=100)
    trainer = armillary.StepTrainer(step, state, source, strategy=strategy)
    return trainer, armillary.StepEvaluator(evaluate, trainer, held_out)


def train(
    trainer: armillary.StepTrainer,
    evaluator: armillary.StepEvaluator,
    run_dir: Path,
    num_steps: int,
) -> dict:
    """Trains up to a step, and returns the metrics of the evaluation."""
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=evaluator,
        global_step=trainer.global_step,
        steps_per_loop=50,
        summary_dir=run_dir / "train",
        eval_summary_dir=run_dir / "eval",
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer),
            run_dir / "checkpoints",
            checkpoint_interval=100,
        ),
    )
    return controller.train_and_evaluate(train_steps=num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="Teaches preferences by DPO.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/dpo"))
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    strategy = armillary.MirroredStrategy()
    model = strategy.make(lambda: GPT(**MODEL, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(model)
    base, evaluator = make_trainer(imitate, graph, {"policy": parameters}, strategy)
    train(base, evaluator, options.run_dir / "reference", options.steps)

    reference = base.state["policy"]
    state = {"policy": jax.tree.map(jnp.copy, reference), "reference": reference}
    trainer, evaluator = make_trainer(prefer, graph, state, strategy)
    before = evaluator.evaluate(-1)
    after = train(trainer, evaluator, options.run_dir / "policy", options.steps)
    print(f"Preference accuracy {before['accuracy']:.2%} before DPO")
    print(f"Preference accuracy {after['accuracy']:.2%}, margin {after['margin']:.2f}")


if __name__ == "__main__":
    main()
