"""A run of several processes whose steps make their own data, with Python state.

    python without_data.py SCENARIO RESULT OPTIONS

The scenario `train` trains up to `steps` in `run_dir`. Random numbers of NumPy begin
with the same seed in all processes, or with the number of the process (`own_seeds`).
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import armillary

WEIGHTS = np.array([1.0, -2.0, 3.0], "float32")


def step(state: Any) -> tuple[Any, dict[str, Any]]:
    key, now = jax.random.split(state["key"])
    inputs = jax.random.normal(now, (8, 3))

    def loss_fn(w: Any) -> Any:
        return jnp.mean((inputs @ w - inputs @ WEIGHTS) ** 2)

    gradient = armillary.all_reduce("mean", jax.grad(loss_fn)(state["w"]))
    return {"key": key, "w": state["w"] - 0.05 * gradient}, {}


def evaluate(state: Any) -> dict[str, Any]:
    return {"sum": jnp.sum(state["w"])}


def train(
    strategy: Any, run_dir: str, steps: int, *, own_seeds: bool = False
) -> dict[str, Any]:
    state = {"key": jax.random.key(0), "w": jnp.zeros(3)}
    trainer = armillary.StepTrainer(step, state, strategy=strategy)
    rng = np.random.default_rng(jax.process_index() if own_seeds else 0)
    counts = np.zeros(400)
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer, rng=rng, counts=counts), run_dir
    )
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=armillary.StepEvaluator(evaluate, trainer),
        global_step=trainer.global_step,
        strategy=strategy,
        steps_per_loop=4,
        checkpoint_manager=manager,
    )
    counts += rng.random(400)
    try:
        output = controller.train_and_evaluate(steps, eval_steps=2)
    except armillary.errors.CheckpointError as error:
        return {"error": str(error)}
    return {
        "w": np.asarray(trainer.state["w"]).tolist(),
        "sum": float(output["sum"]),
        "counts": counts.sum(),
    }


def main() -> None:
    _, scenario, result, options = sys.argv
    assert scenario == "train"
    strategy = armillary.MultiWorkerMirroredStrategy()
    found = train(strategy, **json.loads(options))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
