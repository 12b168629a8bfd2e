"""A program that trains and evaluates an estimator in each process of a job."""

import json
import sys
from pathlib import Path
from typing import Any

import armillary
from armillary import estimator
from tests.estimator.problems import (
    BATCH_SIZE,
    X,
    Y,
    batches_of,
    features_of,
    linear_model_fn,
)

MAX_STEPS = 8


def input_fn(input_context: armillary.data.InputContext) -> list[Any]:
    """Returns every batch in one process, and every n-th one in one of n."""
    batches = [(features_of(x), y) for x, y in batches_of(X, Y, BATCH_SIZE)]
    start, step = input_context.input_pipeline_id, input_context.num_input_pipelines
    return batches[start::step]


def run(
    folder: Path, strategy: armillary.distribute.Strategy, *, evaluates: bool = False
) -> Any:
    """Returns what `train_and_evaluate` does, or `evaluate` if that is nothing."""
    config = estimator.RunConfig(
        train_distribute=strategy,
        save_checkpoints_steps=4,
        log_step_count_steps=4,
        save_summary_steps=None,
    )
    made = estimator.Estimator(linear_model_fn, folder / "model", config)
    result, _ = estimator.train_and_evaluate(
        made,
        estimator.TrainSpec(input_fn, max_steps=MAX_STEPS),
        estimator.EvalSpec(input_fn, steps=None),
    )
    return made.evaluate(input_fn) if result is None and evaluates else result


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    strategy = armillary.MultiWorkerMirroredStrategy()
    result = run(folder, strategy, evaluates=sys.argv[2] == "True")
    plan = strategy.cluster_resolver.process_plan()
    name = f"{plan.task_type}_{plan.task_id}.json"
    (folder / name).write_text(json.dumps(result))
