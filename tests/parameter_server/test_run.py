"""Tests of `strategy.run` in the process that schedules."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.cluster import SimpleClusterResolver
from armillary.parameter_server import _strategy
from tests.tiers import slow_after_first

CLUSTER = {"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:4"]}


class Model:
    def __init__(self):
        self.layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.layer, optax.sgd(0.1), wrt=nnx.Param)
        self.mean = nnx.metrics.Average("loss")

    def train(self, batch):
        def loss_fn(layer):
            return jnp.mean((layer(batch) - 1.0) ** 2)

        self.optimizer.update(self.layer, nnx.grad(loss_fn)(self.layer))

    def evaluate(self, batch):
        self.mean.update(loss=(self.layer(batch) - 1.0) ** 2)


@pytest.fixture
def strategy():
    return armillary.ParameterServerStrategy()


BATCH = np.ones((4, 3), "float32")


def run_as_it_is(strategy, step):
    strategy.run(step, args=(BATCH,))


def run_compiled(strategy, step):
    @armillary.function
    def compiled(batch):
        return strategy.run(step, args=(batch,))

    compiled(BATCH)


@slow_after_first("run", [run_as_it_is, run_compiled])
def test_a_run_that_trains_here_names_schedule_once(strategy, caplog, run):
    model = Model()
    before = np.asarray(model.layer.kernel[...])
    run(strategy, model.train)
    assert not np.array_equal(model.layer.kernel[...], before)
    run(strategy, model.train)
    (message,) = caplog.messages
    assert "`strategy.run` of ParameterServerStrategy(2 workers, 1" in message
    assert "the 2 workers stay idle" in message
    assert "ClusterCoordinator(strategy).schedule(step_fn" in message


@pytest.mark.parametrize("run", [run_as_it_is, run_compiled])
def test_a_run_that_evaluates_here_is_as_it_should_be(strategy, caplog, run):
    model = Model()
    run(strategy, model.evaluate)
    assert model.mean.compute() > 0
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("joined", "found"), [(True, "its process starts"), (False, "is not in the clu")]
)
def test_parts_that_an_absent_task_lacks(monkeypatch, joined, found):
    resolver = SimpleClusterResolver(CLUSTER, task_type="chief", task_id=0)
    strategy = armillary.ParameterServerStrategy(resolver)
    monkeypatch.setattr(_strategy, "has_joined", lambda job, index: joined)
    assert strategy.name_task("worker", 0) == "worker 0 at h:2"
    assert found in strategy.describe_absent("worker", 0)
