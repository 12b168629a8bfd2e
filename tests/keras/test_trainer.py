"""Tests of `KerasTrainer` and `KerasEvaluator`."""

import jax
import numpy as np
import pytest

import armillary
from tests.problems import make_strategy
from tests.tiers import slow_after_first

NUM_TRAIN, BATCH_SIZE = 64, 16
STEPS = NUM_TRAIN // BATCH_SIZE


def make_data(problem, *, with_weights=False, **options):
    arrays = [problem.x, problem.y, problem.weights]
    arrays = arrays if with_weights else arrays[:2]
    if options.get("repeat"):
        arrays = [array[:NUM_TRAIN] for array in arrays]
    return armillary.data.from_arrays(tuple(arrays), batch_size=BATCH_SIZE, **options)


def fit(problem, model, epochs, *, with_weights=False):
    weights = problem.weights[:NUM_TRAIN] if with_weights else None
    history = model.fit(
        problem.x[:NUM_TRAIN],
        problem.y[:NUM_TRAIN],
        sample_weight=weights,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    )
    return history.history


def to_floats(output):
    return {name: float(value) for name, value in output.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequential", "functional", "subclassed"])
def test_numbers_equal_fit_and_evaluate(problem, kind):
    model = problem.make_model(kind)
    history = fit(problem, model, 2)
    expected = model.evaluate(
        problem.x, problem.y, batch_size=BATCH_SIZE, verbose=0, return_dict=True
    )
    ours = problem.make_model(kind)
    trainer = armillary.keras.KerasTrainer(ours, make_data(problem, repeat=True))
    for epoch in range(2):
        output = to_floats(trainer.train(STEPS))
        assert output == {name: values[epoch] for name, values in history.items()}
    for a, b in zip(problem.read(model), problem.read(ours), strict=True):
        np.testing.assert_array_equal(a, b)
    evaluator = armillary.keras.KerasEvaluator(ours, make_data(problem))
    assert to_floats(evaluator.evaluate(-1)) == pytest.approx(expected)


@slow_after_first("case", ["mean", "sum", "weights", "scaled"])
def test_four_replicas_are_one(problem, keras, case):
    crossentropy = keras.losses.SparseCategoricalCrossentropy
    reduction = "sum" if case == "sum" else "sum_over_batch_size"
    optimizers = keras.optimizers

    def make():
        optimizer = optimizers.SGD(0.05, momentum=0.9)
        if case == "scaled":
            optimizer = optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
        loss = crossentropy(from_logits=True, reduction=reduction)
        return problem.make_model(loss=loss, optimizer=optimizer)

    with_weights = case == "weights"
    model = make()
    history = fit(problem, model, 1, with_weights=with_weights)
    strategy = make_strategy(4)
    with strategy.scope():
        ours = make()
        data = make_data(problem, with_weights=with_weights, repeat=True)
        output = armillary.keras.KerasTrainer(ours, data).train(STEPS)
        evaluator = armillary.keras.KerasEvaluator(ours, make_data(problem))
        evaluated = to_floats(evaluator.evaluate(-1))
    expected = {name: values[0] for name, values in history.items()}
    assert to_floats(output) == pytest.approx(expected, rel=1e-4)
    for a, b in zip(problem.read(model), problem.read(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    if case != "sum":  # Keras then weights the sum of each batch by its size.
        expected = model.evaluate(problem.x, problem.y, verbose=0, return_dict=True)
        assert evaluated == pytest.approx(expected, rel=1e-4)


def make_scaled(keras):
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**20)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_loss_scale_that_overflows_shrinks_as_in_fit(problem, keras, num_replicas):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = problem.make_model(optimizer=make_scaled(keras))
        fit(problem, model, 2)
        with make_strategy(num_replicas).scope():
            ours = problem.make_model(optimizer=make_scaled(keras))
            data = make_data(problem, repeat=True)
            trainer = armillary.keras.KerasTrainer(ours, data)
            trainer.train(2 * STEPS)
    finally:
        keras.config.set_dtype_policy("float32")
    scales = [float(each.optimizer.dynamic_scale.value) for each in (model, ours)]
    assert scales[0] == scales[1] < 2.0**20
    for a, b in zip(problem.read(model), problem.read(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)


def make_controller(problem, folder, strategy):
    with strategy.scope():
        model = problem.make_model()
        trainer = armillary.keras.KerasTrainer(
            model, make_data(problem, repeat=True, shuffle_seed=0)
        )
        evaluator = armillary.keras.KerasEvaluator(model, make_data(problem))
    checkpoint = armillary.Checkpoint(model=model, data=trainer.train_dataset)
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=evaluator,
        global_step=model.optimizer.iterations,
        strategy=strategy,
        steps_per_loop=3,
        checkpoint_manager=armillary.CheckpointManager(checkpoint, folder),
    )
    return model, controller


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_bit_for_bit_like_one_that_was_not(
    problem, tmp_path
):
    whole, controller = make_controller(problem, tmp_path / "whole", make_strategy(2))
    expected = controller.train_and_evaluate(train_steps=9, eval_interval=6)
    _, controller = make_controller(problem, tmp_path / "parts", make_strategy(2))
    controller.train(steps=6)
    resumed, controller = make_controller(problem, tmp_path / "parts", make_strategy(2))
    assert int(resumed.optimizer.iterations.value) == 6
    output = controller.train_and_evaluate(train_steps=9, eval_interval=6)
    for a, b in zip(problem.read(whole), problem.read(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    assert to_floats(output) == to_floats(expected)


def test_a_step_of_the_models_own_is_not_dropped(problem, keras):
    class Own(keras.Model):
        def train_step(self, state, data):
            return {}, state

    model = Own()
    model.compile(loss="mse")
    with pytest.raises(TypeError, match=r"has a `train_step` of its own"):
        armillary.keras.KerasTrainer(model, make_data(problem))


@pytest.mark.slow
@pytest.mark.parametrize("frequency", [None, 3])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_averaged_weights_equal_the_weights_of_fit(
    problem, keras, frequency, num_replicas
):
    def make():
        options = {"ema_momentum": 0.9, "ema_overwrite_frequency": frequency}
        optimizer = keras.optimizers.SGD(0.05, use_ema=True, **options)
        return problem.make_model(optimizer=optimizer)

    def evaluate(model):
        return model.evaluate(
            problem.x, problem.y, batch_size=BATCH_SIZE, verbose=0, return_dict=True
        )

    model = make()
    untrained = evaluate(model)
    fit(problem, model, 2)
    trained = evaluate(model)
    with make_strategy(num_replicas).scope():
        ours = make()
        trainer = armillary.keras.KerasTrainer(ours, make_data(problem, repeat=True))
        evaluator = armillary.keras.KerasEvaluator(ours, make_data(problem))

        first = to_floats(evaluator.evaluate(-1))
        trainer.train(2 * STEPS)
        before = problem.read(ours)
        last = to_floats(evaluator.evaluate(-1))

    # Before the first step the averages are zeros, and no weights.
    assert first == pytest.approx(untrained, rel=1e-5)
    assert last == pytest.approx(trained, rel=1e-5)
    for a, b in zip(problem.read(ours), before, strict=True):
        np.testing.assert_array_equal(a, b)
    ours.optimizer.finalize_variable_values(ours.trainable_variables)
    for a, b in zip(problem.read(ours), problem.read(model), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_a_trainer_reduces_in_the_way_of_its_strategy(problem):
    calls = []

    class Noted(armillary.distribute.ReductionToOneDevice):
        def reduce(self, op, values):
            calls.append(len(values))
            return super().reduce(op, values)

    def train(operations):
        devices = jax.devices()[:2]
        strategy = armillary.MirroredStrategy(devices, cross_device_ops=operations)
        with strategy.scope():
            model = problem.make_model("sequential")
        source = armillary.data.from_arrays((problem.x, problem.y), batch_size=10)
        dataset = strategy.distribute_dataset(source)
        trainer = armillary.keras.KerasTrainer(model, dataset)
        with strategy.scope():
            trainer.train(3)
        return problem.read(model)

    pairs = zip(train(Noted()), train(None), strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert calls and set(calls) == {4}


def test_a_name_of_flax_is_an_error_with_the_name_of_keras(problem):
    model = problem.make_model()
    trainer = armillary.keras.KerasTrainer(model, make_data(problem, repeat=True))
    with pytest.raises(AttributeError, match=r"step.*Write `optimizer\.iterations`"):
        armillary.Controller(
            trainer=trainer, global_step=model.optimizer.step, steps_per_loop=1
        )
    assert not hasattr(model.optimizer, "step")
    with pytest.raises(AttributeError, match=r"Write `metric\.result\(\)`"):
        model.metrics[0].compute()
