"""Tests of the state that an `armillary.function` reads, writes and returns."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.errors import CapturedStateError
from tests.problems import Holder


def add(variable, amount=1):
    variable[...] = variable[...] + amount


def test_a_function_is_compiled_once_per_shape(traces, no_retrace):
    @armillary.function
    def double(x):
        traces.append("fn")
        return x * 2

    assert double(jnp.ones(2)).tolist() == [2, 2]
    with no_retrace():
        assert double(np.zeros(2, np.float32)).tolist() == [0, 0]
    double(jnp.ones(3))
    double(jnp.ones(2, jnp.int32))
    double([jnp.ones(2)][0])
    assert len(traces) == 3


def test_the_strategy_that_a_function_reaches_holds_its_state(make_mirrored):
    strategy, count = make_mirrored(2), nnx.Variable(jnp.asarray(0))

    @armillary.function
    def step():
        strategy.run(lambda: add(count))

    step()
    assert count[...].sharding.mesh == strategy.mesh

    @armillary.function(strategy=make_mirrored(4))
    def step_elsewhere():
        add(count)

    step_elsewhere()
    assert len(count[...].sharding.device_set) == 4


def test_variables_in_the_closure_are_updated(traces):
    count = nnx.Variable(jnp.asarray(0))

    @armillary.function
    def step():
        traces.append("fn")
        add(count)
        return count[...]

    assert [int(step()) for _ in range(3)] == [1, 2, 3]
    assert len(traces) == 1


def test_state_of_self_is_updated(traces):
    class Loop:
        def __init__(self):
            self.total = jnp.zeros(())
            self.model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

        @armillary.function
        def step(self, x):
            traces.append("fn")
            self.total = self.total + jnp.sum(x)
            add(self.model.bias)

    first, second = Loop(), Loop()
    for _ in range(2):
        first.step(jnp.ones(3))
    second.step(jnp.ones(3))
    assert (float(first.total), float(second.total)) == (6, 3)
    assert (first.model.bias[...].tolist(), second.model.bias[...].tolist()) == (
        [2], [1],
    )  # fmt: skip
    assert len(traces) == 2  # once for each object


def test_state_in_arguments_is_updated(traces):
    @armillary.function
    def step(model, holders, *, extra):
        traces.append("fn")
        add(model.bias)
        holders["a"].total = holders["a"].total + 1
        add(extra)

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    kernel, holder, extra = (
        model.kernel, Holder(total=jnp.zeros(())), nnx.Variable(jnp.asarray(0)),
    )  # fmt: skip
    step(model, {"a": holder}, extra=extra)
    step(model, {"a": holder}, extra=extra)
    assert model.kernel is kernel and model.bias[...].tolist() == [2]
    assert float(holder.total) == 2 and int(extra[...]) == 2
    assert len(traces) == 1


@pytest.mark.parametrize("num_replicas", [None, 1, 2])
def test_objects_with_state_that_are_returned_are_themselves(
    num_replicas, make_mirrored
):
    def step(variable, other):
        add(variable)
        return {"variable": variable, "again": [other], "twice": variable[...] * 2}

    if num_replicas is None:
        call = armillary.function(step)
    else:
        strategy = make_mirrored(num_replicas)
        call = functools.partial(lambda *args: strategy.run(step, args))
    variable, other = nnx.Variable(jnp.zeros(())), nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    for count in range(1, 4):
        result = call(variable, other)
        assert result["variable"] is variable
        assert result["again"][0] is other
        assert variable[...] == count
    # One that replaces it belongs to another result.
    holder = Holder(variable=variable)

    @armillary.function
    def read():
        add(holder.variable)
        return holder.variable

    assert read() is variable
    holder.variable = nnx.Variable(jnp.zeros(()))
    assert read() is holder.variable
    assert holder.variable[...] == 1


def test_arrays_that_the_user_holds_or_puts_into_a_slot_stay_valid():
    count, mine = nnx.Variable(jnp.zeros(3)), jnp.full(3, 7.0)
    held = count[...]

    @armillary.function
    def step():
        add(count)

    step()
    np.testing.assert_array_equal(held, [0, 0, 0])
    count.set_value(mine)
    step()
    step()
    np.testing.assert_array_equal(mine, [7, 7, 7])
    np.testing.assert_array_equal(count[...], [9, 9, 9])


def test_state_is_donated():
    count = nnx.Variable(jnp.zeros(3))

    @armillary.function
    def step():
        add(count)

    step()
    ours = count._raw_value
    step()
    assert ours.is_deleted()


def test_state_that_is_only_read_is_not_copied():
    table, total = nnx.Variable(jnp.arange(3.0)), nnx.Variable(jnp.zeros(()))
    array = table[...]

    @armillary.function
    def step():
        add(total, jnp.sum(table[...]))

    step()
    step()
    assert table[...] is array and not array.is_deleted()
    assert float(total[...]) == 6


def test_two_slots_may_begin_or_end_with_one_array():
    model = nnx.Param(jnp.ones(2))
    holder, target = Holder(average=model[...]), nnx.Variable(jnp.zeros(2))

    @armillary.function
    def step():
        add(model)
        holder.average = 0.5 * holder.average + 0.5 * model[...]
        target[...] = model[...]

    for _ in range(2):
        step()
    np.testing.assert_array_equal(model[...], [3, 3])
    np.testing.assert_array_equal(target[...], [3, 3])
    np.testing.assert_array_equal(holder.average, [2.25, 2.25])


def test_a_generator_is_no_function():
    def make():
        yield jnp.zeros(())

    with pytest.raises(TypeError, match="`make` is a generator or a coroutine"):
        armillary.function(make)


def test_a_function_inside_a_function_is_part_of_it(traces, no_retrace):
    count = nnx.Variable(jnp.asarray(0))

    @armillary.function
    def inner(amount):
        traces.append("inner")
        add(count, amount)

    @armillary.function
    def outer(amount):
        traces.append("outer")
        inner(amount)
        inner(amount)

    outer(jnp.asarray(2))
    with no_retrace():
        outer(jnp.asarray(3))
    assert int(count[...]) == 10
    assert list(traces) == ["outer", "inner", "inner"]


def test_a_function_inside_a_trainer_step_is_part_of_it(traces):
    class Trainer(armillary.StandardTrainer):
        def __init__(self):
            super().__init__([np.float32(i) * np.ones(2) for i in range(6)])
            self.total = jnp.zeros(())

        @armillary.function
        def add(self, batch):
            traces.append("fn")
            self.total = self.total + jnp.sum(batch)

        def train_step(self, iterator):
            self.add(next(iterator))

    trainer = Trainer()
    trainer.train(6)
    assert float(trainer.total) == 2 * 15
    assert 1 <= len(traces) < 6


def test_state_that_nothing_leads_to_is_an_error():
    class Registry:
        scale = nnx.Variable(jnp.asarray(2.0))

    @armillary.function
    def step(x):
        return x * Registry.scale[...]

    with pytest.raises(CapturedStateError, match="`step` reads 1 variable that the f"):
        step(jnp.ones(2))


@pytest.mark.parametrize(
    "take", [next, lambda iterator: list(iterator)], ids=["next", "for"]
)
def test_a_batch_taken_while_tracing_is_an_error(make_mirrored, take):
    strategy = make_mirrored(2)
    dataset = strategy.distribute_dataset(list(np.arange(8.0).reshape(2, 4)))
    iterator = iter(dataset)
    with pytest.raises(
        CapturedStateError,
        match=r"taken from a distributed dataset while a function is traced.*let a "
        r"`StandardTrainer` run",
    ):
        armillary.function(take)(iterator)
    assert strategy.gather(next(iterator), axis=0).tolist() == [0, 1, 2, 3]


def test_two_threads_may_run_two_functions(make_mirrored):
    strategy = make_mirrored(2)
    counts = [nnx.Variable(jnp.asarray(0)) for _ in range(2)]

    def work(count):
        @armillary.function
        def step():
            strategy.run(lambda: add(count))

        for _ in range(30):
            step()

    threads = [threading.Thread(target=work, args=(count,)) for count in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(count[...]) for count in counts] == [30, 30]


@pytest.mark.slow
def test_thousands_of_tiny_steps_end(make_mirrored, put_rows):
    strategy, total = make_mirrored(4), nnx.metrics.Average()
    batch = put_rows(strategy, [[1], [2], [3], [4]])

    @armillary.function
    def step(x):
        def step_fn(x):
            total.update(values=x)
            return jax.lax.psum(x, "replica")

        return strategy.run(step_fn, args=(x,))

    result = step(batch)
    for _ in range(2999):
        result = step(batch)
    assert int(total.count[...]) == 12000
    assert float(result.values[0][0]) == 10
