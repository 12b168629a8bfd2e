"""Tests of the log lines at the start of a run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.controller._start_lines import find_parameters
from tests.controller.loops import Loops

ARRAYS = {"x": np.ones((64, 3), "float32")}


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.small = nnx.Linear(3, 2, rngs=rngs)
        self.large = nnx.Linear(2, 500, rngs=rngs)

    def __call__(self, x):
        return self.large(self.small(x))


class Trainer(armillary.StandardTrainer):
    def __init__(self, dataset, strategy=None):
        super().__init__(dataset)
        self.strategy = strategy or armillary.distribute.DefaultStrategy()
        self.model = Model()
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(model):
                return armillary.compute_average_loss(model(batch["x"]).mean(-1))

            self.optimizer.update(
                self.model, armillary.all_reduce("sum", nnx.grad(loss_fn)(self.model))
            )

        self.strategy.run(step_fn, args=(next(iterator),))


def find_lines(caplog, trainer, **options):
    caplog.set_level("INFO", "armillary")
    controller = armillary.Controller(
        trainer=trainer, steps_per_loop=1, global_step=trainer.optimizer.step, **options
    )
    controller.train(1)
    controller.train(2)
    lines = caplog.messages
    starts = [i for i, line in enumerate(lines) if line.startswith("devices:")]
    assert len(starts) == 1
    first_loop = next(i for i, line in enumerate(lines) if "training until" in line)
    return lines[starts[0] : first_loop]


def make_source():
    return armillary.data.from_arrays(ARRAYS, batch_size=16, repeat=True)


def test_a_run_on_several_replicas(caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    trainer = Trainer(strategy.distribute_dataset(make_source()), strategy)
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(model=trainer.model, optimizer=trainer.optimizer),
        tmp_path / "run" / "checkpoints",
    )

    assert find_lines(
        caplog,
        trainer,
        strategy=strategy,
        checkpoint_manager=manager,
        summary_dir="run/train",
    ) == [
        "devices: 8 x cpu | strategy: MirroredStrategy(4 x cpu)",
        "parameters: 1,508 (6.03 kB) | largest: model/large 1,500, model/small 8",
        f"batch: 16 global, 4 per replica | checkpoints: {tmp_path}/run/checkpoints | "
        f"summaries: {tmp_path}/run/train",
    ]


def test_unknown_facts_are_left_out(caplog):
    lines = find_lines(caplog, Trainer(lambda: iter([ARRAYS] * 4)))
    assert lines == [
        "devices: 8 x cpu, of which one trains",
        "parameters: 1,508 (6.03 kB) | largest: model/large 1,500, model/small 8",
    ]
    caplog.clear()
    assert find_lines(caplog, Trainer(make_source()))[2:] == ["batch: 16"]


WORKERS = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}


@pytest.mark.parametrize(
    ("cluster", "task", "is_warned"),
    [
        (WORKERS, {"type": "worker", "index": 1}, True),
        ({"worker": WORKERS["worker"][:1]}, {"type": "worker", "index": 0}, False),
        (WORKERS, {"type": "evaluator", "index": 0}, False),
        ({**WORKERS, "ps": ["127.0.0.1:3"]}, {"type": "worker", "index": 0}, False),
        (WORKERS, {"type": "worker"}, False),  # Malformed, and not needed.
    ],
)
def test_a_worker_that_trains_alone_is_warned(
    caplog, monkeypatch, cluster, task, is_warned
):
    config = json.dumps({"cluster": cluster, "task": task})
    monkeypatch.setenv("TF_CONFIG", config)
    find_lines(caplog, Trainer(make_source()))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == is_warned
    assert not is_warned or "says that this is process 1 of 2, but the" in warnings[0]


def vary(trainer, **attributes):
    vars(trainer).update(attributes)
    return trainer


class Arrays(armillary.StandardTrainer):
    def __init__(self, **attributes):
        super().__init__(make_source())
        vars(self).update(attributes)

    def train_step(self, iterator):
        next(iterator)


PARAMS = {"w": jnp.ones((3, 3)), "v": jnp.ones((3, 3))}
STATE = optax.adam(0.1).init(PARAMS)


@pytest.mark.parametrize(
    ("trainer", "count"),
    [
        (Loops(), None),
        (vary(Loops(), params=PARAMS, momentum=PARAMS), 18),
        (vary(Loops(), model=nnx.Linear(2, 3, rngs=nnx.Rngs(0))), 9),
        (vary(Loops(), model="a name"), None),
        (Arrays(params=PARAMS, environment={"x": jnp.ones(7)}, state=STATE), 18),
        (Arrays(environment={"x": jnp.ones(7)}), None),
    ],
)
def test_arrays_are_parameters_if_they_are_called_so(trainer, count):
    summary = find_parameters(trainer)

    assert (summary and summary.count) == count
