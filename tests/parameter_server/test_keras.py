"""Tests of Keras on parameter servers: `fit`, `KerasTrainer` and custom steps."""

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
        # The first optimizer proves the promise, so the others are slow tests.
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


def test_fit_on_one_worker_equals_fit(keras, alone):
    """Weights, batch statistics, the optimizer, metrics and history, two times."""
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": 3}
    options |= {"validation_split": 0.2, "class_weight": {0: 1.0, 1: 2.0}}

    def train():
        model = make_model(keras)
        history = model.fit(X, Y, **options).history
        options_of_part = {**options, "validation_split": 0, "epochs": 2}
        model.fit(X, Y, steps_per_epoch=2, **options_of_part)
        model.train_on_batch(X, Y)
        evaluated = model.evaluate(X, Y, verbose=0, return_dict=True)
        predicted = model.predict(X, verbose=0)
        return {**history, **evaluated, "predicted": predicted}, values_of(model)

    expected_numbers, expected = train()
    with alone.strategy.scope():
        numbers, found = train()
    assert_close(numbers, expected_numbers)
    # Keras names its objects by counting.
    assert_close(dict(enumerate(found.values())), dict(enumerate(expected.values())))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "clipnorm": 1.0, "momentum": 0.9},
        {"use_ema": True, "ema_overwrite_frequency": 4, "clipvalue": 0.1},
    ],
)
def test_the_optimizer_of_fit_runs_on_the_servers(keras, alone, options):
    def train():
        model = make_model(keras, keras.optimizers.SGD(0.1, **options))
        model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
        return dict(enumerate(values_of(model).values()))

    expected = train()
    with alone.strategy.scope():
        assert_close(train(), expected)


class Recorder:
    """Counts how often each method of a callback is called."""

    def __init__(self, keras):
        self.batches, self.epochs, self.ends = [], [], []
        self.callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: self.batches.append((batch, *logs)),
            on_epoch_end=lambda epoch, logs: self.epochs.append((epoch, *logs)),
            on_train_end=lambda logs: self.ends.append(tuple(logs)),
        )


@pytest.mark.parametrize(
    ("steps_per_execution", "ends"), [(1, [6, 6]), (4, [3, 7, 3, 7])]
)
def test_callbacks_run_here_after_the_steps_that_were_scheduled(
    keras, coordinator, steps_per_execution, ends
):
    with coordinator.strategy.scope():
        model = make_model(keras, steps_per_execution=steps_per_execution)
    recorder = Recorder(keras)
    model.fit(
        X,
        Y,
        batch_size=10,
        epochs=2,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[recorder.callback],
    )
    metrics = ("accuracy", "loss")
    assert recorder.batches == [(end, *metrics) for end in ends]
    both = (*metrics, "val_accuracy", "val_loss")
    assert recorder.epochs == [(0, *both), (1, *both)]
    assert recorder.ends == [both]
    assert int(model.optimizer.iterations.value) == 14
    assert model.steps_per_execution == steps_per_execution


# Variables of Keras lack an argument that NumPy 2 passes.
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_callbacks_change_the_rate_stop_and_save(keras, coordinator, tmp_path):
    callbacks = keras.callbacks
    with coordinator.strategy.scope():
        model = make_model(keras, keras.optimizers.SGD(0.5))
    before = values_of(model)
    path = str(tmp_path / "best.keras")
    history = model.fit(
        X,
        Y,
        batch_size=10,
        epochs=9,
        verbose=0,
        callbacks=[
            callbacks.LearningRateScheduler(lambda epoch: 0.0),
            callbacks.EarlyStopping("loss", min_delta=10.0, patience=1),
            callbacks.ModelCheckpoint(path),
        ],
    ).history
    assert history["learning_rate"] == [0.0, 0.0]
    after = values_of(model)
    for name in before:
        if name.endswith("kernel"):  # `max_norm` rounds one of them.
            np.testing.assert_allclose(after[name], before[name], rtol=1e-5)
    loaded = keras.models.load_model(path)
    np.testing.assert_allclose(
        loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5
    )


@pytest.mark.parametrize("verbose", [1, 2, "auto"])
def test_fit_shows_its_epochs(keras, coordinator, capsys, verbose):
    with coordinator.strategy.scope():
        model = make_model(keras)
    model.fit(X, Y, batch_size=10, epochs=2, verbose=verbose)
    shown = capsys.readouterr().out
    assert "Epoch 1/2" in shown and "Epoch 2/2" in shown
    assert "7/7" in shown
    assert "accuracy: " in shown and "loss: " in shown


def test_fit_has_the_one_coordinator_of_its_strategy(keras, coordinator):
    with coordinator.strategy.scope():
        model = make_model(keras)
    coordinator.join()
    coordinator.take_statistics()
    model.fit(X, Y, batch_size=10, verbose=0)
    assert coordinator.strategy.coordinator is coordinator
    assert coordinator.statistics.num_calls == 7


# Keras says so of each dataset whose length it does not know.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_fit_takes_generators_with_and_without_an_end(keras, coordinator):
    def batches(count):
        for _ in range(count):
            yield X[:10], Y[:10]

    with coordinator.strategy.scope():
        model = make_model(keras)
    stop = keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=0)
    history = model.fit(
        batches(100),
        steps_per_epoch=6,
        epochs=5,
        callbacks=[stop],
        shuffle=False,
        verbose=0,
    )
    assert len(history.history["loss"]) == 2
    assert int(model.optimizer.iterations.value) == 12
    loss = model.evaluate(X[:10], Y[:10], verbose=0)[0]
    assert loss < history.history["loss"][0]
    model.fit(batches(70), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.value) == 12 + 70


def test_validation_takes_its_own_number_of_steps(keras, coordinator):
    """It has nothing to do with the number of steps that are scheduled together."""
    taken = []

    def batches():
        while True:
            taken.append(1)
            yield X[:10], Y[:10]

    with coordinator.strategy.scope():
        model = make_model(keras)
    model.fit(
        X, Y, batch_size=5, validation_data=batches(), validation_steps=3, verbose=0
    )
    assert int(model.optimizer.iterations.value) == 14
    # Keras looks at one batch more.
    assert 3 <= len(taken) <= 4


@pytest.mark.parametrize("kind", ["arrays", "distributed"])
def test_fit_takes_datasets_of_this_library(keras, alone, kind):
    def train(strategy):
        with strategy.scope():
            model = make_model(keras)
            data = armillary.data.from_arrays((X, Y), batch_size=16)
            if kind == "distributed":
                data = strategy.distribute_dataset(data)
        return model.fit(data, epochs=2, verbose=0).history

    assert_close(train(alone.strategy), train(armillary.get_strategy()))


@pytest.mark.parametrize("kind", ["creator", "distributed"])
def test_each_worker_makes_the_data_that_it_reads(keras, coordinator, kind):
    def dataset_fn(context):
        share = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        size = context.get_per_replica_batch_size(16)
        return armillary.data.from_arrays(
            (X[share], Y[share]), batch_size=size, repeat=True
        )

    strategy = coordinator.strategy
    if kind == "creator":
        data = armillary.keras.DatasetCreator(dataset_fn)
    else:
        data = strategy.distribute_datasets_from_function(dataset_fn)
    with strategy.scope():
        model = make_model(keras)
    history = model.fit(data, epochs=3, steps_per_epoch=20, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert int(model.optimizer.iterations.value) == 60
    with pytest.raises(ValueError, match=r"`steps_per_epoch` is None.*steps_per_epoch"):
        model.fit(data, verbose=0)
    with pytest.raises(ValueError, match=r"`model\.fit` was given `y` together"):
        model.fit(data, Y, steps_per_epoch=2, verbose=0)


def test_a_worker_that_is_lost_costs_fit_no_step(keras, coordinator, kill):
    scheduler = coordinator._scheduler
    begin = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: kill(scheduler.workers[epoch].actor)
    )
    with coordinator.strategy.scope():
        model = make_model(keras)
    options = {"batch_size": 5, "epochs": 2, "callbacks": [begin], "verbose": 0}
    history = model.fit(X, Y, **options).history
    assert np.all(np.isfinite(history["loss"]))
    assert int(model.optimizer.iterations.value) == 28


def test_fit_starts_workers_again_after_shutdown(keras, make_coordinator):
    coordinator = make_coordinator(num_workers=1, num_ps=1)
    with coordinator.strategy.scope():
        model = make_model(keras)
    model.fit(X, Y, batch_size=10, verbose=0)
    coordinator.shutdown()
    model.fit(X, Y, batch_size=10, verbose=0)
    assert int(model.optimizer.iterations.value) == 14
    coordinator.strategy.coordinator.shutdown()


def test_fit_raises_what_a_worker_raises_and_can_be_called_again(keras, coordinator):
    class Picky(keras.layers.Layer):
        def call(self, x, training=False):
            if training and x.shape[0] == 13:
                raise ArithmeticError("thirteen examples")
            return x

    with coordinator.strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.layers.Input((4,)), Picky(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    with pytest.raises(ArithmeticError, match="thirteen"):
        model.fit(X[:13], Y[:13], batch_size=13, verbose=0)
    assert all(np.all(np.isfinite(value)) for value in values_of(model).values())
    model.fit(X, Y, batch_size=10, verbose=0)
    assert int(model.optimizer.iterations.value) == 7


def test_a_train_step_of_the_model_runs_on_workers(keras, alone):
    def train():
        class Doubled(keras.Sequential):
            def train_step(self, state, data):
                x, y = data
                return super().train_step(state, (2 * x, y))

        keras.utils.set_random_seed(0)
        model = Doubled([keras.layers.Input((4,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model.fit(X, Y, batch_size=10, shuffle=False, verbose=0).history

    expected = train()
    with alone.strategy.scope():
        assert_close(train(), expected)


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
def test_models_that_servers_cannot_run_are_refused(keras, alone, make, message):
    optimizers = keras.optimizers
    scaled = optimizers.LossScaleOptimizer(optimizers.SGD(0.1))
    with alone.strategy.scope():
        model = make_model(keras, make(optimizers.SGD) if make else scaled)
        trainer = armillary.keras.KerasTrainer(model, [(X, Y)])
        with pytest.raises(ValueError, match=message):
            trainer.train(1)
