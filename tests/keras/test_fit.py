"""Tests of `fit`, `evaluate` and `predict` on the devices of a strategy."""

import contextlib
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import armillary
import armillary.keras
from armillary.testing import assert_strategies_agree
from tests.tiers import slow_after_first

SPLIT = PartitionSpec("fsdp", "tensor")
STRATEGIES = {
    "one device": lambda: armillary.OneDeviceStrategy("cpu:3"),
    "mirrored": lambda: armillary.MirroredStrategy(jax.devices()[:4]),
}


def run(problem, model, data=None):
    """Returns all numbers of a model that is fitted, evaluated and asked."""
    arrays = {"x": problem.x, "y": problem.y, "batch_size": 16}
    first = {"x": data()} if data else arrays
    options = {"epochs": 2, "verbose": 0, "shuffle": False}
    history = model.fit(**first, validation_data=(problem.x, problem.y), **options)
    first = {"x": data()} if data else arrays
    evaluated = model.evaluate(**first, verbose=0, return_dict=True)
    predicted = model.predict(problem.x, batch_size=16, verbose=0)
    return history.history, evaluated, predicted


def check_same(problem, model, expected, data=None):
    history, evaluated, predicted = run(problem, model, data)
    for name, values in expected[0].items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4)
    assert evaluated == pytest.approx(expected[1], rel=1e-4)
    np.testing.assert_allclose(predicted, expected[2], rtol=1e-3, atol=1e-5)


@slow_after_first("strategy", STRATEGIES)
@slow_after_first("kind", ["sequential", "functional", "subclassed"])
def test_numbers_with_uneven_batches_equal_one_replica(problem, strategy, kind):
    expected = run(problem, problem.make_model(kind))
    strategy = STRATEGIES[strategy]()
    with strategy.scope():
        model = problem.make_model(kind)
    check_same(problem, model, expected)
    devices = strategy.layout.devices
    assert model.variables[0].value.sharding.device_set == set(devices)
    assert model.optimizer.variables[0].value.sharding.device_set == set(devices)


@pytest.mark.slow
def test_batch_normalization_uses_the_global_batch(problem, keras):
    def make():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.layers.Input((4,)), *layers])
        model.compile("sgd", "mse", steps_per_execution=2)
        return model

    def fit(model):
        model.fit(problem.x, problem.x[:, :2], batch_size=20, verbose=0, shuffle=False)
        return problem.read(model)

    expected = fit(make())
    with STRATEGIES["mirrored"]().scope():
        model = make()
    for a, b in zip(fit(model), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# https://github.com/keras-team/keras: it says so of each dataset of unknown size.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distributed", "source", "grain"])
def test_batches_may_come_from_other_sources(problem, kind):
    strategy = STRATEGIES["mirrored"]()

    def make_data():
        if kind != "grain":
            arrays = (problem.x, problem.y)
            source = armillary.data.from_arrays(arrays, batch_size=16)
            is_source = kind == "source"
            return source if is_source else strategy.distribute_dataset(source)
        import grain

        rows = grain.MapDataset.source(range(len(problem.x)))
        return rows.map(lambda i: (problem.x[i], problem.y[i])).batch(16)

    expected = run(problem, problem.make_model())
    with strategy.scope():
        model = problem.make_model()
    check_same(problem, model, expected, make_data)


@pytest.mark.slow
def test_a_model_that_was_fitted_continues_in_a_step_and_back(problem):
    strategy = STRATEGIES["mirrored"]()
    with strategy.scope():
        model = problem.make_model()
        expected = problem.make_model()
        arrays = (problem.x[:64], problem.y[:64])
        model.fit(*arrays, batch_size=16, verbose=0, shuffle=False)
        data = armillary.data.from_arrays(arrays, batch_size=16)
        armillary.keras.KerasTrainer(model, data).train(4)
        model.fit(*arrays, batch_size=16, verbose=0, shuffle=False)
    expected.fit(*arrays, batch_size=16, epochs=3, verbose=0, shuffle=False)
    for a, b in zip(problem.read(model), problem.read(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_models_of_no_strategy_run_as_they_did(problem):
    armillary.MirroredStrategy(jax.devices()[:2])
    model = problem.make_model()
    model.train_on_batch(problem.x[:16], problem.y[:16])
    assert len(model.variables[0].value.sharding.device_set) == 1


@pytest.mark.parametrize("kind", ["sequential", "functional", "subclassed"])
def test_a_model_made_in_a_scope_may_be_compiled_outside(problem, kind):
    with STRATEGIES["mirrored"]().scope():
        model = problem.make_uncompiled(kind)
    model.compile("sgd", "mse")
    model.train_on_batch(problem.x[:16], problem.x[:16, :2])
    assert len(model.variables[0].value.sharding.device_set) == 4


@pytest.mark.slow
@pytest.mark.parametrize("is_made_inside", [True, False])
def test_a_callback_of_fit_runs_another_model(problem, keras, is_made_inside):
    strategy = STRATEGIES["mirrored"]()
    with strategy.scope() if is_made_inside else contextlib.nullcontext():
        other = problem.make_model("sequential")
    with strategy.scope():
        model = problem.make_model("sequential")
    predicted = []

    def predict(epoch, logs):
        predicted.append(other.predict(problem.x[:8], verbose=0))

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=predict)]
    options = {"batch_size": 16, "epochs": 2, "verbose": 0, "callbacks": callbacks}
    model.fit(problem.x[:32], problem.y[:32], **options)
    predicted.append(other.predict(problem.x[:8], verbose=0))
    for found in predicted[1:]:
        np.testing.assert_allclose(found, predicted[0], rtol=1e-5)


def test_a_model_made_outside_runs_as_before_after_a_scope(problem):
    model = problem.make_model("sequential")
    arrays = (problem.x[:16], problem.y[:16])
    with STRATEGIES["mirrored"]().scope():
        model.train_on_batch(*arrays)
        in_scope = model.train_function
    model.train_on_batch(*arrays)
    assert model.train_function is not in_scope


@pytest.mark.slow
def test_single_batches_run_on_all_devices(problem):
    with STRATEGIES["mirrored"]().scope():
        model, other = problem.make_model(), problem.make_model()
    for batch in (slice(0, 16), slice(16, 31)):
        model.train_on_batch(problem.x[batch], problem.y[batch])
    assert len(model.variables[0].value.sharding.device_set) == 4
    predicted = model.predict_on_batch(problem.x[:7])
    np.testing.assert_allclose(predicted, model.predict(problem.x[:7], verbose=0))
    assert other.evaluate(problem.x, problem.y, verbose=0)


def make_data(problem, strategy, *arrays, place_on_device=False, **options):
    source = armillary.data.from_arrays(arrays, batch_size=16, **options)
    inputs = armillary.data.InputOptions(place_on_device=place_on_device)
    return strategy.distribute_dataset(source, inputs)


BESIDE = r"`model\.%s` was given `%s` together with a .* batches `\(x, y\)` or"


def test_arguments_for_arrays_are_refused_with_a_dataset(problem):
    strategy = STRATEGIES["mirrored"]()
    with strategy.scope():
        model = problem.make_model()
    x, y, weights = problem.x, problem.y, problem.weights
    data = make_data(problem, strategy, x, y)
    for method, name, call in (
        ("fit", "sample_weight", lambda: model.fit(data, sample_weight=weights)),
        ("fit", "class_weight", lambda: model.fit(data, class_weight={0: 1.0})),
        ("fit", "y", lambda: model.fit(x, y, validation_data=(data, y))),
        ("evaluate", "y", lambda: model.evaluate(data, y=y)),
    ):
        with pytest.raises(ValueError, match=BESIDE % (method, name)):
            call()
    assert int(model.optimizer.iterations.value) == 0


@pytest.mark.slow
def test_validation_steps_bound_endless_data_and_are_asked_for_before_training(
    problem, keras
):
    strategy = STRATEGIES["mirrored"]()
    data = (problem.x, problem.y)
    endless = make_data(problem, strategy, *data, repeat=True)
    batches = []

    class Count(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            batches.append(batch)
            assert len(batches) < 10

    options = {"verbose": 0, "callbacks": [Count()]}
    with strategy.scope():
        model = problem.make_model()
    with pytest.raises(ValueError, match=r"without end.*or pass `validation_steps=`"):
        model.fit(endless, steps_per_epoch=2, validation_data=endless, **options)
    assert int(model.optimizer.iterations.value) == 0
    model.fit(*data, epochs=2, validation_data=endless, validation_steps=3, **options)
    assert batches == [0, 1, 2] * 2


@pytest.mark.slow
def test_a_model_that_asks_for_its_replicas_is_one_for_the_global_batch(problem, keras):
    class Asking(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            replicas = armillary.get_replica_context().num_replicas_in_sync
            return self.dense(x) * armillary.get_strategy().num_replicas_in_sync / (
                replicas
            ) + armillary.all_reduce("mean", x[:, :1])

    def fit(strategy, *, is_inside):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = Asking()
            model.compile("sgd", "mse")
            scope = strategy.scope() if is_inside else contextlib.nullcontext()
        options = {"batch_size": 10, "verbose": 0, "shuffle": False}
        with scope:
            model.fit(problem.x, problem.x[:, 1], **options)
        return problem.read(model)

    expected = fit(armillary.get_strategy(), is_inside=False)
    for is_inside in (False, True):
        found = fit(armillary.MirroredStrategy(jax.devices()[:2]), is_inside=is_inside)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_state_that_a_strategy_divides_stays_divided_and_numbers_stay_the_same(keras):
    rng = np.random.default_rng(0)
    images = rng.random((42, 8, 8, 2), "float32")
    labels = np.arange(42) % 10

    def make():
        keras.utils.set_random_seed(0)
        conv = functools.partial(
            keras.layers.Conv2D, 16, 3, activation="relu", padding="same"
        )
        layers = [
            keras.layers.Input((8, 8, 2)),
            conv(strides=2),
            conv(groups=4),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=2)
        return model

    data = SimpleNamespace(x=images, y=labels)
    expected = run(data, make())
    shape = {"data": 2, "fsdp": 2, "tensor": 2}
    strategy = armillary.ShardedStrategy(shape, rules={r"layers/5.*kernel": SPLIT})
    with strategy.scope():
        model = make()
    check_same(data, model, expected)
    kernel = model.layers[-1].kernel.value
    assert kernel.addressable_shards[0].data.shape == (256 // 2, 10 // 2)
    moments = [v.value for v in model.optimizer.variables if v.shape == kernel.shape]
    assert [m.addressable_shards[0].data.shape for m in moments] == [(128, 10)] * 2


@pytest.mark.slow
def test_a_keras_trainer_agrees_under_strategies(problem):
    def make_trainer(strategy):
        arrays = problem.x, problem.y
        source = armillary.data.from_arrays(arrays, batch_size=16)
        exact = armillary.data.InputOptions(remainder="exact")
        dataset = strategy.distribute_dataset(source, exact)
        return armillary.keras.KerasTrainer(problem.make_model(), dataset)

    strategies = [make() for make in STRATEGIES.values()]
    strategies.append(armillary.ShardedStrategy({"fsdp": 2, "data": 4}))
    assert_strategies_agree(make_trainer, strategies, tolerance=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_saved_model_is_loaded_compiled(keras, problem, tmp_path):
    """Keras asks whether the class of a model overrides `compile`."""
    strategy = armillary.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        model = problem.make_model()
        model.fit(problem.x, problem.y, verbose=0)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        expected = model.evaluate(problem.x, problem.y, verbose=0)
        assert loaded.evaluate(problem.x, problem.y, verbose=0) == expected
        loaded.fit(problem.x, problem.y, verbose=0)


@pytest.mark.slow
def test_a_way_to_reduce_that_fit_does_not_use_is_a_warning(problem, caplog):
    operations = armillary.distribute.ReductionToOneDevice()
    devices = jax.devices()[:2]
    strategy = armillary.MirroredStrategy(devices, cross_device_ops=operations)
    with strategy.scope():
        model = problem.make_model("sequential")
    for _ in range(2):
        model.evaluate(problem.x, problem.y, batch_size=16, verbose=0)
    (warning,) = [each for each in caplog.messages if "cross_device_ops" in each]
    assert "ReductionToOneDevice()" in warning and "KerasTrainer" in warning


@pytest.mark.slow
@slow_after_first("strategy", STRATEGIES)
def test_a_mesh_of_the_program_is_left(problem, strategy):
    expected = run(problem, problem.make_model("sequential"))
    strategy = STRATEGIES[strategy]()
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=kinds
    )
    with jax.set_mesh(mesh):
        with strategy.scope():
            model = problem.make_model("sequential")
        check_same(problem, model, expected)


@pytest.mark.slow
def test_the_axis_of_replicas_may_have_another_name(problem):
    expected = run(problem, problem.make_model("sequential"))
    strategy = armillary.MirroredStrategy(jax.devices()[:4], axis_name="batch")
    with strategy.scope():
        model = problem.make_model("sequential")
    check_same(problem, model, expected)
