"""Tests of the single exchange between processes after each loop."""

import gc
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.actions import SaveCheckpointIfPreempted
from armillary.cluster import _join
from armillary.cluster._peers import Boundary, Peers
from armillary.data import from_arrays
from armillary.data.feed._ahead import Prefetcher
from armillary.distribute.strategies import _multi_worker
from tests.patience import patience
from tests.peers import make_peers, run_together


class Part:
    """A part with these values, one after the other."""

    def __init__(self, *values: Any) -> None:
        self.values = iter(values)

    def next_value(self) -> Any:
        return next(self.values)


def test_the_first_to_ask_gets_the_answers_of_the_others():
    def talk(peers: Peers) -> list[Any]:
        first, second = Part(f"a{peers.index}"), Part(f"b{peers.index}", "later")
        boundary = peers.boundary
        return [
            boundary.take(second.next_value),
            boundary.exchange("the first", first.next_value),
            boundary.take(second.next_value),
            boundary.take(second.next_value),
        ]

    assert run_together(talk) == [[None, ["a0", "a1"], ["b0", "b1"], None]] * 2


def test_an_answer_counts_if_all_gave_it_and_nothing_ran_since():
    def talk(peers: Peers) -> list[Any]:
        asking, other = Part(1, 2), Part(None if peers.index else "here", "there")
        boundary = peers.boundary
        boundary.take(other.next_value)
        boundary.exchange("one", asking.next_value)
        found = [boundary.take(other.next_value)]
        boundary.exchange("two", asking.next_value)
        boundary.expire()
        return [*found, boundary.take(other.next_value)]

    assert run_together(talk) == [[None, None]] * 2


def test_a_part_that_nobody_holds_adds_nothing_to_the_message():
    sent: list[str] = []

    def gather(topic: str, value: str) -> list[str]:
        sent.append(value)
        return [value]

    boundary = Boundary(gather)
    asking, gone = Part(1, 2), Part("x")
    boundary.take(gone.next_value)
    boundary.exchange("one", asking.next_value)
    del gone
    gc.collect()
    boundary.exchange("two", asking.next_value)
    assert sent == ['{"0": "x", "1": 1}', '{"1": 2}']


class Adder(armillary.StandardTrainer):
    """Adds up examples: of one dataset for all, or of each process's own."""

    def __init__(self, strategy: Any, has_own_data: bool) -> None:
        rows = np.arange(64, dtype=np.float32)
        source = from_arrays({"x": rows}, batch_size=8, repeat=True)
        distribute = strategy.distribute_dataset
        if has_own_data:
            distribute = strategy.distribute_datasets_from_function
        dataset = distribute((lambda _: source) if has_own_data else source)
        options = armillary.StandardTrainerOptions(steps_per_chunk=10)
        super().__init__(dataset, options)
        self.strategy = strategy
        self.step = nnx.Variable(jnp.zeros((), jnp.int32))
        self.total = nnx.metrics.Average("x")

    def train_step(self, iterator: Any) -> None:
        self.strategy.run(lambda b: self.total.update(x=b["x"]), (next(iterator),))
        self.step[...] += 1


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes this process one of a job of its own; lists what it exchanges."""
    topics: list[str] = []
    gather, ahead = Peers.gather, cast("Any", Prefetcher.ahead)

    def note(peers: Peers, topic: str, value: str) -> list[str]:
        topics.append(topic)
        return gather(peers, topic, value)

    def wait_and_look(prefetcher: Prefetcher[Any]) -> Any:
        # How fast a thread reads is not what is tested.
        end = time.monotonic() + patience(120)
        has_thread = prefetcher._thread is not None
        while has_thread and not prefetcher.is_ready and time.monotonic() < end:
            prefetcher.read_on()
            time.sleep(0.001)
        return ahead.fget(prefetcher)

    monkeypatch.setattr(Peers, "gather", note)
    monkeypatch.setattr(Prefetcher, "ahead", property(wait_and_look))
    (peers,) = make_peers(1)
    monkeypatch.setattr(_join, "_joined", SimpleNamespace(peers=peers))
    monkeypatch.setattr(_multi_worker, "join_cluster", lambda *args: peers)
    return topics


def train(
    num_loops: int,
    make_actions: Callable[[Any], Any],
    tmp_path: Any,
    has_own_data: bool = False,
) -> Adder:
    strategy = armillary.MultiWorkerMirroredStrategy()
    trainer = Adder(strategy, has_own_data)
    checkpoint = armillary.Checkpoint(trainer=trainer)
    manager = armillary.CheckpointManager(checkpoint, tmp_path)
    controller: Any = None
    actions = make_actions(SimpleNamespace(manager=manager, stop=lambda: stop()))

    def stop() -> None:
        controller.request_stop("enough")

    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.step,
        strategy=strategy,
        steps_per_loop=10,
        train_actions=actions,
    )
    controller.train(10 * num_loops)
    return trainer


STOP = "whether to stop"
PREEMPTED = "whether a machine will be taken away"


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    actions: list[Any] = []
    yield actions
    for action in actions:
        action.close()


@pytest.mark.parametrize("has_own_data", [False, True])
@pytest.mark.parametrize("is_preemptible", [False, True])
def test_a_loop_costs_one_exchange(
    topics, closing, tmp_path, is_preemptible, has_own_data
):
    def make(run: Any) -> list[Any]:
        if is_preemptible:
            closing.append(SaveCheckpointIfPreempted(run.manager))
        return closing

    train(8, make, tmp_path, has_own_data)
    # The data, program and state of the first loop are compared once.
    start = topics.index("state") + 1
    assert "the data of train_step" in topics[:start]
    assert topics[start:] == [PREEMPTED if is_preemptible else STOP] * 8


def test_a_stop_requested_after_the_exchange_of_an_action_takes_effect(
    topics, closing, tmp_path
):
    def make(run: Any) -> list[Any]:
        closing.append(SaveCheckpointIfPreempted(run.manager))
        return [*closing, lambda output: run.stop()]

    trainer = train(5, make, tmp_path)
    assert int(trainer.step[...]) == 10
    assert topics[-2:] == [PREEMPTED, STOP]


def test_an_evaluation_costs_one_exchange_more_than_its_data(topics):
    strategy = armillary.MultiWorkerMirroredStrategy()
    trainer = Adder(strategy, has_own_data=False)
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=SimpleNamespace(evaluate=lambda num_steps: {}),
        global_step=trainer.step,
        strategy=strategy,
        steps_per_loop=10,
    )
    controller.train_and_evaluate(60, eval_interval=10)
    # After a loop, and after an evaluation.
    assert topics[topics.index("state") + 1 :] == [STOP] * (2 * 6 - 1)


def test_a_stop_asked_for_while_an_evaluation_runs_ends_it_all(topics):
    strategy = armillary.MultiWorkerMirroredStrategy()
    trainer = Adder(strategy, has_own_data=False)

    def evaluate(num_steps: int) -> dict[str, Any]:
        controller.request_stop("enough")
        return {}

    controller = armillary.Controller(
        trainer=trainer,
        evaluator=SimpleNamespace(evaluate=evaluate),
        global_step=trainer.step,
        strategy=strategy,
        steps_per_loop=10,
    )
    controller.train_and_evaluate(60, eval_interval=20)
    assert int(trainer.step[...]) == 20
