"""Tests that each program is compiled once, whatever loops a run has."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import armillary
from armillary.data import from_arrays
from tests.problems import CNN, MLP, Classifier, make_digits, make_strategy
from tests.tiers import slow_after_first

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Evaluator(armillary.StandardEvaluator):
    """Counts right answers over data whose last batch is smaller, or is not."""

    def __init__(self, trainer: Classifier, num_examples: int) -> None:
        self.strategy = trainer.strategy
        self.model = nnx.view(
            trainer.model,
            deterministic=True,
            use_running_average=True,
            raise_if_not_found=False,
        )
        source = from_arrays(make_digits(num_examples), batch_size=16)
        super().__init__(self.strategy.distribute_dataset(source))
        self.accuracy = nnx.metrics.Accuracy()

    def eval_begin(self) -> None:
        self.accuracy.reset()

    def eval_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            logits = self.model(batch["image"])
            self.accuracy.update(logits=logits, labels=batch["label"])

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self, *state: Any) -> armillary.typing.Output:
        return {"accuracy": self.accuracy.compute()}


@pytest.fixture
def compiled() -> Iterator[Counter[str]]:
    """Counts what JAX compiles, by the name of the function."""
    names: Counter[str] = Counter()

    def listener(event: str, _: float, **details: Any) -> None:
        if event == COMPILE_EVENT:
            names[str(details.get("fun_name"))] += 1

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield names
    jax.monitoring.unregister_event_duration_listener(listener)


def count_programs(compiled: Counter[str]) -> int:
    """Returns how many step programs were compiled since the last call."""
    count = sum(compiled[name] for name in compiled if name.startswith("jit(_run"))
    compiled.clear()
    return count


@slow_after_first(
    ("model", "num_replicas", "on_non_finite"), [(MLP, 4, None), (CNN, 1, "skip")]
)
def test_each_program_is_compiled_once(
    compiled: Counter[str],
    model: type[nnx.Module],
    num_replicas: int,
    on_non_finite: str | None,
) -> None:
    strategy = make_strategy(num_replicas)
    with strategy.scope():
        trainer = Classifier(
            strategy,
            model(nnx.Rngs(0)),
            optax.adam(1e-2),
            on_non_finite=on_non_finite,
        )
    evaluator = Evaluator(trainer, num_examples=40)
    compiled.clear()

    trainer.train(10)
    assert count_programs(compiled) == 1
    evaluator.evaluate(-1)
    # Batches of 16, and one of 8.
    assert count_programs(compiled) == 2

    trainer.train(10)
    evaluator.evaluate(-1)
    # The second round may compile what Flax runs to reset arrays that a step returned.
    assert count_programs(compiled) == 0
    for num_steps in (10, 7, 3, 1):
        trainer.train(num_steps)
        evaluator.evaluate(2)
        evaluator.evaluate(-1)
    assert compiled == Counter()


@pytest.mark.slow
def test_one_device_compiles_a_step_once_in_its_scope_and_outside(
    compiled: Counter[str],
) -> None:
    strategy = armillary.OneDeviceStrategy("cpu:2")
    with strategy.scope():
        trainer = Classifier(strategy, MLP(nnx.Rngs(0)), optax.adam(1e-2))
    trainer.train(10)
    compiled.clear()

    # The controller enters the scope around each loop, the trainer around its own.
    controller = armillary.Controller(
        trainer=trainer, global_step=trainer.optimizer.step, steps_per_loop=10
    )
    controller.train(30)
    with strategy.scope():
        trainer.train(10)
    assert count_programs(compiled) == 0
