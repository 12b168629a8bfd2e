"""Keras on parameter servers: `KerasTrainer`, and steps of one's own."""

import numpy as np
import pytest

import armillary

pytestmark = [
    pytest.mark.slow,
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        # Of other optimizers what the first one proves.
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"gradient_accumulation_steps": 2, "clipnorm": 1.0, "momentum": 0.9},
                {"use_ema": True, "ema_overwrite_frequency": 4, "clipvalue": 0.1},
            )
        ),
    ],
)
def test_a_trainer_on_one_worker_equals_one_without_servers(keras, alone, options):
    """Weights, batch statistics, the optimizer and metrics, two loops."""

    def train(strategy):
        with strategy.scope():
            model = make_model(
                keras, keras.optimizers.SGD(0.1, **options) if options else None
            )
            data = armillary.data.from_arrays(
                (X[:64], Y[:64]), batch_size=16, repeat=True
            )
            trainer = armillary.keras.KerasTrainer(model, data)
            outputs = [trainer.train(6) for _ in range(2)]
        metrics = [{k: float(o[k]) for k in ("accuracy", "loss")} for o in outputs]
        # Keras names its objects by counting.
        return metrics, dict(enumerate(values_of(model).values()))

    expected_metrics, expected = train(armillary.get_strategy())
    metrics, found = train(alone.strategy)
    for a, b in zip(metrics, expected_metrics, strict=True):
        assert a == pytest.approx(b, rel=2e-4)
    assert_close(found, expected)


def test_fit_is_refused(keras, alone):
    with alone.strategy.scope():
        model = make_model(keras)
    for call in (model.fit, model.train_on_batch):
        with pytest.raises(TypeError, match=r"`armillary\.keras\.KerasTrainer`"):
            call(X, Y)
    assert model.evaluate(X, Y, verbose=0)


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
        trainer = armillary.keras.KerasTrainer(model, [(X, Y)])
        with pytest.raises(ValueError, match=message):
            trainer.train(1)
