"""What a step writes is what such a step is for, or it is told."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.errors import StateStructureError
from tests.problems import MLP, make_digits, make_strategy


class Evaluator(armillary.StandardEvaluator):
    def __init__(self, model, num_replicas=None):
        super().__init__(armillary.data.from_arrays(make_digits(8), batch_size=4))
        self.strategy = armillary.DefaultStrategy()
        if num_replicas is not None:
            self.strategy = make_strategy(num_replicas)
        self.model, self.accuracy = model, nnx.metrics.Accuracy()

    def eval_step(self, iterator):
        def step_fn(batch):
            logits = self.model(batch["image"])
            self.accuracy.update(logits=logits, labels=batch["label"])

        self.strategy.run(step_fn, args=(next(iterator),))


@pytest.mark.parametrize("num_replicas", [None, 2])
def test_an_evaluation_that_changes_batch_statistics_is_an_error(num_replicas):
    model = MLP(nnx.Rngs(0))
    before = np.array(model.norm.mean[...])

    with pytest.raises(
        StateStructureError,
        match=r"`eval_step` changes 2 arrays of a model, which an evaluation leaves as "
        r"it is:\n  model/norm/mean\n  model/norm/var\nEvaluate a view of it.*"
        r"`self.model = nnx.view\(model, use_running_average=True\)`",
    ):
        Evaluator(model, num_replicas).evaluate(-1)
    np.testing.assert_array_equal(model.norm.mean[...], before)


@pytest.mark.parametrize("num_replicas", [None, 2])
def test_the_view_that_the_message_asks_for_is_evaluated(num_replicas, caplog):
    model = MLP(nnx.Rngs(0))
    view = nnx.view(model, use_running_average=True, deterministic=True)

    Evaluator(view, num_replicas).evaluate(-1)
    assert not caplog.records


def test_an_evaluation_that_trains_is_an_error():
    class Tuning(Evaluator):
        def eval_step(self, iterator):
            next(iterator)
            self.model.bias[...] += 1

    with pytest.raises(StateStructureError, match=r"changes 1 array of.*\n +model/b"):
        Tuning(nnx.Linear(2, 3, rngs=nnx.Rngs(0))).evaluate(1)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [None, 2])
def test_dropout_in_an_evaluation_is_a_warning(num_replicas, caplog):
    model = nnx.view(MLP(nnx.Rngs(0)), use_running_average=True)

    Evaluator(model, num_replicas).evaluate(-1)

    (record,) = caplog.records
    assert record.getMessage() == (
        "`eval_step` draws random numbers for dropout, so that its results are those "
        "of a model in training mode:\n  model/dropout/rngs/count\nEvaluate a view of "
        "it, which shares its variables: `self.model = nnx.view(model, "
        "deterministic=True)`."
    )


def test_other_random_numbers_in_an_evaluation_are_meant(caplog):
    class Sampling(Evaluator):
        def eval_step(self, iterator):
            next(iterator)
            self.model.normal((2,))

    Sampling(nnx.Rngs(0)).evaluate(-1)
    assert not caplog.records


class Trainer(armillary.StandardTrainer):
    def __init__(self, train):
        super().__init__([np.ones((4, 2), np.float32)] * 4)
        self.model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.frozen = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
        self.train_model, self.seen = train, jnp.zeros((), jnp.int32)

    def train_step(self, iterator):
        self.train_model(self, next(iterator))
        self.seen = self.seen + 1


def update(trainer, model, x):
    gradients = armillary.all_reduce(
        "sum", nnx.grad(lambda model: model(x).sum())(model)
    )
    trainer.optimizer.update(model, gradients)


def test_an_optimizer_that_moves_nothing_is_a_warning(caplog):
    def train(trainer, x):
        update(trainer, nnx.clone(trainer.model), x)

    trainer = Trainer(train)
    del trainer.frozen, trainer.seen
    trainer.train_step = lambda iterator: train(trainer, next(iterator))
    trainer.train(4)

    (record,) = caplog.records
    assert record.getMessage() == (
        "`train_step` advances an optimizer, but changes none of the 2 arrays of "
        "parameters that it reaches, so nothing is trained:\n  model/bias\n  "
        "model/kernel\nPass the model itself to `optimizer.update(model, gradients)`, "
        "not a copy (`nnx.clone`, `nnx.merge`), and assign that model to the trainer."
    )


def test_parameters_that_stay_beside_others_that_move_are_meant(caplog):
    Trainer(lambda trainer, x: update(trainer, trainer.model, x)).train(4)
    assert not caplog.records


def test_a_step_without_an_optimizer_is_meant(caplog):
    Trainer(lambda trainer, x: trainer.model(x)).train(4)
    assert not caplog.records
