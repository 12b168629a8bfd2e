"""The program of several processes that train a GPT, or models that are drawn."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import armillary
from tests.distribute import generated_models as generated
from tests.examples.loading import load_example
from tests.multiprocess.scenarios import run_scenario

NUM_STEPS = 4
MODEL = {"num_tokens": 9, "width": 16, "depth": 2, "remat": True}


def train_gpt(strategy: Any, num_parts: int = 1) -> list[float]:
    """Returns the loss of each step."""
    gpt = load_example("gpt")
    rng = np.random.default_rng(0)
    lengths = range(20, 120)
    rows = gpt.pack([rng.integers(1, 9, size=length) for length in lengths])
    trainer, _ = gpt.make_trainer(strategy, rows, MODEL, NUM_STEPS, num_parts)
    return [float(trainer.train(1)["loss"]) for _ in range(NUM_STEPS)]


def gpt() -> dict[str, Any]:
    """Trains on meshes of all processes, with fast and with slow links."""
    count = jax.process_count
    rules = load_example("gpt").LOGICAL_RULES
    fsdp = armillary.ShardedStrategy(logical_rules=rules)
    found = {"fsdp": train_gpt(fsdp)}
    both = armillary.ShardedStrategy(
        {"fsdp": count(), "tensor": 2}, logical_rules=rules
    )
    found["fsdp and tensor"] = train_gpt(both, num_parts=2)
    hybrid = armillary.ShardedStrategy(
        {"data": count(), "fsdp": 2}, dcn={"data": count()}, logical_rules=rules
    )
    found["hybrid"] = train_gpt(hybrid, num_parts=2)
    return found


def drawn(seeds: list[int]) -> dict[str, Any]:
    """Trains drawn models, and returns losses and arrays in wrong places."""
    armillary.ShardedStrategy()  # Joins the processes.
    sizes = {"data": jax.process_count(), "model": 2}
    found: dict[str, Any] = {}
    for seed in seeds:
        model = generated.draw(seed, sizes)
        for library, make in generated.LIBRARIES.items():
            kinds = (jax.sharding.AxisType.Explicit,) * 2
            mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
            strategy = generated.make_strategy(library, model, mesh)
            trained = make(strategy, model, jnp.float32)
            losses = trained.train(NUM_STEPS)
            misplaced = generated.find_misplaced(model, trained, strategy.mesh)
            found[f"{library} {seed}"] = {"losses": losses, "misplaced": misplaced}
    return found


if __name__ == "__main__":
    run_scenario(globals())
