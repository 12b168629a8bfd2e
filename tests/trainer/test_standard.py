"""Tests of `StandardTrainer` and `StandardEvaluator`: data, ends of data, options."""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import StandardEvaluator, StandardEvaluatorOptions
from armillary import StandardTrainer as Base
from armillary import StandardTrainerOptions as Options
from armillary.data import InputOptions, from_arrays
from armillary.errors import BatchSizeError
from tests.problems import make_strategy


def make_batches(num_batches, size=2, start=1):
    """Returns batches of ones, twos, threes, ..."""
    return [
        {"x": np.full(size, value, np.float32)}
        for value in range(start, start + num_batches)
    ]


class Trainer(Base):
    """Adds up the first example of each step's batch, and records its hooks."""

    def __init__(self, dataset, options=None):
        super().__init__(dataset, options)
        self.total = jnp.zeros(())
        self.num_steps = armillary.create_global_step()
        self.calls = []

    def take(self, iterator):
        return next(iterator)["x"][0]

    def train_loop_begin(self):
        self.calls.append("begin")

    def train_step(self, iterator):
        self.total = self.total + self.take(iterator)
        self.num_steps[...] += 1

    def train_loop_end(self):
        self.calls.append("end")
        return {"total": self.total, "mean": self.total / self.num_steps[...]}

    @property
    def sums(self):
        return float(self.total), int(self.num_steps[...])


# Hooks and results


def test_a_loop_begins_steps_and_ends():
    trainer = Trainer(make_batches(5))

    output = trainer.train(3)

    assert trainer.calls == ["begin", "end"]
    assert {name: float(value) for name, value in output.items()} == {
        "total": 6.0,
        "mean": 2.0,
    }
    assert trainer.data_exhausted is False


def test_hooks_do_nothing_by_default():
    class Silent(Base):
        def train_step(self, iterator):
            next(iterator)

    trainer = Silent(make_batches(2))

    assert trainer.train(1) is None
    assert trainer.data_exhausted is False


def test_the_loop_begin_may_make_the_state():
    class Late(Base):
        def train_loop_begin(self):
            self.total = jnp.zeros(())

        def train_step(self, iterator):
            self.total = self.total + next(iterator)["x"].sum()

    trainer = Late(make_batches(4))

    trainer.train(1)
    trainer.train(2)

    assert float(trainer.total) == 2 * (2 + 3)


# What a step may take


def test_a_step_may_take_several_batches():
    class Pairs(Trainer):
        def take(self, iterator):
            return super().take(iterator) * 10 + super().take(iterator)

    trainer = Pairs(make_batches(6))

    trainer.train(2)
    trainer.train(1)

    assert trainer.sums == (12 + 34 + 56, 3)


@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_a_step_may_take_a_nest_of_datasets(kind):
    class Nest(Trainer):
        def take(self, iterator):
            real, fake = iterator.values() if kind is dict else iterator
            first = next(fake)["x"][0]
            return 100 * next(real)["x"][0] + 10 * first + next(fake)["x"][0]

    real = from_arrays({"x": np.arange(1.0, 5.0)}, batch_size=1)
    fake = from_arrays({"x": np.arange(1.0, 9.0)}, batch_size=1)
    datasets = {"a": real, "b": fake} if kind is dict else kind([real, fake])
    trainer = Nest(datasets)

    trainer.train(2)
    trainer.train(1)

    assert trainer.sums == (112 + 234 + 356, 3)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_dictionary_of_lists_of_batches_is_a_nest(is_compiled):
    class Nest(Trainer):
        def take(self, iterator):
            return iterator["a"].get_next()[0] + next(iterator["b"])[0]

    batches = [np.asarray([float(i)]) for i in range(4)]
    trainer = Nest({"a": batches, "b": batches[1:]}, Options(compile_step=is_compiled))

    trainer.train(4)

    assert trainer.sums == (0 + 1 + 1 + 2 + 2 + 3, 3)


def test_the_shortest_dataset_ends_training():
    class Both(Trainer):
        def take(self, iterator):
            return next(iterator["long"])["x"][0] + next(iterator["short"])["x"][0]

    trainer = Both(
        {
            "long": from_arrays({"x": np.arange(9.0)}, batch_size=1),
            "short": from_arrays({"x": np.arange(4.0)}, batch_size=1),
        }
    )

    trainer.train(3)
    assert not trainer.data_exhausted
    trainer.train(3)

    assert trainer.data_exhausted
    assert trainer.sums == (2.0 * (1 + 2 + 3), 4)


@pytest.mark.parametrize("compile_step", [True, False])
def test_data_that_ends_inside_a_step_ends_training_before_it(compile_step):
    class Pairs(Trainer):
        def take(self, iterator):
            return super().take(iterator) + super().take(iterator)

    trainer = Pairs(make_batches(5), Options(compile_step=compile_step))

    output = trainer.train(10)

    assert trainer.sums == (1 + 2 + 3 + 4, 2)
    assert float(output["mean"]) == 5.0
    assert trainer.data_exhausted
    assert trainer.train(1) is None


def make_generator():
    yield from make_batches(4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_source",
    [
        lambda: from_arrays({"x": np.repeat(np.arange(1.0, 5.0), 2)}, batch_size=2),
        lambda: make_batches(4),
        lambda: make_generator,
        lambda: iter(make_batches(4)),
        lambda: (
            grain.MapDataset.source(np.repeat(np.arange(1.0, 5.0), 2))
            .map(lambda x: {"x": x})
            .batch(2)
        ),
    ],
    ids=["from_arrays", "list", "function", "iterator", "grain"],
)
def test_a_trainer_takes_raw_datasets(make_source):
    trainer = Trainer(make_source())

    trainer.train(2)
    trainer.train(5)

    assert trainer.sums == (10.0, 4)
    assert trainer.data_exhausted


# The end of the data


def test_data_that_ends_before_the_last_step_is_exhausted():
    trainer = Trainer(make_batches(3))

    output = trainer.train(5)

    assert trainer.data_exhausted
    assert trainer.sums == (6.0, 3)
    assert float(output["mean"]) == 2.0


@pytest.mark.parametrize("compile_step", [True, False])
def test_data_that_ends_at_a_loop_boundary_gives_no_empty_loop(compile_step):
    trainer = Trainer(make_batches(3), Options(compile_step=compile_step))

    trainer.train(3)
    assert not trainer.data_exhausted
    output = trainer.train(3)

    assert output is None
    assert trainer.data_exhausted
    assert trainer.calls == ["begin", "end"]
    assert trainer.sums == (6.0, 3)


def test_a_trainer_without_data_runs_no_step():
    trainer = Trainer([])

    assert trainer.train(3) is None
    assert trainer.data_exhausted
    assert trainer.calls == []


@pytest.mark.parametrize("num_batches", [5, 6])
def test_controller_trains_to_the_end_of_the_data(num_batches, caplog):
    caplog.set_level("INFO", "armillary")
    trainer = Trainer(make_batches(num_batches))
    outputs = []
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.num_steps,
        steps_per_loop=3,
        train_actions=[outputs.append],
    )

    controller.train(-1)

    assert trainer.sums[1] == num_batches
    assert len(outputs) == 2
    assert "nan" not in caplog.text
    assert caplog.text.count("the data ended, training ends here.") == 1


def test_another_dataset_is_started_on():
    trainer = Trainer(make_batches(2))
    trainer.train(5)
    assert trainer.data_exhausted

    trainer.train_dataset = make_batches(3, start=10)
    trainer.train(2)

    assert not trainer.data_exhausted
    assert trainer.sums == (1 + 2 + 10 + 11, 4)


def test_a_dataset_may_be_taken_again_after_another_was_refused():
    first = make_batches(40)
    trainer = Trainer(first)
    trainer.train(1)

    trainer.train_dataset = make_strategy(2).distribute_dataset(make_batches(2))
    with pytest.raises(ValueError, match="by another strategy"):
        trainer.train(1)
    trainer.train_dataset = first
    trainer.train(30)

    assert trainer.sums == (1 + sum(range(1, 31)), 31)


def test_what_the_data_function_raises_reaches_the_caller():
    class BrokenError(Exception):
        pass

    def make_data():
        yield from make_batches(3)
        raise BrokenError("the disk is gone")

    trainer = Trainer(make_data)

    with pytest.raises(BrokenError, match="the disk is gone"):
        trainer.train(5)
    assert trainer.sums == (6.0, 3)
    with pytest.raises(BrokenError, match="the disk is gone"):
        trainer.train(1)


# Batches that replicas share


class Rows(Base):
    """Adds up rows and counts them, on replicas."""

    def __init__(self, strategy, dataset, **options):
        super().__init__(dataset, Options(**options))
        self.strategy = strategy
        self.sum = nnx.metrics.Average("value")

    def train_step(self, iterator):
        def step_fn(batch):
            mask = batch.get("mask")
            rows = batch["x"] if mask is None else jnp.where(mask, batch["x"], 0)
            self.sum.total[...] += rows.sum()
            count = rows.shape[0] if mask is None else mask.sum()
            self.sum.count[...] += jnp.asarray(count, jnp.int32)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self):
        return {"sum": float(self.sum.total[...]), "count": int(self.sum.count[...])}


def make_rows(num_rows, batch_size):
    return from_arrays(
        {"x": np.arange(num_rows, dtype=np.float32)}, batch_size=batch_size
    )


def test_a_batch_that_replicas_cannot_share_is_an_error():
    trainer = Rows(make_strategy(4), make_rows(30, 10))

    with pytest.raises(
        BatchSizeError,
        match=r"10 examples, which 4 replicas cannot share equally \(10 % 4 = 2\)"
        r'.*such as `8` or `12`, or `InputOptions\(remainder="exact"\)`',
    ):
        trainer.train(1)


def test_a_remainder_that_replicas_cannot_share_is_an_error_after_the_others():
    trainer = Rows(make_strategy(4), make_rows(22, 8))

    with pytest.raises(
        BatchSizeError, match="The last batch of the data has the 6 examples"
    ):
        trainer.train(10)
    assert int(trainer.sum.count[...]) == 16


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_step_without_run_is_led_to_it(is_compiled):
    class Plain(Rows):
        def train_step(self, iterator):
            self.sum.total[...] += next(iterator)["x"].max()

    trainer = Plain(make_strategy(4), make_rows(8, 8), compile_step=is_compiled)

    message = (
        r"PerReplica\(4 x float32\[2\]\) was asked for `max`.* one part for each of 4 "
        r"replicas.*`strategy\.run\(step_fn, args=\(batch,\)\)`"
    )
    with pytest.raises(AttributeError, match=message):
        trainer.train(1)


def test_a_smaller_last_batch_that_divides_runs():
    trainer = Rows(make_strategy(4), make_rows(20, 8))

    assert trainer.train(10) == {"sum": sum(range(20)), "count": 20}
    assert trainer.data_exhausted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remainder", "count", "is_compiled"),
    [("drop", 16, True), ("pad", 22, True), ("exact", 22, True), ("exact", 22, False)],
)
def test_a_remainder_is_dropped_or_padded_or_run_on_fewer_replicas(
    remainder, count, is_compiled
):
    strategy = make_strategy(4)
    dataset = armillary.make_distributed_dataset(
        strategy, make_rows(22, 8), input_options=InputOptions(remainder=remainder)
    )
    trainer = Rows(strategy, dataset, compile_step=is_compiled)

    assert trainer.train(10) == {"sum": sum(range(count)), "count": count}


@pytest.mark.parametrize(
    "other",
    [lambda: make_strategy(2), lambda: armillary.MirroredStrategy(jax.devices()[4:])],
)
def test_a_dataset_of_another_strategy_is_an_error(other):
    dataset = other().distribute_dataset(make_rows(8, 8))
    trainer = Rows(make_strategy(4), dataset)

    with pytest.raises(
        ValueError,
        match=r"over \d replicas by another strategy than MirroredStrategy\(4 x cpu\)"
        r".*`with strategy.scope\(\):`.*`armillary.make_distributed_dataset\(",
    ):
        trainer.train(1)


# Which strategy is in effect


def test_the_strategy_in_effect_comes_before_the_one_of_the_trainer():
    seen = []

    class Watcher(Base):
        def __init__(self, strategy=None):
            super().__init__(make_rows(8, 4))
            self.kept = strategy

        def train_step(self, iterator):
            next(iterator)
            seen.append(armillary.get_strategy())

    own, outer = make_strategy(2), make_strategy(4)

    Watcher(own).train(1)
    with outer.scope():
        Watcher().train(1)
    Watcher().train(1)

    assert seen[0] is own and seen[1] is outer
    assert seen[2] is armillary.DefaultStrategy()


# Arguments


@pytest.mark.parametrize("num_steps", [0, -1, 1.5, True, "3"])
def test_a_wrong_number_of_training_steps_is_an_error(num_steps):
    with pytest.raises(
        ValueError, match=r"`num_steps` is .* must be a positive integer"
    ):
        Trainer(make_batches(2)).train(num_steps)


@pytest.mark.parametrize("num_steps", [0, -2, 1.5, True])
def test_a_wrong_number_of_evaluation_steps_is_an_error(num_steps):
    with pytest.raises(ValueError, match=r"`num_steps` is .*, or `num_steps=-1`"):
        Evaluator(make_batches(2)).evaluate(num_steps)


@pytest.mark.parametrize("name", ["steps_per_chunk", "max_chunk_bytes"])
@pytest.mark.parametrize("value", [0, -1, 2.0])
@pytest.mark.parametrize("kind", [Options, StandardEvaluatorOptions])
def test_options_below_one_are_an_error(kind, name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value}, but it must be a pos"):
        kind(**{name: value})


def test_options_of_the_wrong_type_are_an_error():
    with pytest.raises(
        TypeError,
        match=r"`options` is \{'compile_loop': False\} of type dict, but it must be a "
        r"`StandardTrainerOptions`. Write "
        r"`options=armillary.StandardTrainerOptions\(\.\.\.\)`",
    ):
        Trainer(make_batches(1), {"compile_loop": False})
    with pytest.raises(TypeError, match="must be a `StandardEvaluatorOptions`"):
        Evaluator(make_batches(1), Options())


# Evaluators


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


def recreating(**options):
    return StandardEvaluatorOptions(recreate_iterator_for_each_eval=True, **options)


def test_an_evaluator_continues_where_the_last_evaluation_stopped():
    evaluator = Evaluator(make_batches(4))

    seen = [evaluator.evaluate(1)["seen"] for _ in range(6)]

    assert seen == [[1], [2], [3], [4], [1], [2]]


def test_an_evaluator_may_begin_anew_each_time():
    evaluator = Evaluator(make_batches(4), recreating())

    seen = [evaluator.evaluate(num_steps)["seen"] for num_steps in (1, 2, -1, 1)]

    assert seen == [[1], [1, 2], [1, 2, 3, 4], [1]]


@pytest.mark.parametrize("compile_step", [True, False])
def test_an_evaluation_ends_with_the_data_and_the_next_begins_anew(compile_step):
    options = StandardEvaluatorOptions(compile_step=compile_step)
    evaluator = Evaluator(make_batches(4), options)

    seen = [evaluator.evaluate(num_steps)["seen"] for num_steps in (3, 3, 3, -1, -1)]

    assert seen == [[1, 2, 3], [4], [1, 2, 3], [4], [1, 2, 3, 4]]


def test_an_evaluation_that_finds_fewer_steps_says_so(caplog):
    evaluator = Evaluator(make_batches(4))

    evaluator.evaluate(4)
    evaluator.evaluate(3)
    assert not caplog.records
    evaluator.evaluate(3)

    (record,) = caplog.records
    assert record.getMessage() == (
        "`evaluate(3)` ran 1 steps, because the data ended: the last evaluation had "
        "taken what came before, or there is no more. The next one begins anew. Use "
        "`evaluate(-1)` for all of the data, or "
        "`StandardEvaluatorOptions(recreate_iterator_for_each_eval=True)` to begin "
        "anew each time."
    )


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

    evaluator = Failing(
        make_batches(4), StandardEvaluatorOptions(compile_step=compile_step)
    )
    with pytest.raises(error):
        evaluator.evaluate(-1)
    evaluator.fails = False
    assert evaluator.evaluate(-1)["seen"] == [1, 2, 3, 4]


def test_evaluation_steps_count_batches_and_not_pieces():
    strategy = make_strategy(2)

    class Count(StandardEvaluator):
        def __init__(self):
            super().__init__(make_rows(12, 3), recreating(steps_per_chunk=3))
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


def test_another_evaluation_dataset_is_started_on():
    evaluator = Evaluator(make_batches(2), recreating())
    evaluator.evaluate(-1)

    # An iterator gives its batches once: opening it twice would be an error.
    evaluator.eval_dataset = iter(make_batches(2, start=5))

    assert evaluator.evaluate(-1) == {"seen": [5, 6]}


@pytest.mark.slow
def test_one_object_may_train_and_evaluate():
    class Task(Trainer, Evaluator):
        def __init__(self):
            Evaluator.__init__(self, make_batches(2, start=20))
            Trainer.__init__(self, make_batches(6))

    task = Task()
    seen = []

    for _ in range(3):
        task.train(2)
        seen.append(task.evaluate(-1)["seen"])

    assert task.sums == (1 + 2 + 3 + 4 + 5 + 6, 6)
    assert seen == [[20, 21]] * 3


def test_a_trainer_without_the_constructor_of_its_base_says_so():
    class Trainer(armillary.StandardTrainer):
        def __init__(self):
            self.model = None

        def train_step(self, iterator):
            next(iterator)

    with pytest.raises(
        TypeError, match=r"Begin it with `super\(\).__init__\(train_dataset\)`"
    ):
        Trainer().train(1)


def test_indexing_the_iterator_says_how_to_take_a_batch():
    class Trainer(armillary.StandardTrainer):
        def train_step(self, iterator):
            return iterator["x"]

    data = armillary.data.from_arrays({"x": np.ones((4, 1))}, batch_size=2)
    with pytest.raises(TypeError, match=r"`batch = next\(iterator\)`"):
        Trainer(data).train(1)


def test_outputs_keep_the_order_of_their_names():
    class Trainer(armillary.StandardTrainer):
        def train_step(self, iterator):
            next(iterator)

        def train_loop_end(self):
            return {"loss": 1.0, "accuracy": {"top5": 2.0, "top1": 3.0}}

    data = armillary.data.from_arrays({"x": np.ones((4, 1))}, batch_size=2)
    output = Trainer(data).train(1)
    assert list(output) == ["loss", "accuracy"]
    assert list(output["accuracy"]) == ["top5", "top1"]


def test_a_global_model_used_by_another_method_is_named():
    class Trainer(armillary.StandardTrainer):
        def train_step(self, iterator):
            self.update(next(iterator))

        def update(self, batch):
            nnx.grad(lambda model: model(batch["x"]).sum())(global_model)

    data = armillary.data.from_arrays({"x": np.ones((4, 1), "f")}, batch_size=2)
    with pytest.raises(
        armillary.errors.CapturedStateError, match=r"global_model/kernel(.|\n)*self\."
    ):
        Trainer(data).train(1)


global_model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
