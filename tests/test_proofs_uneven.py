"""Proof: an uneven batch is one step, with the numbers that one replica has."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import armillary
from armillary.data import InputOptions, from_arrays
from tests.problems import assert_identical, copy_state, make_strategy, read_state

pytestmark = pytest.mark.slow

EXACT = InputOptions(remainder="exact")
# Without large epsilons, batches of one row would make rounding errors large.
TRANSFORMS = {
    "sgd": optax.sgd(0.05, momentum=0.9),
    "adam": optax.adam(1e-2, eps=1e-2),
}


def make_rows(num_rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 5)).astype(np.float32)
    return {"x": x, "y": (x.sum(axis=1) > 0).astype(np.int32)}


class Model(nnx.Module):
    """A classifier whose batch norm sees the batches of all replicas."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(5, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, epsilon=0.1, axis_name="replica", rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


class Trainer(armillary.StandardTrainer):
    """Trains the model on one pass, with two metrics."""

    def __init__(
        self, num_replicas, transform, source, options=EXACT, op="sum", **loop
    ):
        self.op = op
        self.strategy = make_strategy(num_replicas)
        dataset = self.strategy.distribute_dataset(source, options)
        super().__init__(dataset, armillary.StandardTrainerOptions(**loop))
        self.model = Model()
        self.optimizer = nnx.Optimizer(self.model, TRANSFORMS[transform], wrt=nnx.Param)
        self.loss = nnx.metrics.Average("losses")
        self.accuracy = nnx.metrics.Accuracy()

    def train_step(self, iterator):
        self.strategy.run(self.step, args=(next(iterator),))

    def step(self, batch):
        def loss_fn(model):
            logits = model(batch["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            average = armillary.compute_average_loss if self.op == "sum" else jnp.mean
            return average(losses), (losses, logits)

        grads, (losses, logits) = nnx.grad(loss_fn, has_aux=True)(self.model)
        grads = armillary.all_reduce(self.op, grads)
        self.optimizer.update(self.model, grads)
        self.loss.update(losses=losses)
        self.accuracy.update(logits=logits, labels=batch["y"])


def train_all(trainer, steps_per_loop):
    for num_steps in itertools.cycle(steps_per_loop):
        trainer.train(num_steps)
        if trainer.data_exhausted:
            return read_state(trainer)


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(
            actual[path], value, rtol=2e-5, atol=2e-6, err_msg=path
        )


@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(
    num_rows=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    num_replicas=st.sampled_from([2, 4]),
    transform=st.sampled_from(sorted(TRANSFORMS)),
    op=st.sampled_from(["mean", "sum"]),
    steps_per_loop=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    place_on_device=st.booleans(),
)
def test_any_batch_size_trains_as_on_one_replica(
    num_rows,
    batch_size,
    num_replicas,
    transform,
    op,
    steps_per_loop,
    place_on_device,
):
    source = from_arrays(make_rows(num_rows), batch_size=batch_size, shuffle_seed=1)
    options = InputOptions(remainder="exact", place_on_device=place_on_device)
    expected = train_all(Trainer(1, transform, source), [100])

    trainer = Trainer(num_replicas, transform, source, options, op)
    state = train_all(trainer, steps_per_loop)

    assert_close(state, expected)
    assert int(trainer.loss.count[...]) == num_rows
    assert int(trainer.optimizer.step[...]) == -(-num_rows // batch_size)


def test_a_run_that_was_stopped_before_an_uneven_batch_ends_with_the_same_bits():
    source = from_arrays(make_rows(22), batch_size=8, shuffle_seed=1)
    expected = train_all(Trainer(4, "adam", source), [100])

    first = Trainer(4, "adam", source)
    first.train(2)
    trainer = Trainer(4, "adam", source, steps_per_chunk=3)
    copy_state(first, trainer)
    trainer.train_dataset.set_state(first.train_dataset.get_state())

    assert_identical(train_all(trainer, [2]), expected)


def test_a_loop_of_your_own_gets_the_same_batches():
    source = from_arrays(make_rows(41), batch_size=18)
    expected = train_all(Trainer(1, "adam", source), [100])

    trainer = Trainer(4, "adam", source)
    step = armillary.function(
        lambda batch: trainer.strategy.run(trainer.step, args=(batch,))
    )
    for batch in trainer.train_dataset:
        step(batch)

    assert_close(read_state(trainer), expected)


def test_replica_batches_are_joined_where_they_do_not_fit():
    rows = make_rows(21)
    source = from_arrays(rows, batch_size=12)
    expected = train_all(Trainer(1, "sgd", source), [100])

    trainer = Trainer(4, "sgd", source)
    trainer.train_dataset = trainer.strategy.distribute_datasets_from_function(
        lambda context: from_arrays(rows, batch_size=3), EXACT
    )

    assert_close(train_all(trainer, [100]), expected)
