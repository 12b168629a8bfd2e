"""Tests that steps which leave infinities or NaN are undone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import StandardTrainerOptions as Options
from armillary.data import from_arrays
from armillary.errors import NonFiniteError, ReplicaDivergenceError
from armillary.trainer import _loop_guard
from armillary.trainer._loop_guard import LoopCheck
from tests.problems import (
    CNN,
    MLP,
    Classifier,
    assert_identical,
    find_changed,
    make_digits,
    make_strategy,
    read_state,
)
from tests.tiers import slow_after_first

LOOP = {"steps_per_chunk": 3}
PYTHON_LOOP = {"compile_loop": False}
ways = pytest.mark.parametrize(
    ("num_replicas", "way"),
    [(4, LOOP), (4, PYTHON_LOOP), (None, LOOP)],
    ids=["loop 4", "Python loop 4", "loop"],
)


class Dense(nnx.Module):
    """A model without random state."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x):
        return self.layer(x.reshape(x.shape[0], -1))


def make_data(strategy, bad_steps=(), left_out=(), num_steps=12, **options):
    """Returns batches of 8, some of which are not finite."""
    data = make_digits(8 * num_steps)
    for step in bad_steps:
        data["image"][8 * step + 5] = np.nan
    kept = [i for i in range(8 * num_steps) if i // 8 not in left_out]
    arrays = {name: value[kept] for name, value in data.items()}
    return strategy.distribute_dataset(from_arrays(arrays, batch_size=8, **options))


def make_trainer(num_replicas=1, model=Dense, data=None, **options):
    strategy = armillary.distribute.DefaultStrategy()
    if num_replicas is not None:
        strategy = make_strategy(num_replicas)
    dataset = make_data(strategy, **(data or {}))
    with strategy.scope():
        return Classifier(
            strategy, model(nnx.Rngs(0)), optax.adam(1e-2), dataset, **options
        )


def make_controller(trainer, directory=None, checkpoint_interval=2, **options):
    manager = None
    if directory is not None:
        manager = armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer, data=trainer.train_dataset),
            directory,
            checkpoint_interval=checkpoint_interval,
        )
    return armillary.Controller(
        **{
            "trainer": trainer,
            "global_step": trainer.optimizer.step,
            "strategy": trainer.strategy,
            "steps_per_loop": 2,
            "checkpoint_manager": manager,
            **options,
        }
    )


def is_finite(trainer):
    return all(
        np.isfinite(value).all()
        for value in read_state(trainer).values()
        if np.issubdtype(value.dtype, np.floating)
    )


# Steps that are good


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "model", "num_replicas"),
    [("raise", MLP, 4), ("skip", MLP, 1), ("raise", CNN, 1), ("skip", CNN, 4)],
    ids=["loop 4", "loop 1", "program per step 1", "program per step 4"],
)
@pytest.mark.usefixtures("optimized")
def test_good_steps_give_the_same_bits_as_without_the_option(
    option, model, num_replicas
):
    plain = make_trainer(num_replicas, model)
    watched = make_trainer(num_replicas, model, on_non_finite=option)

    plain.train(9)
    for num_steps in (4, 1, 4):
        watched.train(num_steps)

    assert_identical(read_state(watched), read_state(plain))


# Skipped steps


@pytest.mark.slow
@ways
def test_a_skipped_step_changes_counters_only(num_replicas, way):
    data = {"bad_steps": [0, 4, 5]}
    trainer = make_trainer(num_replicas, data=data, on_non_finite="skip", **way)
    expected = make_trainer(num_replicas, data={"left_out": [0, 4, 5]}, **way)

    trainer.train(6)
    trainer.train(4)
    expected.train(7)

    actual, good = read_state(trainer), read_state(expected)
    assert actual.pop("optimizer/step") == 10
    assert good.pop("optimizer/step") == 7
    # Each loss was written at its step, except for the losses of skipped steps.
    losses = actual.pop("losses")
    np.testing.assert_array_equal(np.flatnonzero(losses), [1, 2, 3, 6, 7, 8, 9])
    np.testing.assert_array_equal(losses[losses != 0], good.pop("losses")[:7])
    assert_identical(actual, good)


class Plain(armillary.StandardTrainer):
    """Keeps everything in plain attributes."""

    def __init__(self, x, **options):
        super().__init__(from_arrays({"x": x}, batch_size=1), Options(**options))
        self.transform = optax.adam(0.1)
        weights = jnp.ones(2)
        self.run = {
            "weights": weights,
            "optimizer": self.transform.init(weights),
            "step": jnp.int32(0),
        }
        self.key = jax.random.PRNGKey(0)
        self.best = jnp.float32(jnp.inf)
        self.log = jnp.full(8, jnp.nan)
        self.quantized = jnp.zeros(2, jnp.int8)

    def train_step(self, iterator):
        x = next(iterator)["x"][0]
        self.key, _ = jax.random.split(self.key)
        loss, gradient = jax.value_and_grad(lambda w: jnp.sum(w * x) ** 2)(
            self.run["weights"]
        )
        gradient = armillary.all_reduce("sum", gradient)
        updates, state = self.transform.update(gradient, self.run["optimizer"])
        self.log = self.log.at[self.run["step"]].set(loss)
        self.best = jnp.minimum(self.best, loss)
        self.quantized = self.quantized + jnp.int8(1)
        self.run = {
            "weights": optax.apply_updates(self.run["weights"], updates),
            "optimizer": state,
            "step": self.run["step"] + 1,
        }


@pytest.mark.slow
def test_plain_attributes_except_counters_and_keys_keep_their_values():
    x = np.array([[1, 2], [np.inf, 1], [3, 1]], np.float32)
    trainer = Plain(x, on_non_finite="skip")
    trainer.train(1)
    before = read_state(trainer)
    trainer.train(1)

    changed = find_changed(before, read_state(trainer))
    assert changed == {"run/step", "key"}
    trainer.train(1)
    assert np.isfinite(trainer.run["weights"]).all()
    assert int(trainer.run["optimizer"][0].count) == 2


def test_values_that_were_not_finite_before_are_no_failure():
    trainer = Plain(np.ones((8, 2), np.float32), on_non_finite="raise")

    trainer.train(6)

    assert np.isfinite(trainer.log[:6]).all()
    assert np.isnan(trainer.log[6:]).all()


@pytest.mark.slow
def test_skipped_steps_are_reported_once_for_each_loop(caplog):
    trainer = make_trainer(data={"bad_steps": [2, 4, 5]}, on_non_finite="skip")
    controller = make_controller(trainer)

    controller.train(12)

    warnings = [line for line in caplog.messages if "were skipped" in line]
    assert len(warnings) == 2
    assert "1 of 2 steps" in warnings[0]
    assert "The first was step 3:\n" in warnings[0]
    assert "model/layer/kernel: 192 values" in warnings[0]
    assert "2 of 2 steps" in warnings[1]
    assert "The first was step 5:\n" in warnings[1]


# Steps that end training


@ways
@slow_after_first("bad", [0, 4])
def test_a_bad_step_ends_training_as_if_it_had_not_run(bad, num_replicas, way):
    data = {"bad_steps": [bad, 7]}
    trainer = make_trainer(num_replicas, data=data, on_non_finite="raise", **way)
    expected = make_trainer(num_replicas, data=data, **way)

    with pytest.raises(
        NonFiniteError,
        match=rf"`train_step` left values that are not finite in .* arrays, at step "
        rf"{bad + 1} of the 9 of this loop:\n(.*\n)*  model/layer/bias: 3 values\n"
        rf'(.*\n)*The state is the same as before .* `on_non_finite="skip"`',
    ) as caught:
        trainer.train(9)

    assert caught.value.step is None
    assert caught.value.leaves["model/layer/kernel"] == 192
    assert isinstance(caught.value, FloatingPointError)
    if bad:
        expected.train(bad)
    assert_identical(read_state(trainer), read_state(expected))
    assert trainer.train_dataset.get_state() == expected.train_dataset.get_state()
    # The same step fails again, and others do not.
    with pytest.raises(NonFiniteError, match="at step 1 of the 2 of this loop"):
        trainer.train(2)
    trainer.train_dataset.set_state(make_data(trainer.strategy).get_state())
    if bad:
        trainer.train(bad)
        assert is_finite(trainer)


def test_a_bad_step_is_reported_after_ctrl_c_in_the_wait_for_it(monkeypatch):
    trainer = make_trainer(data={"bad_steps": [1]}, on_non_finite="raise")

    def interrupt(check):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LoopCheck, "fetch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(3)

    with pytest.raises(NonFiniteError, match="at step 2 of the 3 of this loop"):
        trainer.train(3)
    assert int(trainer.optimizer.step[...]) == 1
    # The same step fails again, and others do not.
    with pytest.raises(NonFiniteError, match="at step 1 of the 2 of this loop"):
        trainer.train(2)


def test_replicas_that_differ_end_a_bad_step_as_well(monkeypatch):
    trainer = make_trainer(
        2, data={"bad_steps": [1]}, on_non_finite="raise", check_replicas_every=1
    )

    def refuse(*_):
        raise ReplicaDivergenceError("The replicas differ.")

    with monkeypatch.context() as patch:
        patch.setattr(_loop_guard, "check_copies", refuse)
        with pytest.raises(ReplicaDivergenceError):
            trainer.train(3)
    trainer.train(2)

    assert int(trainer.optimizer.step[...]) == 3


def make_streaming_trainer(error=None, **options):
    """Returns a trainer of six batches, of which the second is bad."""

    def make_batches():
        for step in range(6):
            if step == 5 and error is not None:
                raise error
            x = np.full((2, 64), np.nan if step == 1 else step, np.float32)
            yield {"image": x, "label": np.zeros(2, np.int32)}

    strategy = armillary.distribute.DefaultStrategy()
    return Classifier(
        strategy,
        Dense(nnx.Rngs(0)),
        optax.sgd(1e-3),
        strategy.distribute_dataset(make_batches),
        on_non_finite="raise",
        **options,
    )


def test_data_that_cannot_be_repositioned_continues_behind_the_loop():
    trainer = make_streaming_trainer()

    with pytest.raises(NonFiniteError, match="at step 2 of the 3"):
        trainer.train(3)
    trainer.train(9)

    assert int(trainer.optimizer.step[...]) == 4
    assert trainer.data_exhausted


@pytest.mark.slow
def test_an_error_of_the_data_does_not_hide_a_bad_step():
    error = RuntimeError("The data is on strike.")
    trainer = make_streaming_trainer(error, steps_per_chunk=2)

    with pytest.raises(RuntimeError, match=r"on strike(.|\n)*at step 2 of the 9"):
        trainer.train(9)

    assert int(trainer.optimizer.step[...]) == 1
    assert is_finite(trainer)


def test_an_error_at_the_end_of_a_loop_does_not_hide_a_bad_step():
    class Strict(Classifier):
        def train_loop_end(self):
            raise RuntimeError("The loop ends badly.")

    model = Dense(nnx.Rngs(0))
    trainer = Strict(
        armillary.distribute.DefaultStrategy(),
        model,
        optax.sgd(1e-3),
        on_non_finite="raise",
    )
    kernel = model.layer.kernel[...].copy()
    model.layer.kernel[...] = jnp.full_like(kernel, 3e38)

    with pytest.raises(RuntimeError, match=r"ends badly(.|\n)*at step 1 of the 2"):
        trainer.train(2)
    model.layer.kernel[...] = kernel
    with pytest.raises(RuntimeError, match="ends badly"):
        trainer.train(3)

    assert int(trainer.optimizer.step[...]) == 3


@pytest.mark.slow
def test_replicas_decide_alike_when_one_of_them_overflows():
    class Doubling(armillary.StandardTrainer):
        def __init__(self):
            self.strategy = make_strategy(4)
            data = from_arrays({"x": np.ones((64, 1), np.float32)}, batch_size=4)
            data = self.strategy.distribute_dataset(data)
            super().__init__(data, Options(on_non_finite="raise"))
            sharding = jax.sharding.NamedSharding(
                self.strategy.mesh, jax.sharding.PartitionSpec()
            )
            copies = [
                jax.device_put(np.float32([2e38 if i == 2 else 1.0]), device)
                for i, device in enumerate(self.strategy.mesh.devices.flat)
            ]
            self.value = nnx.Variable(
                jax.make_array_from_single_device_arrays((1,), sharding, copies)
            )
            self.total = nnx.Variable(jnp.zeros(()))

        def train_step(self, iterator):
            def step_fn(batch):
                self.value[...] = self.value[...] * 1.5
                summed = jax.lax.psum(batch["x"].sum(), "replica")
                self.total[...] += summed

            self.strategy.run(step_fn, args=(next(iterator),))

    trainer = Doubling()

    with pytest.raises(NonFiniteError, match="  value: 1 value\n") as caught:
        trainer.train(8)

    assert caught.value.leaves == {"value": 1}
    copies = [np.asarray(s.data) for s in trainer.value[...].addressable_shards]
    np.testing.assert_allclose(copies[0], [1.5])
    np.testing.assert_allclose(copies[2], [3e38])
    assert float(trainer.total[...]) == 4


# The controller


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0, 1, 4, 5, 11])
def test_the_controller_names_the_global_step_and_saves_good_states_only(bad, tmp_path):
    trainer = make_trainer(2, data={"bad_steps": [bad]}, on_non_finite="raise")
    controller = make_controller(trainer, tmp_path)

    with pytest.raises(NonFiniteError, match=f"at step {bad + 1}:\n") as caught:
        controller.train(12)

    assert caught.value.step == bad + 1
    assert int(trainer.optimizer.step[...]) == bad
    assert is_finite(trainer)
    expected = make_trainer(2, data={"bad_steps": [bad]})
    controller.save_checkpoint()
    resumed = make_trainer(2, data={"bad_steps": [bad]})
    make_controller(resumed, tmp_path)
    if bad:
        expected.train(bad)
    assert int(resumed.optimizer.step[...]) == bad
    path = "model/layer/kernel"
    np.testing.assert_array_equal(read_state(resumed)[path], read_state(expected)[path])
    assert resumed.train_dataset.get_state() == expected.train_dataset.get_state()


def test_a_metric_of_a_pure_step_that_is_not_a_number_ends_training():
    def step(state, batch):
        # The state itself stays finite.
        return {"step": state["step"] + 1}, {"loss": jnp.log(batch.min())}

    rows = np.array([[4.0], [3.0], [-1.0], [2.0]], np.float32)
    trainer = armillary.StepTrainer(
        step,
        {"step": jnp.zeros((), jnp.int32)},
        armillary.data.from_arrays(rows, batch_size=1),
        options=armillary.StandardTrainerOptions(on_non_finite="raise"),
    )
    with pytest.raises(NonFiniteError, match="step 3 of the 4"):
        trainer.train(4)
    assert int(trainer.state["step"]) == 2
