"""Keras on parameter servers: `fit`, `KerasTrainer`, and steps of one's own."""

import numpy as np
import pytest

import armillary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.each_case,
    pytest.mark.multiprocess,
    pytest.mark.xdist_group("ray"),
]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")


def make_model(keras, optimizer=None, **options):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Rescaling(2.0),
            layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dense(2, kernel_constraint="max_norm"),
        ]
    )
    model.compile(
        optimizer=optimizer or keras.optimizers.AdamW(0.01, weight_decay=0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def values_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return {variable.path: np.array(variable.value) for variable in variables}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], 2e-4, 1e-6, err_msg=name)


def test_fit_on_one_worker_equals_fit(keras, alone):
    """Weights, batch statistics, the optimizer, metrics and callbacks, two times."""
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": 3}
    options |= {"validation_split": 0.2, "class_weight": {0: 1.0, 1: 2.0}}

    def train():
        batches = []
        callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: batches.append((batch, *logs))
        )
        model = make_model(keras)
        history = model.fit(X, Y, callbacks=[callback], **options).history
        options_of_part = {**options, "validation_split": 0, "epochs": 2}
        model.fit(X, Y, steps_per_epoch=2, **options_of_part)
        return history, values_of(model), batches

    expected_history, expected, _ = train()
    with alone.strategy.scope():
        history, found, batches = train()
    assert batches == [(3, "accuracy", "loss")] * 3
    assert_close(history, expected_history)
    # Keras names its objects by counting.
    assert_close(dict(enumerate(found.values())), dict(enumerate(expected.values())))


@pytest.mark.thorough  # Of other optimizers what the test above proves of one.
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "clipnorm": 1.0, "momentum": 0.9},
        {"use_ema": True, "ema_overwrite_frequency": 4, "clipvalue": 0.1},
    ],
)
def test_the_optimizer_of_keras_is_the_one_of_the_servers(keras, alone, options):
    def train():
        model = make_model(keras, keras.optimizers.SGD(0.1, **options))
        model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
        return dict(enumerate(values_of(model).values()))

    expected = train()
    with alone.strategy.scope():
        assert_close(train(), expected)


def test_fit_takes_generators_and_stops(keras, coordinator):
    def batches():
        while True:
            yield X[:10], Y[:10]

    with coordinator.strategy.scope():
        model = make_model(keras)
    stop = keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=0)
    options = {"shuffle": False, "verbose": 0}
    history = model.fit(
        batches(), steps_per_epoch=6, epochs=5, callbacks=[stop], **options
    )
    assert len(history.history["loss"]) == 2
    assert int(model.optimizer.iterations.value) == 12
    loss = model.evaluate(X[:10], Y[:10], verbose=0)[0]
    assert loss < history.history["loss"][0]
    model.train_on_batch(X, Y)
    assert int(model.optimizer.iterations.value) == 13
    with pytest.raises(ValueError, match=r"given generator, .* Pass `steps_per_epoch`"):
        model.fit(batches(), **options)
    assert model.steps_per_execution == 1


def test_dropout_draws_other_numbers_in_each_call(keras, coordinator):
    """With the same numbers, the same weights would be without gradient."""
    dropout = keras.layers.Dropout(0.5, seed=1)
    ones = np.ones(64, "float32")
    before = np.array(dropout.seed_generator.state.value)

    def draw():
        return dropout(ones, training=True)

    coordinator.join()
    drawn = [coordinator.schedule(draw) for _ in range(4)]
    coordinator.join()
    masks = {value.fetch().tobytes() for value in drawn}
    assert len(masks) == 4
    np.testing.assert_array_equal(dropout.seed_generator.state.value, before)


def test_an_optimizer_of_keras_in_a_step(keras, coordinator):
    dense = keras.layers.Dense(1)
    dense.build((None, 4))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(dense.trainable_variables)

    def step(x, *, part=slice(None), missing=False):
        def loss_fn():
            return (dense(x) ** 2).mean()

        variables = dense.trainable_variables[part]
        loss, gradients = armillary.value_and_grad(loss_fn, variables)
        optimizer.apply([None, *gradients[1:]] if missing else gradients, variables)
        return loss

    losses = [coordinator.schedule(step, args=(X,)) for _ in range(20)]
    coordinator.join()
    assert losses[-1].get() < losses[0].get() / 2
    assert int(optimizer.iterations.value) == 20
    coordinator.schedule(step, args=(X,), kwargs={"part": slice(1)})
    with pytest.raises(ValueError, match=r"given 1 variables .* built for 2. Pass all"):
        coordinator.join()
    coordinator.schedule(step, args=(X,), kwargs={"missing": True})
    with pytest.raises(ValueError, match=r"no gradient for dense.*kernel in a sched"):
        coordinator.join()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda sgd: sgd(0.1, global_clipnorm=1.0), r"`global_clipnorm` .* `clipnorm`"),
        (lambda sgd: sgd(lambda: 0.1), r"The learning rate .* a function of this"),
        (None, r"a `LossScaleOptimizer`, .* `mixed_bfloat16`"),
    ],
)
def test_what_servers_cannot_run_is_refused(keras, alone, make, message):
    optimizers = keras.optimizers
    scaled = optimizers.LossScaleOptimizer(optimizers.SGD(0.1))
    with alone.strategy.scope():
        model = make_model(keras, make(optimizers.SGD) if make else scaled)
    with pytest.raises(ValueError, match=message):
        model.fit(X, Y, verbose=0)
