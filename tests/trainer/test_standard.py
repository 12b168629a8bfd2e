"""Tests of `StandardTrainer`: what a step takes, ends of data, replicas, mistakes."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import StandardTrainer as Base
from armillary import StandardTrainerOptions as Options
from armillary.data import InputOptions, from_arrays
from armillary.errors import (
    BatchSizeError,
    ReplicaContextError,
    StateStructureError,
)
from tests.problems import make_batches, make_strategy
from tests.tiers import slow_after_first


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


# Values that a step may take


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


# The end of the data


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


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_a_step_that_is_compiled_already_is_an_error(jit):
    class Trainer(Base):
        @jit
        def train_step(self, iterator):
            next(iterator)

    with pytest.raises(TypeError, match=r"`Trainer.train_step` is .* Remove the decor"):
        Trainer([np.ones(2)]).train(1)


frozen_model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
frozen = jax.jit(lambda x: frozen_model(x))


@pytest.mark.parametrize("is_global", [False, True])
def test_a_compiled_function_over_a_model_sees_it_as_it_is(is_global):
    class Trainer(Base):
        def __init__(self, dataset):
            super().__init__(dataset)
            self.model, self.sums = frozen_model, jnp.zeros(())
            if not is_global:
                self.fn = frozen

        def train_step(self, iterator):
            kernel = self.model.kernel
            kernel[...] = kernel[...] + 1
            fn = frozen if is_global else self.fn
            self.sums += fn(next(iterator))[0, 0]

    kernel, batch = frozen_model.kernel, np.ones((1, 1), np.float32)
    kernel[...] = jnp.ones((1, 1))
    frozen.clear_cache()
    assert frozen(batch) == 1  # Its program holds the array of now.
    trainer = Trainer([batch] * 4)
    trainer.train(2)
    assert trainer.sums == 2 + 3
    assert frozen(batch) == 3  # And not a value of the trace.
    trainer.train(2)
    assert trainer.sums == 2 + 3 + 4 + 5


def test_another_dataset_is_started_on():
    trainer = Trainer(make_batches(2))
    trainer.train(5)
    assert trainer.data_exhausted

    trainer.train_dataset = make_batches(3, start=10)
    trainer.train(2)

    assert not trainer.data_exhausted
    assert trainer.sums == (1 + 2 + 10 + 11, 4)


class Counter(Base):
    """Counts by a number for each step, and gives the count."""

    def __init__(self):
        super().__init__(make_batches(8))
        self.count = jnp.zeros(())

    def train_step(self, iterator):
        next(iterator)
        self.count = self.count + 1

    def train_loop_end(self):
        return {"count": self.count}


@pytest.mark.parametrize("of_class", [False, True])
def test_a_replaced_step_runs(of_class, monkeypatch):
    def train_step(self, iterator):
        next(iterator)
        self.count = self.count + 10

    trainer = Counter()
    trainer.train(2)
    loop = trainer._train_setup.loop
    trainer.train(2)
    assert trainer._train_setup.loop is loop

    if of_class:
        monkeypatch.setattr(Counter, "train_step", train_step)
    else:
        trainer.train_step = types.MethodType(train_step, trainer)
    assert trainer.train(2) == {"count": 24}
    assert trainer.train(2) == {"count": 44}


def test_a_replaced_hook_runs(monkeypatch):
    trainer = Counter()
    assert trainer.train(2) == {"count": 2}

    monkeypatch.setattr(Counter, "train_loop_end", lambda self: {"new": -self.count})

    assert trainer.train(2) == {"new": -4}


def test_a_replaced_evaluation_step_runs():
    class Evaluator(armillary.StandardEvaluator):
        def __init__(self):
            super().__init__(make_batches(2))
            self.count = jnp.zeros(())

        def eval_step(self, iterator):
            next(iterator)
            self.count = self.count + 1

        def eval_end(self, *_):
            return {"count": self.count}

    def eval_step(self, iterator):
        next(iterator)
        self.count = self.count + 10

    evaluator = Evaluator()
    assert evaluator.evaluate(-1) == {"count": 2}

    evaluator.eval_step = types.MethodType(eval_step, evaluator)

    assert evaluator.evaluate(-1) == {"count": 22}


def test_an_error_of_the_data_function_reaches_the_caller():
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


def test_a_remainder_that_replicas_cannot_share_is_an_error_after_the_others():
    # The number of rows of a list of batches is not known before they are read.
    trainer = Rows(make_strategy(4), list(make_rows(22, 8)))

    with pytest.raises(BatchSizeError, match="A batch has 6 examples, which"):
        trainer.train(10)
    assert int(trainer.sum.count[...]) == 16


@slow_after_first(
    ("num_rows", "remainder", "count", "is_compiled"),
    [
        (20, None, 20, True),
        (22, "drop", 16, True),
        (22, "pad", 22, True),
        (22, "exact", 22, True),
        (22, "exact", 22, False),
    ],
)
def test_a_remainder_is_shared_dropped_or_padded_or_run_on_fewer_replicas(
    num_rows, remainder, count, is_compiled
):
    strategy = make_strategy(4)
    dataset = armillary.distribute.make_distributed_dataset(
        strategy,
        make_rows(num_rows, 8),
        input_options=InputOptions(remainder=remainder),
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
        match=r"over \d replicas? by another strategy than MirroredStrategy\(4 x cpu\)"
        r".*`with strategy.scope\(\):`.*from before `distribute_dataset`",
    ):
        trainer.train(1)


# Which strategy is in effect


def test_a_strategy_unknown_to_the_trainer_is_an_error():
    strategy = make_strategy(2)

    class Forgetful(Base):
        def train_step(self, iterator):
            strategy.run(lambda batch: None, args=(next(iterator),))

    with pytest.raises(ReplicaContextError, match=r"so each replica would get the wh"):
        Forgetful(make_rows(8, 4)).train(1)
    with strategy.scope():
        Forgetful(make_rows(8, 4)).train(1)


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
    assert seen[2] is armillary.distribute.DefaultStrategy()


def test_a_trainer_whose_base_was_not_begun_is_an_error():
    class Unprepared(Trainer):
        def __init__(self):
            self.model = None

    with pytest.raises(TypeError, match=r"`super\(\).__init__\(train_dataset\)`"):
        Unprepared().train(1)


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


@pytest.mark.parametrize(
    ("base", "name", "hook"),
    [
        (Base, "train_loop_ends", "train_loop_end"),
        (Base, "train_loop_began", "train_loop_begin"),
        (Base, "train_loop_start", "train_loop_begin"),
        (armillary.StandardEvaluator, "eval_ends", "eval_end"),
        (armillary.StandardEvaluator, "eval_start", "eval_begin"),
        (armillary.StandardEvaluator, "eval_finish", "eval_end"),
        (Base, "on_train_epoch_end", "train_loop_end"),
        (armillary.StandardEvaluator, "on_validation_epoch_end", "eval_end"),
    ],
)
def test_a_misspelt_hook_is_an_error(base, name, hook):
    names = ["train_step", "eval_step", name]
    kind = type("Kind", (base,), {each: lambda *args: None for each in names})
    with pytest.raises(TypeError, match=f"`Kind.{name}` would .* called `{hook}`. Ren"):
        kind(make_batches(1))


@pytest.mark.parametrize("base", [Base, armillary.StandardEvaluator])
@pytest.mark.parametrize("name", ["on_train_end", "on_epoch_begin"])
def test_a_hook_of_another_library_is_an_error(base, name):
    names = ["train_step", "eval_step", name]
    kind = type("Kind", (base,), {each: lambda *args: None for each in names})
    with pytest.raises(TypeError, match=f"`Kind.{name}` would never .*, `eval_step`, "):
        kind(make_batches(1))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("validation_step", "`eval_step` of a `StandardEvaluator`"),
        ("test_step", "`eval_step` of a `StandardEvaluator`"),
        ("configure_optimizers", "`self.optimizer = nnx.Optimizer(self.model, "),
    ],
)
def test_a_method_whose_work_is_done_elsewhere_is_answered_with_the_place(name, line):
    methods = {each: lambda *args: None for each in ("train_step", name)}
    kind = type("Kind", (armillary.StandardTrainer,), methods)

    with pytest.raises(TypeError, match=re.escape(line)) as caught:
        kind(make_batches(1))
    assert "Remove this method." in str(caught.value)


def test_the_step_of_another_evaluator_is_named_before_the_missing_one():
    methods = {"validation_step": lambda self, batch, batch_idx: None}
    ported = type("Ported", (armillary.StandardEvaluator,), methods)

    with pytest.raises(TypeError, match=r"is called `eval_step`\. Rename it"):
        ported(make_batches(1))


def test_the_step_of_another_library_is_named_before_the_missing_one():
    methods = {"training_step": lambda self, batch, batch_idx: None}
    ported = type("Ported", (armillary.StandardTrainer,), methods)

    with pytest.raises(TypeError, match="the method is called `train_step`"):
        ported(make_batches(1))


def test_a_missing_step_is_an_error_of_python():
    empty = type("Empty", (armillary.StandardTrainer,), {})

    with pytest.raises(TypeError, match=r"abstract method '?train_step"):
        empty(make_batches(1))


def test_a_method_that_a_step_calls_may_have_any_name():
    class Ported:
        def training_step(self, batch):
            return batch["x"].sum()

    class Kind(Ported, armillary.StandardTrainer):
        def train_step(self, iterator):
            self.training_step(next(iterator))

        def on_save_end(self):
            """A hook of no library."""

    Kind(make_batches(1)).train(1)


def test_the_result_of_a_step_is_not_dropped_without_a_message(caplog):
    class Kind(armillary.StandardTrainer):
        # A type checker says so too.
        def train_step(self, iterator):  # pyright: ignore[reportIncompatibleMethodOverride]
            return {"loss": next(iterator)["x"].sum() * self.rate}

    trainer = Kind(make_batches(4))
    trainer.rate = 1.0
    trainer.train(1)
    trainer.rate = 2.0
    trainer.train(3)
    message = "The result of `train_step` is dropped. Update a metric in this method"
    assert caplog.text.count(message) == 1


def test_a_method_next_to_its_hook_is_the_users_own():
    class Kind(Trainer):
        def train_steps(self):
            """Not the hook, which this class has."""

        def train_loop_ended(self):
            """Nor this one."""

    Kind(make_batches(1))


def test_a_loop_inside_a_transformation_is_refused_and_leaves_the_trainer_whole():
    trainer = Trainer(make_batches(2))
    with pytest.raises(ReplicaContextError, match="`Trainer` was called inside `jax"):
        jax.jit(lambda: trainer.train(1))()
    trainer.train(1)


@pytest.mark.parametrize("strategy", [make_strategy(1), make_strategy(2)], ids=[1, 2])
def test_a_reference_is_refused_by_its_path(strategy):
    trainer = Trainer(make_batches(2))
    trainer.held = {"ref": jax.new_ref(jnp.zeros(()))}
    with strategy.scope(), pytest.raises(StateStructureError, match="`held/ref` holds"):
        trainer.train(1)
    with pytest.raises(
        StateStructureError, match=r"`trainer/held/ref` holds a `jax\.Re"
    ):
        armillary.Checkpoint(trainer=trainer)
