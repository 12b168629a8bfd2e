"""Tests of Keras models, optimizers, losses and metrics in a trainer's step."""

import numpy as np
import pytest

import armillary
from armillary.errors import StateStructureError
from tests.problems import make_strategy
from tests.tiers import slow_after_first

NUM_STEPS = 6


def make_data(strategy, **options):
    inputs = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    labels = (inputs[:, 0] > 0).astype("int32")
    source = armillary.data.from_arrays((inputs, labels), batch_size=16, **options)
    return strategy.distribute_dataset(source)


def make_trainer(keras, num_replicas, layers):
    keras.utils.set_random_seed(0)
    strategy = make_strategy(num_replicas)
    outer = strategy
    inputs = keras.layers.Input((4,))

    class Trainer(armillary.StandardTrainer):
        def __init__(self):
            super().__init__(make_data(outer, repeat=True))
            self.strategy = outer
            parts = [inputs, *layers(keras.layers), keras.layers.Dense(2)]
            self.model = keras.Sequential(parts)
            self.optimizer = keras.optimizers.Adam(1e-2)
            self.optimizer.build(self.model.trainable_variables)
            self.loss_object = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=None
            )
            self.loss = keras.metrics.Mean("loss")
            self.accuracy = keras.metrics.SparseCategoricalAccuracy()

        def train_loop_begin(self):
            self.loss.reset_state()
            self.accuracy.reset_state()

        def train_step(self, iterator):
            def step_fn(inputs, labels):
                def loss_fn():
                    logits = self.model(inputs, training=True)
                    losses = self.loss_object(labels, logits)
                    self.loss.update_state(losses)
                    self.accuracy.update_state(labels, logits)
                    loss = armillary.compute_average_loss(losses)
                    for extra in self.model.losses:
                        loss += armillary.scale_regularization_loss(extra)
                    return loss

                variables = self.model.trainable_variables
                _, gradients = armillary.value_and_grad(loss_fn, variables)
                gradients = armillary.all_reduce("sum", gradients)
                self.optimizer.apply(gradients, variables)

            self.strategy.run(step_fn, args=next(iterator))

        def train_loop_end(self):
            return {"loss": self.loss.result(), "accuracy": self.accuracy.result()}

    return Trainer()


def read(model):
    return [np.array(variable.value) for variable in model.variables]


LAYERS = {
    "dense": lambda layers: [
        layers.Dense(3, "relu", kernel_regularizer="l2", activity_regularizer="l1")
    ],
    "conv": lambda layers: [
        layers.Reshape((2, 2, 1)),
        layers.Conv2D(3, 2, padding="same"),
        layers.MaxPooling2D(),
        layers.Flatten(),
    ],
    "lstm": lambda layers: [layers.Reshape((4, 1)), layers.LSTM(3)],
}


@slow_after_first("kind", LAYERS)
def test_several_replicas_train_as_one(keras, kind):
    one, four = (make_trainer(keras, count, LAYERS[kind]) for count in (1, 4))
    variables = list(four.model.variables)
    outputs = [trainer.train(NUM_STEPS) for trainer in (one, four)]
    for name in ("loss", "accuracy"):
        a, b = (float(output[name]) for output in outputs)
        assert a == pytest.approx(b, rel=1e-4)
    for a, b in zip(read(one.model), read(four.model), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert int(four.optimizer.iterations.value) == NUM_STEPS
    assert all(a is b for a, b in zip(variables, four.model.variables, strict=True))


@pytest.mark.slow
def test_batch_statistics_are_means_and_seeds_streams_of_replicas(keras):
    strategy = make_strategy(2)
    norm = keras.layers.BatchNormalization(momentum=0.0)
    norm.build((None, 4))
    seed = keras.random.SeedGenerator(7)

    @armillary.function
    def step(batch):
        def step_fn(inputs, labels):
            del labels
            norm(inputs, training=True)
            return keras.random.uniform((), seed=seed)

        return strategy.run(step_fn, args=batch)

    batch = next(iter(make_data(strategy)))
    drawn = [float(value) for value in strategy.local_results(step(batch))]
    halves = np.array(strategy.gather(batch[0], 0)).reshape(2, 8, 4)
    np.testing.assert_allclose(norm.moving_mean.value, halves.mean((0, 1)), rtol=1e-5)
    variance = halves.var(1).mean(0)
    np.testing.assert_allclose(norm.moving_variance.value, variance, rtol=1e-5)
    alone = keras.random.SeedGenerator(7)
    assert drawn[0] == float(keras.random.uniform((), seed=alone)) != drawn[1]
    np.testing.assert_array_equal(seed.state.value, alone.state.value)


@pytest.mark.slow
def test_a_loop_is_compiled_once_and_again_when_a_layer_is_frozen(keras, no_retrace):
    trainer = make_trainer(keras, 2, LAYERS["dense"])
    trainer.train(3)
    with no_retrace():
        trainer.train(3)
    layer = trainer.model.layers[0]
    layer.trainable = False
    trainer.optimizer = keras.optimizers.SGD(0.1)
    trainer.optimizer.build(trainer.model.trainable_variables)
    before = np.array(layer.kernel.value)
    trainer.train(3)
    np.testing.assert_array_equal(layer.kernel.value, before)


def test_an_evaluation_that_changes_a_keras_model_is_refused(keras):
    norm = keras.layers.BatchNormalization()
    norm.build((None, 4))

    class Evaluator(armillary.StandardEvaluator):
        def __init__(self):
            super().__init__(make_data(armillary.distribute.DefaultStrategy()))
            self.norm = norm

        def eval_step(self, iterator):
            self.norm(next(iterator)[0], training=True)

    with pytest.raises(StateStructureError, match=r"a Keras model with `training=Fal"):
        Evaluator().evaluate(1)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_model_that_builds_itself_in_a_step_is_an_error(keras, num_replicas):
    strategy = make_strategy(num_replicas)

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.last = keras.layers.Dense(2)

        def call(self, inputs):
            return self.last(inputs)

    class Evaluator(armillary.StandardEvaluator):
        def __init__(self):
            super().__init__(make_data(strategy))
            self.strategy = strategy
            self.model = Net()

        def eval_step(self, iterator):
            # Keras catches the error, and calls the model with weights that are unset.
            strategy.run(lambda x, y: self.model(x), args=next(iterator))

    class Trainer(armillary.StandardTrainer):
        def __init__(self):
            super().__init__(make_data(strategy))
            self.strategy = strategy
            self.model = Net()

        def train_step(self, iterator):
            def step(inputs, labels):
                loss = lambda: self.model(inputs).mean()  # noqa: E731
                self.model(inputs)
                armillary.value_and_grad(loss, self.model.trainable_variables)

            strategy.run(step, args=next(iterator))

    for run in (lambda: Evaluator().evaluate(1), lambda: Trainer().train(1)):
        with pytest.raises(StateStructureError, match=r"makes the Keras variable `net"):
            run()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_loss_scale_works_in_a_step_by_its_stateless_method(keras, num_replicas):
    trainer = make_trainer(keras, num_replicas, LAYERS["dense"])
    model = trainer.model
    inner = keras.optimizers.Adam(1e-2)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**127)
    scaled.build(model.trainable_variables)
    trainer.optimizer = scaled

    def train_step(iterator):
        def step_fn(inputs, labels):
            def loss_fn():
                logits = model(inputs, training=True)
                losses = trainer.loss_object(labels, logits) * 100
                return scaled.scale_loss(armillary.compute_average_loss(losses))

            variables = model.trainable_variables
            _, gradients = armillary.value_and_grad(loss_fn, variables)
            gradients = armillary.all_reduce("sum", gradients)
            new, state = scaled.stateless_apply(
                [each.value for each in scaled.variables],
                gradients,
                [each.value for each in variables],
            )
            values = [*new, *state]
            for each, value in zip(
                [*variables, *scaled.variables], values, strict=True
            ):
                each.assign(value)

        trainer.strategy.run(step_fn, args=next(iterator))

    trainer.train_step = train_step
    before = read(model)
    trainer.train(1)
    for a, b in zip(before, read(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(scaled.dynamic_scale.value) == 2.0**126
    trainer.train(NUM_STEPS * 3)
    assert float(scaled.dynamic_scale.value) < 2.0**126
    pairs = zip(before, read(model), strict=True)
    assert not any(np.array_equal(a, b) for a, b in pairs)
