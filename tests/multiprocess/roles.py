"""One script for all roles of a job: workers that train, and an evaluator."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import optax
from flax import nnx

import armillary
from armillary.data import from_arrays
from tests.problems import MLP, Classifier, make_digits


class Evaluator(armillary.StandardEvaluator):
    """Reports the accuracy over 50 examples."""

    def __init__(self, strategy: Any, model: nnx.Module) -> None:
        source = from_arrays(make_digits(50), batch_size=16)
        super().__init__(strategy.distribute_dataset(source))
        self.strategy = strategy
        self.model = nnx.view(model, deterministic=True, use_running_average=True)
        self.accuracy = nnx.metrics.Accuracy()

    def eval_begin(self) -> None:
        self.accuracy.reset()

    def eval_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            logits = self.model(batch["image"])
            self.accuracy.update(logits=logits, labels=batch["label"])

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self, *state: Any) -> armillary.typing.Output:
        del state
        return {"accuracy": self.accuracy.compute()}


def make_controller(
    strategy: Any, run_dir: Path, **options: Any
) -> armillary.Controller:
    digits = from_arrays(make_digits(72), batch_size=16, shuffle_seed=3, repeat=True)
    dataset = strategy.distribute_dataset(digits)
    model = MLP(nnx.Rngs(0))
    trainer = Classifier(strategy, model, optax.adam(1e-2), dataset)
    best = armillary.actions.NewBestMetric(
        "accuracy", higher_is_better=True, directory=run_dir
    )
    return armillary.Controller(
        trainer=trainer,
        evaluator=Evaluator(strategy, model),
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=3,
        summary_dir=run_dir / "train",
        eval_summary_dir=run_dir / "eval",
        eval_actions=[best],
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer, data=dataset),
            run_dir / "checkpoints",
            max_to_keep=None,
            keep_best="accuracy",
            higher_is_better=True,
            checkpoint_interval=3,
        ),
        **options,
    )


def main() -> None:
    run_dir, steps, die_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    strategy = armillary.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    is_first_attempt = os.environ["ARMILLARY_RESTART_COUNT"] == "0"

    def die(output: Any) -> None:
        is_victim = resolver.task_id == 1 and is_first_attempt
        if is_victim and controller.trainer.optimizer.step[...] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    controller: Any = make_controller(strategy, run_dir, train_actions=[die])
    if resolver.task_type == "evaluator":
        controller.evaluate_continuously()
        return
    controller.train(steps)
    # The evaluator has something left to do when the workers have ended.
    time.sleep(0.5 * (resolver.task_id or 0))


if __name__ == "__main__":
    main()
