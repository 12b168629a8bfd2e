"""Tests of `max_shapes`: batches of a few lengths, such as buckets."""

import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import Checkpoint, StandardEvaluatorOptions, StandardTrainerOptions
from armillary.errors import RetraceError
from tests.mistakes import mistakes
from tests.problems import make_strategy, read_state
from tests.tiers import slow_after_first

LENGTHS = [4, 4, 4, 6, 4, 6, 6, 2, 2, 4, 4, 6]


class Buckets:
    """Batches of sequences of some lengths, with a position."""

    def __init__(self, lengths=LENGTHS, size=8):
        self.lengths, self.size, self.index = lengths, size, 0

    def __iter__(self):
        return Buckets(self.lengths, self.size)

    def __next__(self):
        if self.index == len(self.lengths):
            raise StopIteration
        rng, length = np.random.default_rng(self.index), self.lengths[self.index]
        self.index += 1
        x = rng.normal(size=(self.size, length, 3)).astype(np.float32)
        return {"x": x, "y": x.sum((1, 2))}

    def get_state(self):
        return self.index

    def set_state(self, state):
        self.index = state


class Trainer(armillary.StandardTrainer):
    """Fits a linear model to means over a sequence."""

    def __init__(self, strategy, lengths=LENGTHS, **options):
        options = {"max_shapes": 3, **options}
        dataset = strategy.distribute_dataset(Buckets(lengths))
        super().__init__(dataset, StandardTrainerOptions(**options))
        self.strategy, self.model = strategy, nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(1e-2), wrt=nnx.Param)
        self.loss = nnx.metrics.Average("loss")

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(model):
                errors = model(batch["x"]).mean((1, 2)) - batch["y"]
                return armillary.compute_average_loss(errors**2)

            loss, gradients = nnx.value_and_grad(loss_fn)(self.model)
            gradients = armillary.all_reduce("sum", gradients)
            self.optimizer.update(self.model, gradients)
            self.loss.update(loss=loss)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self):
        return {"loss": self.loss.compute()}


@pytest.fixture(scope="module")
def expected():
    """Returns the state that steps one by one lead to."""
    trainer = Trainer(make_strategy(2), steps_per_chunk=1, compile_hooks=False)
    for _ in LENGTHS:
        trainer.train(1)
    return read_state(trainer)


def assert_same(trainer, expected):
    for path, value in read_state(trainer).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)


@slow_after_first(
    ("loops", "options"),
    [
        ([12], {}),
        ([5, 7], {"steps_per_chunk": 2}),
        ([12], {"compile_loop": False}),
        ([1, 11], {"on_non_finite": "skip"}),
    ],
    ids=["at once", "chunks", "Python", "watched"],
)
def test_a_loop_equals_a_python_loop_however_it_is_divided(loops, options, expected):
    trainer = Trainer(make_strategy(2), **options)
    for num_steps in loops:
        trainer.train(num_steps)
    assert_same(trainer, expected)


@pytest.mark.slow
def test_loops_that_are_one_program_and_resumed_ones_are_the_same(tmp_path, expected):
    for target in (5, 12):
        trainer = Trainer(make_strategy(2))
        controller = armillary.Controller(
            trainer=trainer,
            global_step=trainer.optimizer.step,
            strategy=trainer.strategy,
            steps_per_loop=2,
            checkpoint_manager=armillary.CheckpointManager(
                Checkpoint(trainer=trainer, data=trainer.train_dataset), tmp_path
            ),
        )
        controller.train(target)
    assert_same(trainer, expected)


class Evaluator(armillary.StandardEvaluator):
    """Counts and sums elements."""

    def __init__(self, strategy, **options):
        data = strategy.distribute_dataset(Buckets(size=5))
        super().__init__(data, StandardEvaluatorOptions(**options))
        self.strategy = strategy
        self.mean = nnx.metrics.Average("x")

    def eval_begin(self):
        self.mean.reset()

    def eval_step(self, iterator):
        self.strategy.run(lambda b: self.mean.update(x=b["x"]), (next(iterator),))

    def eval_end(self, *state):
        return {"count": int(self.mean.count[...]), "mean": self.mean.compute()}


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_evaluations_are_exact_for_every_shape(num_replicas):
    evaluator = Evaluator(make_strategy(num_replicas), max_shapes=3)
    elements = np.concatenate([batch["x"].ravel() for batch in Buckets(size=5)])
    for _ in range(2):
        output = evaluator.evaluate(-1)
        assert output["count"] == elements.size
        np.testing.assert_allclose(output["mean"], elements.mean(), rtol=1e-5)


def train(batches, **options):
    trainer = Trainer(make_strategy(1), **options)
    trainer.train_dataset = [{"x": x, "y": np.ones(len(x), x.dtype)} for x in batches]
    trainer.train(len(batches))


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.slow
@mistakes(
    {
        RetraceError: {
            r"(?s)x: float32 \(1, 4, 2, 3\) became float32 \(1, 4, 5, 3\).*few "
            r"lengths \(buckets\), .*`StandardTrainerOptions\(max_shapes=8\)`": (
                lambda: train([ones(4, 2, 3), ones(4, 5, 3)], max_shapes=1)
            ),
            r"`StandardEvaluatorOptions\(max_shapes=8\)`": lambda: Evaluator(
                make_strategy(1)
            ).evaluate(-1),
            # Another number of examples is no other shape.
            r"(?s)`train_step` was compiled for 2 shapes .*4, 2, 3\) became float32 "
            r"\(1, 4, 7, 3\)\n.*`StandardTrainerOptions\(max_shapes=4\)`": lambda: (
                train(
                    [ones(4, 2, 3), ones(2, 5, 3), ones(4, 5, 3), ones(4, 7, 3)],
                    max_shapes=2,
                )
            ),
            # Also where more shapes are allowed.
            r"(?s)changed after .*4, 2, 3\) became int32 \(1, 4, 2, 3\).*"
            r"one dtype .*`\.astype` .*`max_shapes` allows only different sh": lambda: (
                train([ones(4, 2, 3), ones(4, 2, 3, dtype=np.int32)])
            ),
        },
    }
)
def test_too_many_shapes_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.slow
def test_each_shape_is_traced_once(no_retrace):
    strategy = make_strategy(1)
    trainer = Trainer(strategy, 2 * LENGTHS, compile_hooks=False)
    trainer.train(12)
    with no_retrace():
        trainer.train(12)
