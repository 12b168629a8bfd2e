"""Tests that gradient accumulation gives the numbers of the whole batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import core
from jax.sharding import PartitionSpec

import armillary
from armillary.errors import BatchSizeError
from armillary.testing import assert_strategies_agree
from tests import problems
from tests.mistakes import mistakes
from tests.tiers import slow_after_first

EXAMPLES = problems.make_digits(96)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(64, 8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * jnp.mean(x)
        return self.last(nnx.tanh(self.first(x)))


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, batch_size=32, **options):
        dataset = strategy.distribute_dataset(
            armillary.data.from_arrays(EXAMPLES, batch_size=batch_size, repeat=True)
        )
        super().__init__(dataset, armillary.StandardTrainerOptions(**options))
        self.strategy, self.model = strategy, Net()
        self.optimizer = nnx.Optimizer(self.model, optax.adam(1e-2), wrt=nnx.Param)
        self.accuracy = nnx.metrics.Accuracy()
        self.loss, self.logits = jnp.zeros(()), jnp.zeros((32, 3))

    def scaled(self, losses, batch):
        return armillary.compute_average_loss(losses, batch["label"] + 1)

    def step_fn(self, batch):
        def loss_fn(batch):
            logits, labels = self.model(batch["image"]), batch["label"]
            self.accuracy.update(logits=logits, labels=labels)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            penalty = jnp.sum(self.model.first.kernel[...] ** 2)
            penalty = armillary.scale_regularization_loss(1e-2 * penalty)
            return self.scaled(losses, batch) + penalty, logits

        (loss, logits), gradients = armillary.value_and_grad(
            loss_fn, self.model, batch=batch, has_aux=True
        )
        gradients = armillary.all_reduce("sum", gradients)
        self.optimizer.update(self.model, gradients)
        return loss, logits

    def train_step(self, iterator):
        results = self.strategy.run(self.step_fn, args=(next(iterator),))
        self.loss = self.strategy.reduce("sum", results[0])
        self.logits = self.strategy.gather(results[1], axis=0)

    def results(self):
        accuracy = [self.accuracy.total[...], self.accuracy.count[...]]
        parameters = jax.tree.leaves(nnx.state(self.model, nnx.Param))
        return [
            *parameters,
            self.loss,
            self.logits,
            *accuracy,
            self.optimizer.step[...],
        ]


def make_strategy(num_replicas):
    if num_replicas == 0:
        return armillary.distribute.DefaultStrategy()
    return problems.make_strategy(num_replicas)


def compile_step(trainer):
    """Returns one step of a trainer, compiled."""
    trainer.train(1)
    (program,) = trainer._train_setup.loop._programs.current.values()
    step = program.step.program
    return jax.jit(core.jaxpr_as_fun(step)).lower(*step.in_avals).compile()


@pytest.fixture(scope="module")
def expected():
    trainer = Trainer(make_strategy(0))
    trainer.train(3)
    return trainer.results()


@slow_after_first(
    ("num_replicas", "options"),
    [
        (4, {}),
        (0, {}),
        (1, {}),
        (4, {"compile_loop": False}),
        (0, {"compile_step": False}),
    ],
)
def test_an_update_equals_an_update_with_the_whole_batch(
    num_replicas, options, expected
):
    trainer = Trainer(make_strategy(num_replicas), accumulate_steps=4, **options)
    trainer.train(3)
    for one, other in zip(trainer.results(), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_statistics_are_updated_by_each_part():
    trainer = Trainer(make_strategy(0), accumulate_steps=4)
    trainer.train(1)
    mean = 0.0
    for part in np.split(EXAMPLES["image"][:32], 4):
        mean = 0.5 * mean + 0.5 * part.mean()
    np.testing.assert_allclose(trainer.model.mean[...], mean, rtol=1e-5)


@pytest.mark.slow
def test_replicas_reduce_once_for_an_update():
    counts = {}
    for count in (1, 2, 8):
        compiled = compile_step(Trainer(make_strategy(4), accumulate_steps=count))
        text = compiled.as_text()
        counts[count] = len(re.findall(r" all-reduce(?:-start)?\(", text))
        # A loop on the device is a computation of its own: nothing is reduced in it.
        loops = re.findall(r"body=%?([\w.-]+)", text)
        assert loops or count == 1
        for loop in loops:
            body = re.search(rf"^%?{re.escape(loop)} .*?^}}", text, re.M | re.S)
            assert body is not None and "all-reduce" not in body[0]
    assert counts[1] >= counts[2] == counts[8] > 0


class Deep(nnx.Module):
    """A model of 16 layers: most of the memory of a gradient is activations."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(nnx.Linear(64, 64, rngs=rngs) for _ in range(16))

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return x


@pytest.mark.slow
def test_only_the_activations_of_one_part_need_memory():
    model, batch = Deep(), jnp.ones((4096, 64))

    def temporary_bytes(count):
        def step(batch):
            def loss_fn(batch):
                return armillary.compute_average_loss(model(batch)[:, 0])

            return armillary.value_and_grad(
                loss_fn, model, batch=batch, accumulate_steps=count
            )

        compiled = jax.jit(step).lower(batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    activations = 16 * batch.nbytes
    assert temporary_bytes(1) > activations
    assert temporary_bytes(8) < activations / 4


def test_a_list_of_variables_outside_a_trainer():
    weight = nnx.Param(jnp.asarray(2.0))
    batch = jnp.arange(8.0)

    def loss_fn(batch):
        return armillary.compute_average_loss(batch * weight[...])

    for count in (1, 2, 8):
        loss, gradients = armillary.value_and_grad(
            loss_fn, [weight], batch=batch, accumulate_steps=count
        )
        assert (float(loss), float(gradients[0])) == (7.0, 3.5)


class SumTrainer(Trainer):
    """A trainer whose loss is a plain sum of its examples."""

    def step_fn(self, batch):
        def loss_fn(batch):
            return jnp.sum((self.model(batch["image"]) - 1) ** 2) / 96

        loss, gradients = armillary.value_and_grad(
            loss_fn, self.model, batch=batch, op="sum"
        )
        self.optimizer.update(self.model, armillary.all_reduce("sum", gradients))
        return loss

    def train_step(self, iterator):
        losses = self.strategy.run(self.step_fn, args=(next(iterator),))
        self.loss = self.strategy.reduce("sum", losses)


@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "count"), [(1, 4), (4, 1), (4, 4)])
def test_sums_of_examples_cover_the_share_of_a_replica(num_replicas, count):
    results = []
    for replicas, parts in ((0, 1), (num_replicas, count)):
        trainer = SumTrainer(make_strategy(replicas), accumulate_steps=parts)
        trainer.train(3)
        parameters = jax.tree.leaves(nnx.state(trainer.model, nnx.Param))
        results.append([trainer.loss, *parameters])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class OwnGradientTrainer(Trainer):
    def step_fn(self, batch):
        loss = armillary.all_reduce(
            "sum", nnx.grad(lambda model: jnp.sum(model(batch["image"])))(self.model)
        )
        return loss, batch["image"]


class OwnScaleTrainer(Trainer):
    def scaled(self, losses, batch):
        return jnp.sum(losses) / 32

    def step_fn(self, batch):
        def loss_fn(batch):
            return self.scaled(self.model(batch["image"]), batch)

        return armillary.value_and_grad(loss_fn, self.model, batch=batch), 0


class SummaryTrainer(Trainer):
    def step_fn(self, batch):
        def loss_fn(batch):
            losses = self.model(batch["image"])
            return armillary.compute_average_loss(losses), jnp.mean(losses)

        return armillary.value_and_grad(
            loss_fn, self.model, batch=batch, has_aux=True
        ), 0


class MixedTrainer(OwnScaleTrainer):
    """A trainer with a penalty, which does not show the divisor of the loss."""

    def scaled(self, losses, batch):
        armillary.compute_average_loss(losses)  # Nothing uses the result.
        penalty = armillary.scale_regularization_loss(jnp.sum(losses) * 0)
        return jnp.sum(losses) / 32 + penalty


class ScalarTrainer(Trainer):
    def step_fn(self, batch):
        batch = {**batch, "rate": jnp.float32(0.1)}
        return armillary.value_and_grad(
            lambda batch: jnp.mean(self.model(batch["image"])),
            self.model,
            batch=batch,
            op="mean",
        ), 0


def train_with(kind, count=4, batch_size=32):
    return lambda: kind(
        make_strategy(0), batch_size=batch_size, accumulate_steps=count
    ).train(1)


@mistakes(
    {
        ValueError: {
            "`accumulate_steps` is 4, but `train_step` makes no gradient that can be "
            "accumulated": train_with(OwnGradientTrainer),
            r"is 4, but a pure step.*`jax\.lax\.scan`.*gradient_accumulation\.md": (
                lambda: armillary.StepTrainer(
                    lambda state: (state, {}),
                    jnp.zeros(3),
                    options=armillary.StandardTrainerOptions(accumulate_steps=4),
                )
            ),
            "`op` is not given, and `compute_average_loss` did not make it": (
                train_with(OwnScaleTrainer)
            ),
            "is not given, and `compute_average_loss` did not": (
                train_with(MixedTrainer)
            ),
            r"returned an array of shape \(\) next to the loss, for a part of 8": (
                train_with(SummaryTrainer)
            ),
        },
        BatchSizeError: {
            r"`batch` .* shapes \[\(32, .*\(\)\], but the first axis": (
                train_with(ScalarTrainer)
            ),
            "`accumulate_steps` is 3, but `batch` has 32 examples on each replica": (
                train_with(Trainer, 3)
            ),
        },
    }
)
def test_arguments_that_cannot_be_right_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.slow
def test_parts_give_the_whole_batch_where_state_is_divided_or_elsewhere():
    rules = {"first/kernel": PartitionSpec("fsdp", "tensor")}
    mesh_shape = {"data": 2, "fsdp": 2, "tensor": 2}
    strategies = [
        armillary.OneDeviceStrategy("cpu:0"),
        armillary.ShardedStrategy(mesh_shape, rules=rules),
        armillary.distribute.CentralStorageStrategy(jax.devices()[1:3]),
    ]
    steps = iter([1, 4, 4])
    assert_strategies_agree(
        lambda strategy: Trainer(strategy, accumulate_steps=next(steps)),
        strategies,
        steps=3,
        tolerance=1e-5,
        ignore=["model/mean"],  # It is written once for each part.
    )
