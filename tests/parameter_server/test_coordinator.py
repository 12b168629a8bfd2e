"""Tests of scheduled calls and variables over Ray, and of lost processes.

The cases of losses come from TensorFlow's tests of fault tolerance
(`coordinator/fault_tolerance_test_base.py`).
"""

import os
import threading
import time
from concurrent.futures import InvalidStateError

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.distribute.coordinator import ClusterCoordinator, PSUnavailableError
from armillary.errors import ClosureCancelledError, OutOfRangeError
from armillary.parameter_server import _scheduler
from tests.patience import patience, wait_until

pytestmark = pytest.mark.xdist_group("ray")


def test_a_model_is_trained_by_two_workers_on_two_servers(coordinator, problem):
    schedule = problem.start(coordinator)
    losses = schedule(150)
    coordinator.join()
    assert problem.num_steps == 150
    np.testing.assert_allclose(problem.kernel[:, 0], [1, -2, 3], atol=0.1)
    first, *_, last = coordinator.fetch(losses)
    assert first > 10 * last
    assert isinstance(last, np.ndarray)
    assert isinstance(losses[0].get(), jnp.ndarray)
    strategy, remote = coordinator.strategy, {"loss": losses[0]}
    for call in (
        lambda: strategy.reduce("sum", remote),
        lambda: strategy.gather(remote, 0),
    ):
        with pytest.raises(ValueError, match=r"`RemoteValue` .* `coordinator.fetch\("):
            call()
    assert strategy.reduce("sum", coordinator.fetch(remote))["loss"] == first
    servers = coordinator._scheduler.servers
    assert len(servers) == 2
    kernel = next(
        v for v in coordinator._variables._variables if v.path.endswith("kernel")
    )
    assert sorted(location.server for location in kernel.locations) == [0, 1]


@pytest.mark.slow
def test_new_values_of_variables_are_sent_before_the_next_call(coordinator, problem):
    model = problem.model

    def read():
        return model.kernel[...] + 0

    def read_bias():
        return model.bias[...] + 0

    coordinator.schedule(read)
    model.kernel[...] = jnp.full((3, 1), 7.0)
    value = coordinator.schedule(read)
    assert value.fetch().tolist() == [[7], [7], [7]]
    model.bias[...] = jnp.full((1,), 5.0)
    coordinator.schedule(read_bias)
    model.bias[...] = jnp.full((1,), 6.0)
    coordinator.join()
    assert model.bias[...].tolist() == [6]
    model.bias.set_value(jnp.ones((2,)))
    assert coordinator.schedule(read_bias).fetch().tolist() == [1, 1]
    model.bias.set_value(jnp.zeros((1,)))


@pytest.mark.slow
def test_results_are_arguments_of_other_calls(coordinator):
    def add(a, b, *, times=1, mode="sum"):
        return {"sum": (a + b) * times, "mode": mode}

    first = coordinator.schedule(add, (jnp.ones(2), np.float32(2)))
    second = coordinator.schedule(
        lambda one, two: one + two,
        (coordinator.schedule(jnp.add, (1.0, 2)), jnp.ones(2)),
    )
    third = coordinator.schedule(add, (1.5, 2), {"times": 2, "mode": "product"})
    assert second.fetch().tolist() == [4, 4]
    assert third.fetch() == {"sum": 7.0, "mode": "product"}
    assert coordinator.fetch({"a": [first, 1]})["a"][0]["sum"].tolist() == [3, 3]
    coordinator.schedule(add, (third, 1))
    with pytest.raises(TypeError, match="of another one that holds 'product'"):
        coordinator.join()


@pytest.mark.slow
def test_arguments_are_taken_at_the_time_of_the_call(coordinator):
    gate, numbers = coordinator.schedule(lambda: time.sleep(0.5)), np.zeros(2)

    def add(numbers, gate):
        return numbers.sum()

    values = []
    for count in range(5):
        numbers[:] = count
        values.append(coordinator.schedule(add, args=(numbers, gate)))
    assert coordinator.fetch(values) == [2 * count for count in range(5)]


@pytest.mark.slow
def test_an_error_cancels_the_rest_and_is_raised_once(coordinator, problem):
    schedule = problem.start(coordinator)
    model = problem.model

    def fail():
        raise KeyError("no such thing")

    def set_kernel():
        model.kernel[...] = jnp.zeros((3, 1))

    with coordinator._scheduler._changed:  # Its threads wait.
        failed = coordinator.schedule(fail)
        after = schedule(50)
    with pytest.raises(KeyError, match="no such thing") as caught:
        coordinator.join()
    assert "raise KeyError" in "".join(caught.value.__notes__)
    with pytest.raises(KeyError):
        failed.get()
    assert any(value.has_failed for value in after)
    cancelled = next(value for value in after if value.has_failed)
    with pytest.raises(ClosureCancelledError, match="This call of `step` did not run"):
        cancelled.fetch()
    schedule()
    coordinator.join()
    coordinator.schedule(set_kernel)
    with pytest.raises(armillary.errors.StateStructureError, match="kernel: set to"):
        while True:
            coordinator.done()
            time.sleep(0.01)


@pytest.fixture
def messages(coordinator, monkeypatch):
    """Returns how many calls went in each message, when calls of any length share."""
    scheduler, sizes = coordinator._scheduler, []
    send = scheduler._send

    def note(worker, message):
        sizes.append(len(message.closures))
        send(worker, message)

    monkeypatch.setattr(_scheduler, "_MESSAGE_SECONDS", 10.0)
    monkeypatch.setattr(scheduler, "_send", note)
    return sizes


@pytest.mark.slow
def test_a_failed_call_ends_its_message_and_keeps_what_ran_before(
    coordinator, problem, messages
):
    model, optimizer = problem.model, problem.optimizer

    def step(rows):
        if rows.shape[0] == 3:
            raise KeyError("three rows")
        optimizer.update(model, nnx.grad(lambda model: model(rows).sum())(model))

    rows = [np.ones((2, 3), "float32") for _ in range(80)]
    rows[40] = np.ones((3, 3), "float32")
    values = [coordinator.schedule(step, args=(each,)) for each in rows]
    with pytest.raises(KeyError, match="three rows"):
        coordinator.join()
    coordinator.join()
    assert max(messages) > 1
    assert all(value.has_ended for value in values)
    assert problem.num_steps == sum(not value.has_failed for value in values)
    with pytest.raises(KeyError):
        values[40].get()


@pytest.mark.slow
def test_the_end_of_data_is_an_error(coordinator, problem):
    schedule = problem.start(coordinator, repeat=False)
    schedule(20)
    with pytest.raises(OutOfRangeError, match="data of a worker has ended"):
        coordinator.join()
    coordinator.join()
    # Eight batches on each worker, or all of one if the other came late.
    assert 8 <= problem.num_steps <= 16


@pytest.mark.slow
def test_a_call_comes_after_the_dataset_that_it_takes(coordinator):
    dataset = coordinator.create_per_worker_dataset(lambda: [np.float32([7])])
    with coordinator._scheduler._changed:  # Its threads wait.
        values = [coordinator.schedule(next, (iter(dataset),)) for _ in range(4)]
    assert coordinator.fetch(values) == [[7]] * 4
    coordinator.join()


@pytest.mark.slow
def test_a_call_comes_after_the_server_that_it_needs(coordinator, kill):
    total = nnx.Variable(jnp.zeros(()))

    def add():
        total[...] += 1

    coordinator.schedule(add)
    coordinator.join()
    for server in coordinator._scheduler.servers:
        kill(server)
    with pytest.raises(PSUnavailableError):
        for _ in range(100):
            coordinator.schedule(add)
            coordinator.join()
    total[...] = jnp.zeros(())
    with coordinator._scheduler._changed:  # Its threads wait.
        # More than two for each worker, so that some share a message.
        for _ in range(50):
            coordinator.schedule(add)
    coordinator.join()
    assert total[...] == 50


@pytest.mark.slow
def test_an_iterator_of_another_coordinator_is_an_error(coordinator, alone):
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.ones(1)]))
    alone.schedule(next, (iterator,))
    with pytest.raises(RuntimeError, match="by a different `ClusterCoordinator` than"):
        alone.join()


@pytest.mark.slow
def test_a_dataset_that_cannot_be_built_is_an_error(coordinator):
    def make_data(context):
        raise FileNotFoundError(f"no file for worker {context.input_pipeline_id}")

    iterator = iter(coordinator.create_per_worker_dataset(make_data))
    coordinator.schedule(next, (iterator,))
    with pytest.raises(FileNotFoundError, match="no file for worker"):
        coordinator.join()


@pytest.mark.slow
def test_a_server_that_is_not_up_is_reported_by_name(make_coordinator, caplog):
    """Calls that need the server wait for it. Before, nothing named it."""
    nowhere = {"resources": {"nowhere": 1.0}}
    stuck = make_coordinator(
        num_workers=1, num_ps=1, ps_options=nowhere, report_seconds=0.5
    )
    while "ps 0 is not up after" not in caplog.text:
        time.sleep(0.05)
    assert "Ray has not started its process yet" in caplog.text
    stuck.shutdown()


@pytest.mark.slow
def test_a_slow_worker_is_reported_by_name(coordinator, caplog):
    def sleep():
        time.sleep(2.5)
        return jnp.zeros(())

    coordinator.schedule(sleep)
    coordinator.join()
    line, *_ = [
        r.getMessage() for r in caplog.records if "no progress" in r.getMessage()
    ]
    assert "worker " in line and "(process " in line and "`sleep`" in line


@pytest.mark.slow
def test_mistakes_are_errors_before_anything_is_sent(coordinator, problem):
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be pickled .*lock"):
        coordinator.schedule(lambda: lock)
    iterator = problem.make_iterator(coordinator)
    with pytest.raises(RuntimeError, match="outside of a scheduled function"):
        next(iterator)
    assert ClusterCoordinator(coordinator.strategy) is coordinator


@pytest.mark.slow
@pytest.mark.parametrize("num_lost", [1, 2])
def test_calls_of_lost_workers_run_again_and_none_twice(
    coordinator, problem, kill, num_lost
):
    schedule = problem.start(coordinator)
    schedule()
    coordinator.join()
    coordinator.take_statistics()
    workers = coordinator._scheduler.workers
    while not all(worker.pid for worker in workers):
        time.sleep(0.1)  # Another test has killed one.
    schedule(600)
    for worker in workers[:num_lost]:
        kill(worker.actor)
    coordinator.join()
    assert problem.num_steps == 601
    assert coordinator.statistics.num_lost == num_lost
    np.testing.assert_allclose(problem.kernel[:, 0], [1, -2, 3], atol=0.1)


@pytest.mark.slow
def test_a_call_that_ends_its_worker_is_not_run_for_ever(coordinator, monkeypatch):
    monkeypatch.setattr(_scheduler, "_MAX_LOSSES", 2)
    value = coordinator.schedule(lambda: os._exit(1))
    after = coordinator.schedule(lambda: 1)
    with pytest.raises(RuntimeError, match=r"lost its worker 2 times .* not run again"):
        coordinator.join()
    with pytest.raises(RuntimeError, match="run the function in this process"):
        value.get()
    assert after.has_ended


@pytest.mark.slow
def test_a_lost_server_is_an_error_after_which_training_resumes(
    coordinator, problem, kill, tmp_path
):
    schedule = problem.start(coordinator)
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(model=problem.model, optimizer=problem.optimizer),
        tmp_path,
        step_counter=problem.optimizer.step,
    )
    schedule(20)
    coordinator.join()
    manager.save()
    saved = problem.kernel
    schedule(600)
    # While a worker recovers.
    kill(coordinator._scheduler.workers[1].actor)
    kill(coordinator._scheduler.servers[0])
    with pytest.raises(PSUnavailableError, match="Parameter server 0 is gone"):
        coordinator.join()
    manager.restore_or_initialize()
    np.testing.assert_array_equal(problem.kernel, saved)
    schedule(100)
    coordinator.join()
    assert problem.num_steps == 120


@pytest.mark.slow
def test_captured_values_of_a_function_keep_their_type(coordinator, problem):
    model = problem.model
    start = model.kernel[...]  # The array that the variable holds, too.
    number = nnx.Variable(7)

    def both():
        return model.kernel[...].sum() + number[...], start.sum() + 7

    expected = float(start.sum()) + 7
    assert coordinator.schedule(both).fetch() == pytest.approx((expected, expected))
    # Arguments whose place in memory is used again are other arguments.
    sums = [
        coordinator.schedule(lambda r: jnp.asarray(sum(r)), (range(1, k),))
        for k in (2, 3, 4)
    ]
    assert coordinator.fetch(sums) == [1, 3, 6]


class Counter:
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(()))

    @armillary.function
    def add(self, n):
        self.count[...] += n


@pytest.mark.slow
def test_methods_are_scheduled_with_their_object(coordinator):
    counter = Counter()
    for n in (1.0, 2.0):
        coordinator.schedule(counter.add, (jnp.float32(n),))
    coordinator.join()
    assert counter.count[...] == 3


@pytest.mark.slow
def test_calls_take_as_many_batches_as_they_use(alone):
    data = armillary.data.from_arrays(np.arange(20.0, dtype="float32"), batch_size=1)
    dataset = alone.create_per_worker_dataset(data)
    one, two = jnp.zeros(1), jnp.zeros(2)

    def take(iterator, choice):
        total = next(iterator).sum()
        return total + next(iterator).sum() if choice.shape == (2,) else total

    def take_all(iterator, choices):
        return [alone.schedule(take, (iterator, c)).fetch() for c in choices]

    assert take_all(iter(dataset), [one, two, one, one]) == [0, 3, 3, 4]
    # A new iterator begins with the first element.
    assert take_all(iter(dataset), [one, one]) == [0, 1]


@pytest.mark.slow
def test_errors_of_calls_show_the_error_of_the_user(coordinator, problem):
    step = problem.make_step(coordinator.strategy)
    iterator = problem.make_iterator(coordinator)

    def wrong_shapes(iterator):
        return next(iterator)["x"] @ jnp.ones((5, 5))

    def wrong_value(x):
        return float(x)

    for fn, argument, error, message in (
        (wrong_shapes, iterator, TypeError, "dot_general"),
        # JAX's error cannot be sent.
        (wrong_value, jnp.ones(()), RuntimeError, "ConcretizationTypeError: Abstract"),
        (step, problem.model, TypeError, "not an iterator"),
    ):
        coordinator.schedule(fn, (argument,))
        with pytest.raises(error, match=message):
            coordinator.join()
    failed = coordinator.schedule(wrong_value, (jnp.ones(()),))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ConcretizationTypeError"):
            coordinator.join()
        coordinator.schedule(jnp.add, (failed, 1))
    with pytest.raises(RuntimeError, match="ConcretizationTypeError"):
        coordinator.join()
    deleted = jnp.ones(3)
    deleted.delete()
    coordinator.schedule(jnp.sum, (deleted,))
    with pytest.raises(RuntimeError, match="deleted"):
        coordinator.join()


@pytest.mark.slow
def test_a_worker_that_is_lost_while_idle_is_noticed(coordinator, problem, kill):
    schedule = problem.start(coordinator)
    schedule(4)
    coordinator.join()
    for worker in coordinator._scheduler.workers:
        kill(worker.actor)
    time.sleep(0.5)
    schedule(4)
    coordinator.join()
    assert problem.num_steps == 8


@pytest.mark.slow
def test_a_cancelled_future_ends_its_call(alone):
    def sleep():
        time.sleep(1)
        return 1

    alone.schedule(sleep).future.cancel()
    wait_until(lambda: not alone._scheduler._open)
    with pytest.raises(InvalidStateError):
        alone.join()
    assert alone.schedule(lambda: 2).fetch() == 2


@pytest.mark.slow
def test_results_of_another_coordinator_are_waited_for(coordinator, alone):
    def sleep(x):
        time.sleep(1)
        return x + 1

    def fail(x):
        time.sleep(1)
        raise ValueError("no result")

    one = jnp.ones(())
    later = alone.schedule(jnp.add, (coordinator.schedule(sleep, (one,)), 1))
    assert later.future.result(timeout=patience(120)) is not None
    assert later.fetch() == 3
    later = alone.schedule(jnp.add, (coordinator.schedule(fail, (one,)), 1))
    with pytest.raises(ValueError, match="no result"):
        later.future.result(timeout=patience(120))
    for each in (coordinator, alone):
        with pytest.raises(ValueError, match="no result"):
            each.join()


@pytest.mark.slow
def test_nothing_waits_for_a_coordinator_that_was_shut_down(make_coordinator):
    coordinator = make_coordinator(
        num_workers=1, num_ps=1, worker_options={"num_gpus": 1}
    )
    waiting = coordinator.schedule(lambda: jnp.ones(()))
    coordinator.shutdown()
    with pytest.raises(ClosureCancelledError, match="was shut down"):
        waiting.fetch()
    coordinator.join()
    with pytest.raises(RuntimeError, match="after `shutdown`"):
        coordinator.schedule(lambda: 1)
