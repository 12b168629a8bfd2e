"""Tests of warnings about lines of a step that are probably mistakes."""

import functools
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.trainer._noticed_prints import noticing_prints
from tests.patience import patience
from tests.problems import make_strategy

KEY = jax.random.key(0)


class Noise(armillary.StandardTrainer):
    def __init__(self, draw, strategy):
        super().__init__([np.ones((4, 6), np.float32)] * 8)
        self.draw, self.strategy = draw, strategy
        self.rngs, self.step = nnx.Rngs(0), jnp.zeros((), int)
        self.total = nnx.metrics.Average()

    def train_step(self, iterator):
        def step_fn(batch):
            self.total.update(values=self.draw(self, batch))

        self.strategy.run(step_fn, args=(next(iterator),))
        self.step = self.step + 1


CONSTANT = {
    "made": lambda self, batch: jax.random.normal(jax.random.key(0), (6,)),
    "legacy": lambda self, batch: jax.random.uniform(jax.random.PRNGKey(0), (6,)),
    "split": lambda self, batch: jax.vmap(jax.random.normal)(jax.random.split(KEY, 6)),
    "in a loop": lambda self, batch: jax.lax.fori_loop(
        0, 3, lambda i, x: x + jax.random.normal(jax.random.fold_in(KEY, i)), 0.0
    ),
}
FRESH = {
    "rngs": lambda self, batch: jax.random.normal(self.rngs(), (6,)),
    "folded": lambda self, batch: jax.random.normal(
        jax.random.fold_in(jax.random.key(0), self.step)
    ),
    "of the batch": lambda self, batch: jax.random.normal(
        jax.random.key(batch.sum().astype(int))
    ),
    "none": lambda self, batch: batch.sum(),
}


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", CONSTANT)
def test_numbers_that_are_the_same_in_each_step_are_reported(
    name, num_replicas, caplog
):
    if name == "legacy" and num_replicas > 1:
        pytest.skip("replicas that draw alike from a raw key are refused")
    trainer = Noise(CONSTANT[name], make_strategy(num_replicas))
    trainer.train(2)
    trainer.train(2)

    (record,) = caplog.records
    assert "draws random numbers from a key that is a constant" in record.getMessage()
    assert __file__ in record.getMessage()


@pytest.mark.parametrize("name", FRESH)
def test_numbers_that_state_or_batches_decide_are_not(name, caplog):
    Noise(FRESH[name], make_strategy(2)).train(2)
    assert not caplog.records


class Largest(nnx.Metric):
    def __init__(self):
        self.value = nnx.metrics.MetricState(jnp.zeros(()))

    def update(self, **kwargs):
        largest = kwargs["values"].max()
        self.value[...] = jnp.maximum(self.value[...], largest)

    def compute(self):
        return self.value[...]

    def reset(self):
        self.value[...] = jnp.zeros(())


class Evaluator(armillary.StandardEvaluator):
    def __init__(self, metric, prepare, num_replicas, num_examples=21):
        rows = np.arange(num_examples, dtype=np.float32)
        super().__init__(armillary.data.from_arrays(rows, batch_size=8))
        self.strategy = make_strategy(num_replicas)
        self.metric, self.prepare = metric, prepare

    def eval_step(self, iterator):
        def step_fn(batch):
            self.metric.update(values=self.prepare(batch))

        self.strategy.run(step_fn, args=(next(iterator),))


def test_a_maximum_that_replicas_would_add_up_is_reported(caplog):
    Evaluator(Largest(), lambda batch: batch, 2).evaluate(-1)

    (record,) = caplog.records
    assert "a maximum or minimum in the metric metric/value" in record.getMessage()
    assert __file__ in record.getMessage()


def test_it_is_reported_in_a_loop_of_ones_own(caplog):
    strategy, metric = make_strategy(2), Largest()
    for batch in strategy.distribute_dataset([np.ones(4, np.float32)] * 3):
        strategy.run(lambda batch: metric.update(values=batch), args=(batch,))

    assert "a maximum or minimum in the metric" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "prepare",
    [
        jnp.mean,
        lambda batch: jnp.exp(jnp.average(batch)) + 1.0,
        lambda batch: batch.sum() / len(batch),
    ],
    ids=["mean", "function of it", "by hand"],
)
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("num_examples", [20, 21])
def test_a_mean_is_reported_where_batches_differ(
    prepare, num_replicas, num_examples, caplog
):
    Evaluator(nnx.metrics.Average(), prepare, num_replicas, num_examples).evaluate(-1)

    (record,) = caplog.records
    assert "the mean of a batch to the metric metric/total" in caplog.text
    assert __file__ in record.getMessage()


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    "prepare",
    [
        lambda batch: batch,
        lambda batch: jnp.stack([batch, 2 * batch], axis=1).mean(axis=-1),
        lambda batch: batch - 0 * jnp.mean(batch),
        lambda batch: jnp.maximum(batch, 1.0),
    ],
    ids=["values", "means of examples", "less the mean", "clipped"],
)
def test_values_of_each_example_are_right(prepare, num_replicas, caplog):
    Evaluator(nnx.metrics.Average(), prepare, num_replicas).evaluate(-1)
    assert not caplog.records


@pytest.mark.parametrize(
    ("metric", "num_examples"), [(Largest, 21), (nnx.metrics.Average, 24)]
)
def test_one_replica_computes_what_the_code_says(metric, num_examples, caplog):
    Evaluator(metric(), jnp.mean, 1, num_examples).evaluate(-1)
    assert not caplog.records


class Fitting(armillary.StandardTrainer):
    def __init__(self, update):
        super().__init__([np.ones((4, 2), np.float32)] * 4)
        self.model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
        self.update = update

    def train_step(self, iterator):
        batch = next(iterator)
        gradients = nnx.grad(lambda model: model(batch).sum())(self.model)
        self.update(self, gradients)


NOTHING_TRAINED = {
    "swapped": lambda self, grads: self.optimizer.update(grads, self.model),
    "a copy": lambda self, grads: self.optimizer.update(nnx.clone(self.model), grads),
}
TRAINED = {
    "right": lambda self, grads: self.optimizer.update(self.model, grads),
    "without an optimizer": lambda self, grads: None,
}


@pytest.mark.parametrize("name", NOTHING_TRAINED)
def test_an_optimizer_that_moves_no_parameter_is_reported(name, caplog):
    trainer = Fitting(NOTHING_TRAINED[name])
    kernel = np.asarray(trainer.model.kernel[...])
    trainer.train(2)
    trainer.train(2)

    np.testing.assert_array_equal(trainer.model.kernel[...], kernel)
    (record,) = caplog.records
    message = record.getMessage()
    assert "advances an optimizer, but changes none of the parameters" in message
    assert "  model/kernel\n" in message
    assert "`optimizer.update(model, gradients)`" in message


@pytest.mark.parametrize("name", TRAINED)
def test_an_optimizer_that_moves_parameters_is_not(name, caplog):
    Fitting(TRAINED[name]).train(2)
    assert not caplog.records


class Bare(armillary.StandardTrainer):
    """Optax on plain arrays."""

    def __init__(self, optimizer, applies, num_replicas=1):
        super().__init__([np.ones((4, 2), np.float32)] * 8)
        self.strategy = make_strategy(num_replicas)
        self.params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
        self.optimizer, self.applies = optimizer, applies
        self.state = optimizer.init(self.params)
        self.step = armillary.create_global_step()

    def train_step(self, iterator):
        self.strategy.run(self.replica_step, args=(next(iterator),))
        self.step[...] += 1

    def replica_step(self, batch):
        def loss(params):
            return (batch @ params["w"] + params["b"][None]).mean()

        gradients = armillary.all_reduce("mean", jax.grad(loss)(self.params))
        updates, self.state = self.optimizer.update(gradients, self.state, self.params)
        applied = optax.apply_updates(self.params, updates)
        if self.applies:
            self.params = applied


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("kind", [optax.adam, optax.adafactor])
def test_updates_that_nothing_applies_are_reported(kind, num_replicas, caplog):
    Bare(kind(0.1), applies=False, num_replicas=num_replicas).train(4)

    (record,) = caplog.records
    message = record.getMessage()
    assert "changes none of the parameters that it reaches" in message
    assert "  params/w\n" in message
    assert "`params = optax.apply_updates(params, updates)`" in message


@pytest.mark.parametrize("kind", [optax.adam, optax.adafactor, optax.sgd])
def test_updates_that_are_applied_are_not(kind, caplog):
    Bare(kind(0.1), applies=True).train(4)
    assert not caplog.records


def test_a_pure_step_that_applies_nothing_is_reported(caplog):
    optimizer = optax.adam(0.1)
    params = {"w": jnp.ones(2)}

    def step(state, batch):
        params, moments = state
        gradients = jax.grad(lambda params: (batch @ params["w"]).mean())(params)
        _, moments = optimizer.update(gradients, moments, params)
        return (params, moments), {"loss": jnp.zeros(())}

    data = [np.ones((4, 2), np.float32)] * 4
    armillary.StepTrainer(step, (params, optimizer.init(params)), data).train(2)

    (record,) = caplog.records
    assert "  state/0/w\n" in record.getMessage()


@pytest.mark.parametrize("name", ["learning_rate", "lr"])
def test_a_rate_that_is_assigned_to_an_optimizer_is_reported(name, caplog):
    trainer = Fitting(TRAINED["right"])
    trainer.train(2)
    assert not caplog.records
    setattr(trainer.optimizer, name, 0.0)
    trainer.train(2)

    (record,) = caplog.records
    assert f"`optimizer/{name}` was assigned, but nothing reads it" in (
        record.getMessage()
    )
    assert "`optax.inject_hyperparams" in record.getMessage()


def test_a_rate_of_the_users_own_optimizer_is_not(caplog):
    class Scheduled(nnx.Optimizer):
        learning_rate = 0.1

    trainer = Fitting(TRAINED["right"])
    optimizer = Scheduled(trainer.model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.learning_rate = 0.2
    trainer.optimizer = optimizer
    trainer.train(2)
    assert not caplog.records


class Printing(armillary.StandardTrainer):
    def __init__(self, show):
        super().__init__([np.ones((4, 2), np.float32)] * 4)
        self.show, self.total = show, jnp.zeros(())

    def train_step(self, iterator):
        self.total = self.total + next(iterator).sum()
        self.show(self.total)


def test_a_tracer_that_is_printed_is_reported(caplog, capsys):
    trainer = Printing(functools.partial(print, "total"))
    trainer.train(2)
    trainer.train(2)

    assert "total " in capsys.readouterr().out
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("`train_step` printed a tracer")
    assert '`jax.debug.print("{}", x)`' in message


def test_two_traces_at_a_time_leave_the_stream_as_it_was():
    """The first one begins within the second one, and ends after it."""
    before = sys.stdout
    is_first_in = threading.Event()
    is_second_out = threading.Event()

    def trace_first():
        with noticing_prints("first"):
            is_first_in.set()
            assert is_second_out.wait(patience(60))

    thread = threading.Thread(target=trace_first)
    thread.start()
    assert is_first_in.wait(patience(60))
    with noticing_prints("second"):
        pass
    is_second_out.set()
    thread.join()

    assert sys.stdout is before


@pytest.mark.parametrize(
    "show",
    [
        lambda total: sys.stdout.write(f"traced {total.shape}\n"),
        lambda total: jax.debug.print("total {}", total),
    ],
    ids=["a shape", "by JAX"],
)
def test_values_that_a_trace_may_print_are_not_reported(show, caplog, capsys):
    before = sys.stdout
    Printing(show).train(2)
    jax.effects_barrier()

    assert capsys.readouterr().out.startswith(("traced", "total 8"))
    assert sys.stdout is before
    assert not caplog.records
