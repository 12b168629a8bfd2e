"""Tests of `StandardEvaluator`: where an evaluation begins, ends and what it gives."""

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary import StandardEvaluator, StandardEvaluatorOptions
from armillary.data import from_arrays
from armillary.errors import DatasetStateError
from tests.problems import make_strategy


def make_batches(num_batches, start=1):
    """Returns batches of ones, twos, threes, ..."""
    return [
        {"x": np.full(2, value, np.float32)}
        for value in range(start, start + num_batches)
    ]


class Evaluator(StandardEvaluator):
    """Returns the first example of every batch."""

    def eval_begin(self):
        return []

    def eval_step(self, iterator):
        return next(iterator)["x"][0]

    def eval_reduce(self, state, step_outputs):
        return [*state, float(step_outputs)]

    def eval_end(self, *state):
        return {"seen": state[0]}


def test_an_evaluator_begins_anew_each_time():
    evaluator = Evaluator(make_batches(4))

    seen = [evaluator.evaluate(num_steps)["seen"] for num_steps in (1, 2, -1, 1)]

    assert seen == [[1], [1, 2], [1, 2, 3, 4], [1]]


def test_all_of_a_data_set_without_an_end_is_an_error():
    data = from_arrays({"x": np.arange(4.0)}, batch_size=1, repeat=True)
    evaluator = Evaluator(data)
    with pytest.raises(
        ValueError,
        match=r"`num_steps` is -1, .* but `eval_dataset` repeats its data for ever. "
        r"Make it without `repeat=True`, or give a number of steps",
    ):
        evaluator.evaluate(-1)
    assert evaluator.evaluate(5)["seen"] == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("compile_step", [True, False])
def test_an_evaluation_that_was_cut_off_is_not_continued(error, compile_step):
    class Failing(Evaluator):
        fails = True

        def eval_reduce(self, state, step_outputs):
            if self.fails and len(state) == 2:
                raise error
            return super().eval_reduce(state, step_outputs)

    options = StandardEvaluatorOptions(compile_step=compile_step)
    evaluator = Failing(make_batches(4), options)
    with pytest.raises(error):
        evaluator.evaluate(-1)
    evaluator.fails = False
    assert evaluator.evaluate(-1)["seen"] == [1, 2, 3, 4]


def test_evaluation_steps_count_batches_and_not_pieces():
    strategy = make_strategy(2)
    rows = from_arrays({"x": np.arange(12, dtype=np.float32)}, batch_size=3)

    class Count(StandardEvaluator):
        def __init__(self):
            super().__init__(rows, StandardEvaluatorOptions(steps_per_chunk=3))
            self.strategy = strategy

        def eval_begin(self):
            return []

        def eval_step(self, iterator):
            return strategy.run(lambda batch: batch["x"], args=(next(iterator),))

        def eval_reduce(self, state, step_outputs):
            shares = strategy.local_results(step_outputs)
            return [*state, *(float(x) for share in shares for x in share)]

        def eval_end(self, *state):
            return {"seen": state[0]}

    count = Count()

    assert count.evaluate(2)["seen"] == [0, 1, 2, 3, 4, 5]
    assert count.evaluate(3)["seen"] == list(range(9))
    assert count.evaluate(-1)["seen"] == list(range(12))


def test_without_a_state_outputs_are_dropped():
    class Silent(StandardEvaluator):
        def eval_step(self, iterator):
            return next(iterator)["x"]

    assert Silent(make_batches(2)).evaluate(-1) is None


def test_a_state_needs_a_reduction():
    class Missing(Evaluator):
        eval_reduce = StandardEvaluator.eval_reduce

    with pytest.raises(
        NotImplementedError,
        match=r"`Missing.eval_begin` returned a state, so `eval_reduce` is needed.*"
        r"Define `eval_reduce\(self, state, step_outputs\)`, or return `None`",
    ):
        Missing(make_batches(2)).evaluate(-1)


def test_an_evaluation_without_data_returns_its_first_state():
    assert Evaluator([]).evaluate(-1) == {"seen": []}


def test_step_outputs_keep_what_is_no_array():
    class Named(Evaluator):
        def eval_step(self, iterator):
            return {"name": "x", "value": next(iterator)["x"][0], "none": None}

        def eval_reduce(self, state, step_outputs):
            return [*state, (step_outputs["name"], float(step_outputs["value"]))]

    assert Named(make_batches(2)).evaluate(-1) == {"seen": [("x", 1.0), ("x", 2.0)]}


@pytest.mark.slow
def test_one_object_may_train_and_evaluate():
    class Task(armillary.StandardTrainer, Evaluator):
        def __init__(self):
            Evaluator.__init__(self, make_batches(2, start=20))
            armillary.StandardTrainer.__init__(self, make_batches(6))
            self.total = jnp.zeros(())

        def train_step(self, iterator):
            self.total = self.total + next(iterator)["x"][0]

    task = Task()
    seen = []

    for _ in range(3):
        task.train(2)
        seen.append(task.evaluate(-1)["seen"])

    assert float(task.total) == 1 + 2 + 3 + 4 + 5 + 6
    assert seen == [[20, 21]] * 3


def test_an_iterator_that_was_used_up_is_an_error_each_time():
    evaluator = Evaluator(iter(make_batches(3)))
    assert evaluator.evaluate(-1)["seen"] == [1, 2, 3]
    for _ in range(3):
        with pytest.raises(DatasetStateError, match="gives its batches once"):
            evaluator.evaluate(-1)
