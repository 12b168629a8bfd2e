"""Tests of trainers and evaluators without a dataset."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import armillary
from armillary.data import from_arrays
from armillary.plan import plan
from tests.mistakes import mistakes
from tests.tiers import slow_after_first

ADAM = optax.adam(0.05)
WEIGHTS = jnp.array([1.0, -2.0, 3.0])
ROWS = from_arrays(np.zeros(8, "float32"), batch_size=8)


def plain_step(state, reduce):
    key, now = jax.random.split(state["key"])
    inputs = jax.random.normal(now, (8, 3))

    def loss_fn(w):
        return jnp.mean((inputs @ w - inputs @ WEIGHTS) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(state["w"])
    updates, adam = ADAM.update(reduce(gradients), state["adam"])
    w = optax.apply_updates(state["w"], updates)
    return {"key": key, "w": w, "adam": adam}, {"loss": loss}


def step(state):
    return plain_step(state, lambda tree: armillary.all_reduce("mean", tree))


def evaluate(state):
    return {"error": jnp.abs(state["w"] - WEIGHTS).max()}


class Numbered:
    """Examples by number, such as a map-style dataset of PyTorch."""

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return {"x": np.float32(number)}


def make_state():
    w = jnp.zeros(3)
    return {"key": jax.random.key(0), "w": w, "adam": ADAM.init(w)}


def make_trainer(num_replicas=1, **options):
    strategy = armillary.MirroredStrategy(jax.devices()[:num_replicas])
    return armillary.StepTrainer(
        step,
        make_state(),
        strategy=strategy,
        options=armillary.StandardTrainerOptions(**options),
    )


def values_of(state):
    leaves = jax.tree.leaves({**state, "key": jax.random.key_data(state["key"])})
    return [np.asarray(leaf) for leaf in leaves]


def assert_same(state, expected):
    for found, wanted in zip(values_of(state), values_of(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)


@slow_after_first(
    "options",
    [
        {},
        {"compile_loop": False},
        {"on_non_finite": "raise"},
        {"check_replicas_every": 2},
    ],
)
def test_it_equals_a_loop_by_hand_bit_for_bit(options):
    trainer = make_trainer(**options)
    outputs = [trainer.train(num_steps) for num_steps in (5, 1, 7)]

    state, losses = make_state(), []
    by_hand = jax.jit(lambda state: plain_step(state, lambda tree: tree))
    for _ in range(13):
        state, metrics = by_hand(state)
        losses.append(float(metrics["loss"]))

    assert_same(trainer.state, state)
    assert int(trainer.global_step[...]) == 13
    for output, part in zip(outputs, np.split(np.array(losses), [5, 6]), strict=True):
        np.testing.assert_allclose(output["loss"], part.mean(), rtol=1e-6)


def test_steps_are_one_program(monkeypatch, no_retrace):
    trainer = make_trainer()
    trainer.train(20)
    calls = []
    start = armillary.trainer._loop.Loop._start

    def count(loop, flat, chunk, count, *args, **kwargs):
        calls.append(count)
        return start(loop, flat, chunk, count, *args, **kwargs)

    monkeypatch.setattr(armillary.trainer._loop.Loop, "_start", count)
    with no_retrace():
        trainer.train(20)
    assert calls == [20]


def test_replicas_draw_different_numbers_and_agree_on_the_state():
    def draw(state):
        key, now = jax.random.split(state["key"])
        value = jax.random.normal(now)
        least, most = (armillary.all_reduce(op, value) for op in ("min", "max"))
        mean = armillary.all_reduce("mean", value)
        new = {"key": key, "total": state["total"] + mean}
        return new, {"range": most - least, "mean": value}

    trainer = armillary.StepTrainer(
        draw,
        {"key": jax.random.key(0), "total": jnp.zeros(())},
        strategy=armillary.MirroredStrategy(jax.devices()[:4]),
    )
    output = trainer.train(10)
    assert output["range"] > 0.1
    np.testing.assert_allclose(trainer.state["total"] / 10, output["mean"], rtol=1e-5)


@slow_after_first("num_replicas", [4, 2])
def test_replicas_with_the_same_data_train_as_one(num_replicas):
    def count(state):
        inputs = jnp.sin(jnp.arange(3.0) + state["n"])
        gradient = jax.grad(lambda w: (inputs @ (w - WEIGHTS)) ** 2)(state["w"])
        gradient = armillary.all_reduce("mean", gradient)
        w = state["w"] - 0.1 * gradient
        return {"n": state["n"] + 1, "w": w}, {"n": state["n"]}

    def run(count_of_replicas):
        strategy = armillary.MirroredStrategy(jax.devices()[:count_of_replicas])
        state = {"n": 0, "w": jnp.zeros(3)}
        trainer = armillary.StepTrainer(count, state, strategy=strategy)
        return trainer.train(9), trainer.state["w"]

    output, w = run(num_replicas)
    expected_output, expected = run(1)
    # Each step has the same weight: the mean of 0 to 8.
    assert output["n"] == expected_output["n"] == 4
    np.testing.assert_allclose(w, expected, rtol=1e-6)


@pytest.mark.slow
@slow_after_first("num_replicas", [1, 4])
def test_a_run_that_is_stopped_continues_bit_for_bit(num_replicas, tmp_path, caplog):
    def run(directory, target):
        trainer = make_trainer(num_replicas)
        manager = armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer), tmp_path / directory
        )
        controller = armillary.Controller(
            trainer=trainer,
            evaluator=armillary.StepEvaluator(evaluate, trainer),
            global_step=trainer.global_step,
            steps_per_loop=3,
            checkpoint_manager=manager,
        )
        output = controller.train_and_evaluate(target, eval_steps=2)
        return trainer.state, output

    with caplog.at_level(logging.WARNING):
        run("stopped", 7)
        stopped, output = run("stopped", 20)
    whole, expected = run("whole", 20)
    assert_same(stopped, whole)
    assert output["error"] == expected["error"]
    assert not caplog.records  # No word about a position in the data.


@pytest.mark.slow
def test_an_evaluation_runs_so_many_steps():
    trainer = make_trainer()
    evaluator = armillary.StepEvaluator(evaluate, trainer)
    error = evaluator.evaluate(3)["error"]
    assert error == 3
    trainer.train(200)
    assert evaluator.evaluate(1)["error"] < 0.1


class Counter(armillary.StandardTrainer):
    def __init__(self, *, takes_batch=False, options=None):
        super().__init__(None, options)
        self.count, self.takes_batch = jnp.zeros(()), takes_batch

    def train_step(self, iterator):
        if self.takes_batch:
            next(iterator)
        self.count = self.count + 1

    def train_loop_end(self):
        return {"count": self.count}


class CountingEvaluator(armillary.StandardEvaluator):
    def __init__(self, data=None):
        super().__init__(data)

    def eval_begin(self):
        return 0

    def eval_step(self, iterator):
        return jnp.ones(())

    def eval_reduce(self, state, step_outputs):
        return state + int(step_outputs)

    def eval_end(self, *state):
        return {"count": state[0]}


@pytest.mark.parametrize("compile_step", [True, False])
def test_a_standard_trainer_needs_no_data_either(compile_step):
    options = armillary.StandardTrainerOptions(compile_step=compile_step)
    trainer = Counter(options=options)
    assert trainer.train(7)["count"] == 7
    assert not trainer.data_exhausted
    assert trainer.get_state() == []
    trainer.set_state([None])  # as older releases have saved it
    assert CountingEvaluator().evaluate(5) == {"count": 5}


def test_a_step_without_data_can_be_planned():
    trainer = make_trainer(num_replicas=4)
    found = plan(trainer, 8, abstract=True)
    assert (found.global_batch, found.num_replicas) == (0, 8)
    assert "none: the steps make their own data" in str(found)
    for topology, options in (
        ("v5e:2x4", {"find_batch": True}),
        (8, {"per_replica_batch": 4, "abstract": True}),
    ):
        with pytest.raises(ValueError, match="`train_dataset` of the trainer is None"):
            plan(trainer, topology, **options)


def test_an_evaluation_without_an_end_is_refused_before_training():
    endless = from_arrays(np.zeros(8, "float32"), batch_size=8, repeat=True)
    for data in (None, endless):
        trainer = make_trainer()
        controller = armillary.Controller(
            trainer=trainer,
            evaluator=CountingEvaluator(data),
            global_step=trainer.global_step,
            steps_per_loop=1,
        )
        with pytest.raises(ValueError, match="`eval_steps` is -1, for all of the data"):
            controller.train_and_evaluate(5)
        assert trainer.global_step[...] == 0


def make_controller():
    trainer = make_trainer()
    return armillary.Controller(
        trainer=trainer,
        evaluator={"one": armillary.StepEvaluator(evaluate, trainer)},
        global_step=trainer.global_step,
        steps_per_loop=1,
    )


def train(params, key, x, y):
    return params, key


@mistakes(
    {
        TypeError: {
            r"`step` is `<lambda>\(state, batch\)`, which takes a batch, but "
            r"`train_dataset` is None.*`armillary.StepTrainer\(step, state, dat": (
                lambda: armillary.StepTrainer(lambda state, batch: 0, WEIGHTS)
            ),
            r"`step` is `step\(state\)`, which takes only the state, but "
            r"`train_dataset` has.*`armillary.StepTrainer\(step, state\)`": (
                lambda: armillary.StepTrainer(step, make_state(), ROWS)
            ),
            r"`train\(params, key, x, y\)`, but it is called with the state and a "
            r"batch. Write `def step\(state, batch\):`.*`params, opt_state, key": (
                lambda: armillary.StepTrainer(train, make_state(), ROWS)
            ),
            r"it is called with the state. Write `def step\(state\):`": (
                lambda: armillary.StepTrainer(train, make_state())
            ),
            r"`train\(params, .*the state and a batch. Write `def step\(state, ": (
                lambda: armillary.StepEvaluator(train, make_trainer(), ROWS)
            ),
            r"takes a batch, but `eval_dataset` is None.*StepEvaluator\(step, tra": (
                lambda: armillary.StepEvaluator(lambda s, b: {}, make_trainer())
            ),
            r"takes only the state, but `eval_dataset` has": (
                lambda: armillary.StepEvaluator(evaluate, make_trainer(), ROWS)
            ),
            r"`train_dataset` is \(\), which holds no dataset": (
                lambda: armillary.StepTrainer(step, make_state(), ())
            ),
            r"`train_dataset` has '1.5'.*A list of rows becomes an array for each": (
                lambda: armillary.StepTrainer(step, make_state(), [{"x": "1.5"}])
            ),
            r"`train_dataset` has .* single examples by index.*from_random_access\(": (
                lambda: armillary.StepTrainer(step, make_state(), Numbered())
            ),
            r"`train_dataset` is None, so `train_step` has no batch": (
                lambda: Counter(takes_batch=True).train(1)
            ),
        },
        ValueError: {
            r"`num_steps` is -1.*`eval_dataset` is None.*`eval_steps=100`": (
                lambda: make_controller().evaluate()
            ),
            r"`eval_steps` is -1.*`eval_dataset` is None": (
                lambda: make_controller().train_and_evaluate(5)
            ),
            r"`epochs` is 2, but `train_dataset` is None": (
                lambda: make_controller().train(epochs=2)
            ),
        },
    }
)
def test_messages_of_steps_without_data(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_step_that_python_cannot_look_into_is_taken_as_it_is():
    class Step:
        __signature__ = "none"

        def __call__(self, state):
            return state + 1, {}

    trainer = armillary.StepTrainer(Step(), jnp.zeros(()))
    trainer.train(3)
    assert trainer.state == 3
