"""Tests of data that depends on the state, with `read_ahead=False`."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import StandardTrainerOptions
from armillary.data import InputOptions
from armillary.errors import StaleStateError
from tests.mistakes import mistakes
from tests.tiers import slow_after_first

IN_STEP = StandardTrainerOptions(read_ahead=False)


class Games:
    """Batches that record the number of steps in the state when each is made."""

    def __init__(self, num_batches=12):
        self.seen: list[int] = []
        self.num_batches = num_batches
        self.trainer: Any = None

    def __call__(self):
        for _ in range(self.num_batches):
            self.seen.append(int(self.trainer.state))
            yield np.zeros(4, "float32")


def count_steps(state, batch):
    return state + 1, {}


def train(games, *, steps_per_loop=1, num_replicas=1, data=None, options=IN_STEP):
    trainer = armillary.StepTrainer(
        count_steps,
        jnp.zeros((), "int32"),
        games if data is None else data,
        strategy=armillary.MirroredStrategy(jax.devices()[:num_replicas]),
        options=options,
    )
    games.trainer = trainer
    armillary.Controller(
        trainer=trainer,
        global_step=trainer.global_step,
        steps_per_loop=steps_per_loop,
    ).train(games.num_batches)
    return trainer


@slow_after_first(
    ("steps_per_loop", "num_replicas", "compile_loop"),
    [(5, 4, True), (1, 1, True), (5, 1, True), (1, 4, True), (5, 1, False)],
)
def test_each_batch_is_made_with_the_state_of_its_step(
    steps_per_loop, num_replicas, compile_loop
):
    games = Games()
    options = StandardTrainerOptions(read_ahead=False, compile_loop=compile_loop)
    train(
        games,
        steps_per_loop=steps_per_loop,
        num_replicas=num_replicas,
        options=options,
    )
    assert games.seen == list(range(12))


def test_single_steps_without_a_reading_thread_are_the_same():
    games = Games()
    strategy = armillary.MirroredStrategy(jax.devices()[:1])
    train(
        games,
        steps_per_loop=4,
        data=strategy.distribute_dataset(games, InputOptions(prefetch=0)),
        options=StandardTrainerOptions(steps_per_chunk=1),
    )
    assert games.seen == list(range(12))


@pytest.mark.parametrize("prefetch", [2, 0])
def test_data_that_are_read_ahead_may_not_read_the_state(prefetch):
    games = Games()
    strategy = armillary.MirroredStrategy(jax.devices()[:1])
    data = strategy.distribute_dataset(games, InputOptions(prefetch=prefetch))
    message = (
        r"reads `trainer.state`, but .*`StandardTrainerOptions\(read_ahead=False\)"
    )
    with pytest.raises(StaleStateError, match=message):
        train(games, data=data, options=None)


def test_an_array_that_a_step_has_taken_over_is_named():
    def make_batches():
        yield np.zeros(4, "float32")
        state = trainer.state
        for _ in range(3):
            yield np.full(4, jnp.sum(state), "float32")

    # The memory of scalars is not taken over.
    trainer = armillary.StepTrainer(
        count_steps, jnp.zeros(2), make_batches, options=IN_STEP
    )
    message = r"Batch 2 of .*has been deleted.*read_ahead=False.*`array.copy\(\)`"
    with pytest.raises(StaleStateError, match=message):
        trainer.train(3)


def test_other_errors_of_a_source_stay_as_they_are():
    def make_batches():
        yield np.zeros(4, "float32")
        raise RuntimeError("The file has been removed.")

    trainer = armillary.StepTrainer(count_steps, jnp.zeros((), "int32"), make_batches)
    with pytest.raises(RuntimeError, match="has been removed") as caught:
        trainer.train(3)
    assert type(caught.value) is RuntimeError


def test_the_data_of_an_evaluation_may_read_the_state():
    trainer = armillary.StepTrainer(count_steps, jnp.zeros((), "int32"), [np.zeros(4)])
    trainer.train(1)

    def play():
        for _ in range(30):
            yield np.full(4, trainer.state, "float32")

    evaluator = armillary.StepEvaluator(
        lambda state, batch: {"x": batch}, trainer, play
    )
    assert evaluator.evaluate(-1)["x"] == 1


ADAM = optax.adam(0.05)


class SelfPlay(armillary.StandardTrainer):
    """A model of NNX that learns from rows which it has made itself."""

    def __init__(self):
        super().__init__(self.play, IN_STEP)
        self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, ADAM, wrt=nnx.Param)

    def play(self):
        rng = np.random.default_rng(0)
        while True:
            yield make_rows(rng, self.model.kernel[...])

    def train_step(self, iterator):
        rows = next(iterator)
        gradients = nnx.grad(lambda model: loss_of(model(rows["x"]), rows))(self.model)
        self.optimizer.update(self.model, gradients)


def make_rows(rng, kernel):
    x = rng.normal(size=(8, 3)).astype("float32")
    return {"x": x, "y": np.tanh(x @ np.asarray(kernel)) + 1}


def loss_of(outputs, rows):
    return jnp.mean((outputs - rows["y"]) ** 2)


def test_a_model_that_makes_its_data_trains_as_in_a_loop_by_hand():
    trainer = SelfPlay()
    for num_steps in (3, 1, 5):
        trainer.train(num_steps)

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    params = {"kernel": model.kernel[...], "bias": model.bias[...]}
    state, rng = ADAM.init(params), np.random.default_rng(0)

    @jax.jit
    def by_hand(params, state, rows):
        def loss_fn(params):
            return loss_of(rows["x"] @ params["kernel"] + params["bias"][None], rows)

        updates, state = ADAM.update(jax.grad(loss_fn)(params), state)
        return optax.apply_updates(params, updates), state

    for _ in range(9):
        params, state = by_hand(params, state, make_rows(rng, params["kernel"]))
    np.testing.assert_allclose(trainer.model.kernel[...], params["kernel"], rtol=1e-6)
    np.testing.assert_allclose(trainer.model.bias[...], params["bias"], rtol=1e-6)


class Replay:
    """Games in a replay buffer, of which each batch takes some."""

    def __init__(self):
        self.rows = np.zeros((64, 3), "float32")
        self.num_rows = 0
        self.rng = np.random.default_rng(0)
        self.trainer: Any = None

    def __call__(self):
        while True:
            weights = np.asarray(self.trainer.state)
            noise = self.rng.normal(size=3).astype("float32")
            self.rows[self.num_rows % 64] = weights + noise
            self.num_rows += 1
            chosen = self.rng.integers(0, min(self.num_rows, 64), 8)
            yield self.rows[chosen]

    def get_state(self):
        return {
            "rows": self.rows,
            "num_rows": self.num_rows,
            "rng": self.rng.bit_generator.state,
        }

    def set_state(self, state):
        self.rows[...] = state["rows"]
        self.num_rows = state["num_rows"]
        self.rng.bit_generator.state = state["rng"]


def test_a_game_in_python_resumes_bit_for_bit(tmp_path, caplog):
    def step(state, batch):
        mean = armillary.all_reduce("mean", batch.mean(axis=0))
        return state + 0.1 * (mean - 0.5 * state), {}

    def run(directory, target):
        replay = Replay()
        trainer = armillary.StepTrainer(
            step,
            jnp.zeros(3),
            replay,
            strategy=armillary.MirroredStrategy(jax.devices()[:2]),
            options=IN_STEP,
        )
        replay.trainer = trainer
        checkpoint = armillary.Checkpoint(trainer=trainer, replay=replay)
        manager = armillary.CheckpointManager(checkpoint, tmp_path / directory)
        armillary.Controller(
            trainer=trainer,
            global_step=trainer.global_step,
            steps_per_loop=4,
            checkpoint_manager=manager,
        ).train(target)
        return np.asarray(trainer.state), replay

    with caplog.at_level(logging.INFO):
        run("stopped", 10)
        state, replay = run("stopped", 22)
    expected, whole = run("whole", 22)
    np.testing.assert_array_equal(state, expected)
    np.testing.assert_array_equal(replay.rows, whole.rows)
    assert replay.num_rows == whole.num_rows == 22
    assert "Name the objects that make the data in the checkpoint" in caplog.text
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@mistakes(
    {
        ValueError: {
            "`read_ahead` is False, but `steps_per_chunk` is 3": (
                lambda: StandardTrainerOptions(read_ahead=False, steps_per_chunk=3)
            ),
            "`read_ahead` is 'no'": lambda: StandardTrainerOptions(read_ahead="no"),
        }
    }
)
def test_messages_of_options(call, error, message):
    with pytest.raises(error, match=message):
        call()
