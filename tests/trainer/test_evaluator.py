"""Tests of `StandardEvaluator`: begin, end, outputs and changes of state."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import StandardEvaluator, StandardEvaluatorOptions
from armillary.data import from_arrays
from armillary.errors import BatchSizeError, DatasetStateError, StateStructureError
from tests.problems import MLP, make_batches, make_digits, make_strategy
from tests.tiers import slow_after_first


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


def test_an_evaluator_begins_again_each_time():
    evaluator = Evaluator(make_batches(4))

    seen = [evaluator.evaluate(num_steps)["seen"] for num_steps in (1, 2, -1, 1)]

    assert seen == [[1], [1, 2], [1, 2, 3, 4], [1]]


@pytest.mark.parametrize("compile_step", [True, False])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_evaluator_may_continue_where_the_last_evaluation_ended(
    compile_step, num_replicas
):
    options = StandardEvaluatorOptions(
        recreate_iterator_for_each_eval=False, compile_step=compile_step
    )
    strategy = make_strategy(num_replicas)

    class Sum(Evaluator):
        def eval_step(self, iterator):
            return jnp.sum(strategy.gather(next(iterator), axis=0))

        def eval_end(self, *state):
            return {"sum": sum(state[0])}

    # On two replicas, each batch of three rows takes two steps.
    rows = from_arrays(np.arange(12.0, dtype=np.float32), batch_size=3)
    evaluator = Sum(strategy.distribute_dataset(rows), options)
    with strategy.scope():
        sums = [evaluator.evaluate(steps)["sum"] for steps in (1, 2, -1, 1, -1, -1)]
    one, two, three, four = 3, 12, 21, 30
    whole = one + two + three + four
    assert sums == [one, two + three, four, one, whole - one, whole]


def test_all_of_a_dataset_without_an_end_is_an_error():
    data = from_arrays({"x": np.arange(4.0)}, batch_size=1, repeat=True)
    evaluator = Evaluator(data)
    with pytest.raises(
        ValueError,
        match=r"`num_steps` is -1, .* but `eval_dataset` repeats its data forever. "
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


def test_the_first_state_is_none_as_in_orbit():
    class WithoutBegin(Evaluator):
        eval_begin = StandardEvaluator.eval_begin

        def eval_reduce(self, state, step_outputs):
            return super().eval_reduce(state or [], step_outputs)

    assert WithoutBegin(make_batches(3)).evaluate(-1) == {"seen": [1, 2, 3]}


def test_an_evaluation_without_data_returns_its_first_state():
    assert Evaluator([]).evaluate(-1) == {"seen": []}


def test_step_outputs_keep_what_is_no_array():
    class Named(Evaluator):
        def eval_step(self, iterator):
            return {"name": "x", "value": next(iterator)["x"][0], "none": None}

        def eval_reduce(self, state, step_outputs):
            return [*state, (step_outputs["name"], float(step_outputs["value"]))]

    assert Named(make_batches(2)).evaluate(-1) == {"seen": [("x", 1.0), ("x", 2.0)]}


@slow_after_first("compile_step", [True, False])
@slow_after_first("sizes", [(5, 4), (4, 5), (6, 2), (5, 3), (5,)])
def test_batches_that_meet_are_not_cut_apart(sizes, compile_step):
    strategy = make_strategy(4)

    class Count(StandardEvaluator):
        def __init__(self):
            options = armillary.StandardEvaluatorOptions(compile_step=compile_step)
            data = [
                strategy.distribute_dataset(from_arrays(np.ones(12), batch_size=size))
                for size in sizes
            ]
            super().__init__(data, options)
            self.strategy = strategy
            self.sums = nnx.metrics.Average("x")

        def eval_step(self, iterator):
            for each in iterator * (3 - len(iterator)):
                batch = next(each)
                strategy.run(lambda b: self.sums.update(x=b), args=(batch,))

        def eval_end(self, *state):
            return {"count": self.sums.count[...]}

    with pytest.raises(BatchSizeError, match=r"a batch of dataset \d .* in pieces"):
        Count().evaluate(-1)


@pytest.mark.parametrize("compile_step", [True, False])
@pytest.mark.parametrize(
    ("lengths", "left"), [((3, 3), ""), ((3, 5), "1"), ((4, 3), "0"), ((3,), "")]
)
def test_an_evaluation_logs_once_the_data_it_left(lengths, left, compile_step, caplog):
    class Count(StandardEvaluator):
        def eval_step(self, iterator):
            for each in iterator:
                next(each)

    options = StandardEvaluatorOptions(compile_step=compile_step)
    data = [from_arrays(np.ones(length), batch_size=1) for length in lengths]
    evaluator = Count(data, options)
    for _ in range(2):
        evaluator.evaluate(-1)
    message = f"left out batches of dataset {left}. To evaluate all"
    assert caplog.text.count(message) == bool(left)
    assert caplog.text.count("left out") == bool(left)


@pytest.mark.parametrize("compile_step", [True, False])
def test_objects_that_steps_return_are_as_they_were_after_each(compile_step):
    class Count(StandardEvaluator):
        def __init__(self):
            options = armillary.StandardEvaluatorOptions(compile_step=compile_step)
            super().__init__([np.ones(2)] * 3, options)
            self.sum = nnx.metrics.Average("x")

        def eval_begin(self):
            return []

        def eval_step(self, iterator):
            self.sum.update(x=next(iterator))
            return self.sum.count, [self.sum]

        def eval_reduce(self, state, step_outputs):
            count, (metric,) = step_outputs
            return [*state, (int(count[...]), float(metric.total[...]))]

        def eval_end(self, *state):
            return {"seen": state[0]}

    assert Count().evaluate(-1)["seen"] == [(2, 2), (4, 4), (6, 6)]


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
        with pytest.raises(DatasetStateError, match="gives its batches only once"):
            evaluator.evaluate(-1)


# Values that a step may write


class Model(StandardEvaluator):
    def __init__(self, model, num_replicas=None):
        super().__init__(from_arrays(make_digits(8), batch_size=4))
        self.strategy = armillary.distribute.DefaultStrategy()
        if num_replicas is not None:
            self.strategy = make_strategy(num_replicas)
        self.model, self.accuracy = model, nnx.metrics.Accuracy()

    def eval_step(self, iterator):
        def step_fn(batch):
            logits = self.model(batch["image"])
            self.accuracy.update(logits=logits, labels=batch["label"])

        self.strategy.run(step_fn, args=(next(iterator),))


@pytest.mark.parametrize("num_replicas", [None, 2])
def test_an_evaluation_that_changes_batch_statistics_is_an_error(num_replicas):
    model = MLP(nnx.Rngs(0))
    before = np.array(model.norm.mean[...])

    with pytest.raises(
        StateStructureError,
        match=r"`eval_step` changes 2 arrays of a model, but an evaluation must not "
        r"change a model:\n  model/norm/mean\n  model/norm/var\nEvaluate a view of it.*"
        r"`self.model = nnx.view\(model, use_running_average=True\)`",
    ):
        Model(model, num_replicas).evaluate(-1)
    np.testing.assert_array_equal(model.norm.mean[...], before)


class Blocks(nnx.Module):
    """Two layers whose activations are computed again for the gradients."""

    def __init__(self, kind):
        self.kind = kind
        self.first = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, images):
        def apply(model, images):
            x = model.first(images.reshape(images.shape[0], -1))
            return model.last(nnx.relu(model.norm(x)))

        wrap = {"plain": lambda fn: fn, "remat": nnx.remat, "jit": nnx.jit}[self.kind]
        return wrap(apply)(self, images)


class Counting(Model):
    def eval_end(self, *state):
        del state
        return {"accuracy": float(self.accuracy.compute())}


@pytest.mark.parametrize("num_replicas", [None, 1, 2])
def test_a_model_with_remat_is_evaluated_as_one_without(num_replicas):
    digits = make_digits(8)
    found = {
        kind: Counting(Blocks(kind), num_replicas).evaluate(-1)["accuracy"]
        for kind in ("plain", "remat", "jit")
    }

    guesses = Blocks("plain")(digits["image"]).argmax(axis=-1)
    expected = float((guesses == digits["label"]).mean())
    assert 0 < expected < 1
    assert found == dict.fromkeys(found, expected)


def test_remat_does_not_hide_statistics_that_an_evaluation_changes():
    model = Blocks("remat")
    model.norm.use_running_average = False

    with pytest.raises(
        StateStructureError,
        match=r"changes 2 arrays of a model.*:\n  model/norm/mean\n  model/norm/var\n",
    ):
        Model(model, 2).evaluate(-1)


def test_an_evaluation_that_trains_is_an_error():
    class Tuning(Model):
        def eval_step(self, iterator):
            next(iterator)
            self.model.bias[...] += 1

    with pytest.raises(StateStructureError, match=r"changes 1 array of.*\n +model/b"):
        Tuning(nnx.Linear(2, 3, rngs=nnx.Rngs(0))).evaluate(1)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [None, 2])
def test_dropout_in_an_evaluation_is_a_warning(num_replicas, caplog):
    model = nnx.view(MLP(nnx.Rngs(0)), use_running_average=True)

    Model(model, num_replicas).evaluate(-1)

    (record,) = caplog.records
    assert record.getMessage() == (
        "`eval_step` draws random numbers for dropout, so it evaluates the model in "
        "training mode:\n  model/dropout/rngs/count\nEvaluate a view of the model, "
        "which shares its variables: `self.model = nnx.view(model, "
        "deterministic=True)`."
    )


def test_other_random_numbers_in_an_evaluation_are_meant(caplog):
    class Sampling(Model):
        def eval_step(self, iterator):
            next(iterator)
            self.model.normal((2,))

    Sampling(nnx.Rngs(0)).evaluate(-1)
    assert not caplog.records
