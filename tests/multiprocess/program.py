"""The programs of the processes in these tests, one function for each scenario."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import armillary
from armillary.checkpoint import _writer
from armillary.data import from_arrays
from armillary.lifeline import _lifeline
from tests.multiprocess.digits import digest, local_rows, make_trainer, read_numbers
from tests.multiprocess.exports import exports
from tests.multiprocess.saves import saves
from tests.multiprocess.scenarios import catch
from tests.multiprocess.sharded import sharded
from tests.patience import patience
from tests.problems import CNN, Classifier, make_digits, read_state


class Counter(armillary.StandardEvaluator):
    """Counts and sums the examples of an evaluation, on all replicas."""

    def __init__(self, strategy: Any, dataset: Any) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.total = nnx.metrics.Average("x")
        self.num_steps = jnp.zeros((), jnp.int32)

    def eval_begin(self) -> None:
        self.total.reset()
        self.num_steps = jnp.zeros((), jnp.int32)

    def eval_step(self, iterator: Any) -> None:
        self.strategy.run(lambda b: self.total.update(x=b["x"]), (next(iterator),))
        self.num_steps = self.num_steps + 1

    def eval_end(self, *state: Any) -> Any:
        del state
        count, total = self.total.count, self.total.total
        return {"count": count[...] + 0, "sum": total[...] + 0, "n": self.num_steps}


def train(strategy: Any, num_steps: int = 12) -> dict[str, Any]:
    """Trains the model with all kinds of state; evaluates uneven data exactly."""
    trainer = make_trainer(strategy)
    for _ in range(2):
        trainer.train(num_steps // 2)
    numbers = from_arrays({"x": np.arange(37, dtype=np.float32)}, batch_size=16)
    counter = Counter(strategy, strategy.distribute_dataset(numbers))
    counted = [read_numbers(counter.evaluate(-1)) for _ in range(2)]
    losses, state = np.asarray(trainer.losses), read_state(trainer)
    return {
        "losses": losses[:num_steps].tolist(),
        "state": {path: digest(value) for path, value in state.items()},
        "sums": {path: float(np.sum(value)) for path, value in state.items()},
        "counted": counted,
    }


def fit_keras(strategy: Any, seeds: tuple[int, ...] = (0, 0)) -> dict[str, Any]:
    """Fits, evaluates and asks a Keras model, with uneven batches."""
    import keras

    index = strategy.peers.index
    inputs = np.random.default_rng(0).normal(size=(37, 3)).astype("float32")
    targets = inputs[:, :1] * 2
    with jax.numpy_rank_promotion("allow"):
        keras.utils.set_random_seed(seeds[index])
        with strategy.scope():
            layers = [keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization()]
            model = keras.Sequential([*layers, keras.layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(inputs, targets, batch_size=8, epochs=2, verbose=0)
        evaluated = model.evaluate(inputs, targets, verbose=0, return_dict=True)
        predicted = model.predict(inputs, batch_size=16, verbose=0)
    return {
        "history": history.history,
        "evaluated": evaluated,
        "predicted": np.asarray(predicted).tolist(),
    }


def values(strategy: Any) -> dict[str, Any]:
    """Uses what a loop of the user's own does, outside any trainer."""
    data = from_arrays({"x": np.arange(16, dtype=np.float32)}, batch_size=8)
    weight = nnx.Variable(jnp.ones(()))

    @armillary.function(strategy=strategy)
    def step(batch: Any) -> Any:
        weight[...] += 1
        return strategy.run(lambda b: b["x"] * weight[...], args=(batch,))

    sums, gathered, local = [], [], []
    for batch in strategy.distribute_dataset(data):
        output = step(batch)
        sums.append(float(strategy.reduce("sum", output, axis=0)))
        gathered.append(np.asarray(strategy.gather(output, axis=0)).tolist())
        local.append([np.asarray(row).tolist() for row in local_rows(strategy, output)])
    options = armillary.data.InputOptions(place_on_device=True)
    resident = [
        float(strategy.reduce("sum", batch["x"], axis=0))
        for batch in strategy.distribute_dataset(data, options)
    ]
    eager = Adder(strategy, strategy.distribute_dataset(data), compile_step=False)
    eager.train(2)
    own = strategy.distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    doubled = strategy.run(lambda value: 2 * value, args=(own,))
    numbers = from_arrays({"x": np.arange(37, dtype=np.float32)}, batch_size=16)
    predicted = armillary.predict(
        lambda b: b["x"] * weight[...], numbers, strategy=strategy
    )
    return {
        "predicted": [output.tolist() for output in predicted],
        "sums": sums,
        "gathered": gathered,
        "local": local,
        "own": [float(row) for row in local_rows(strategy, doubled)],
        "resident": resident,
        "eager": float(eager.total),
        "weight": float(weight[...]),
        "resolver": type(strategy.cluster_resolver).__name__,
        "repr": repr(strategy),
        "replicas": strategy.num_replicas_in_sync,
    }


def resume(strategy: Any, run_dir: str, steps: int) -> Any:
    """Trains up to a step from the latest checkpoint of a folder, and saves."""
    trainer = Reader(strategy)
    directory = Path(run_dir)
    best = armillary.actions.NewBestMetric(
        "accuracy", higher_is_better=True, directory=directory / "best"
    )
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=3,
        summary_dir=directory / "summary",
        train_actions=[best],
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer, data=trainer.train_dataset),
            directory / "checkpoints",
            checkpoint_interval=6,
        ),
    )
    start = int(trainer.optimizer.step[...])
    controller.train(steps)
    return {
        "start": start,
        "losses": np.asarray(trainer.losses)[:steps].tolist(),
        "seen": np.asarray(trainer.seen)[:steps].tolist(),
        "best": best.best_value,
    }


def preempted(
    strategy: Any, run_dir: str, steps: int, signal_at: int = -1
) -> dict[str, Any]:
    """Trains from the latest checkpoint on; soon after a step, process 1 must go."""
    trainer = make_trainer(strategy)
    step = trainer.optimizer.step
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer, data=trainer.train_dataset),
        run_dir,
        checkpoint_interval=6,
    )

    def terminate_soon(output: Any) -> None:
        if int(step[...]) == signal_at and jax.process_index() == 1:
            Path(run_dir).with_name("signal").write_text(str(time.time()))
            # Again and again, until nothing of this process is left.
            again = f"while kill -TERM {os.getpid()}; do sleep 0.02; done"
            terminate = f"sleep 0.2; {again}"
            subprocess.Popen(["sh", "-c", terminate], stderr=subprocess.DEVNULL)

    with armillary.actions.SaveCheckpointIfPreempted(manager) as save_if_preempted:
        controller = armillary.Controller(
            trainer=trainer,
            global_step=step,
            strategy=strategy,
            steps_per_loop=3,
            train_actions=[terminate_soon, save_if_preempted],
            checkpoint_manager=manager,
        )
        start = int(step[...])
        if signal_at != -1:
            # Its first save is running when the signal comes.
            write = _writer.write_folder

            def write_slowly(*args: Any, **kwargs: Any) -> Callable[[], None]:
                wait = write(*args, **kwargs)
                return lambda: (time.sleep(0.5), wait())[1]

            _writer.write_folder = write_slowly
        controller.train(steps)
    state = {path: digest(value) for path, value in read_state(trainer).items()}
    return {"start": start, "state": state}


class Reader(Classifier):
    """Notes each example; its model is the same on any number of replicas."""

    def __init__(self, strategy: Any) -> None:
        arrays = {**make_digits(72), "id": np.arange(72, dtype=np.int32)}
        source = from_arrays(arrays, batch_size=16, shuffle_seed=3, repeat=True)
        dataset = strategy.distribute_dataset(source)
        super().__init__(strategy, CNN(nnx.Rngs(0)), optax.adam(1e-2), dataset)
        self.seen = jnp.full((64, 16), -1)

    def train_step(self, iterator: Any) -> None:
        batch, step = next(iterator), self.optimizer.step[...]
        super().train_step(iter([batch]))
        ids = self.strategy.run(lambda b: b["id"], (batch,))
        self.seen = self.seen.at[step].set(self.strategy.gather(ids, axis=0))


def uneven(strategy: Any, lengths: list[int]) -> dict[str, Any]:
    """Gives each process data of its own, of different length."""

    def make(batch_size: int, input_context: Any) -> Any:
        index = input_context.input_pipeline_id
        assert input_context.num_input_pipelines == len(lengths)
        numbers = 100 * index + np.arange(lengths[index], dtype=np.float32)
        size = input_context.get_per_replica_batch_size(batch_size)
        return from_arrays({"x": numbers}, batch_size=size)

    batch_size = 4 * strategy.num_replicas_in_sync
    counter = Counter(
        strategy,
        armillary.distribute.make_distributed_dataset(strategy, make, batch_size),
    )
    counted = [read_numbers(counter.evaluate(-1)) for _ in range(2)]
    drop = armillary.data.InputOptions(remainder="drop")
    dataset = armillary.distribute.make_distributed_dataset(
        strategy, make, batch_size, input_options=drop
    )
    trainer = Adder(strategy, dataset)
    trainer.train(1)
    state = dataset.get_state()
    for _ in range(3):
        trainer.train(50)
    position = [part["source"] for part in state["pipelines"]]
    again = armillary.distribute.make_distributed_dataset(
        strategy, make, batch_size, input_options=drop
    )
    again.set_state(state)
    resumed = Adder(strategy, again)
    resumed.train(50)
    batches = sum(1 for _ in again)
    return {
        "counted": counted,
        "steps": int(trainer.num_steps),
        "sum": float(trainer.total),
        "resumed": int(resumed.num_steps),
        "exhausted": trainer.data_exhausted,
        "pipelines": len(position),
        "batches": batches,
        "refused": catch(lambda: again.set_state({"pipelines": [{}, {}, {}]})),
    }


def double_and_add(x: Any) -> Any:
    """Returns a value that each replica has of its own, and one that all share."""
    return 2 * x, armillary.get_replica_context().all_reduce("sum", x.sum())


def odd(strategy: Any) -> dict[str, Any]:
    """Trains on batches of 10, 10 and 9 examples, which 4 replicas cannot share."""
    exact = armillary.data.InputOptions(remainder="exact")
    digits = from_arrays(make_digits(29), batch_size=10, shuffle_seed=3)
    trainer = Classifier(
        strategy,
        CNN(nnx.Rngs(0)),
        optax.sgd(0.1),
        strategy.distribute_dataset(digits, exact),
    )
    trainer.train(10)
    numbers = from_arrays({"x": np.arange(29, dtype=np.float32)}, batch_size=10)
    gathered, local, totals = [], [], []
    for batch in strategy.distribute_dataset(numbers, exact):
        doubled, total = strategy.run(double_and_add, args=(batch["x"],))
        gathered.append(np.asarray(strategy.gather(doubled, axis=0)).tolist())
        totals += [row.tolist() for row in local_rows(strategy, total)]
        local.append([row.tolist() for row in local_rows(strategy, doubled)])
    resident = armillary.data.InputOptions(remainder="exact", place_on_device=True)
    adder = Adder(strategy, strategy.distribute_dataset(numbers, resident))
    adder.train(10)
    own = strategy.distribute_datasets_from_function(lambda _: numbers, exact)
    return {
        "losses": np.asarray(trainer.losses[:3]).tolist(),
        "sums": [float(np.sum(value)) for value in read_state(trainer).values()],
        "gathered": gathered,
        "local": local,
        "totals": totals,
        "resident": [float(adder.total), int(adder.num_steps)],
        "refused": "" if strategy.peers.is_alone else catch(lambda: iter(own)),
    }


class Adder(armillary.StandardTrainer):
    """Adds up the examples of all replicas."""

    def __init__(self, strategy: Any, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, armillary.StandardTrainerOptions(**options))
        self.strategy = strategy
        self.num_steps = jnp.zeros((), jnp.int32)
        self.total = jnp.zeros(())
        self.scale = 1.0

    def train_step(self, iterator: Any) -> None:
        rows = self.strategy.run(lambda b: b["x"] * self.scale, (next(iterator),))
        self.total = self.total + self.strategy.reduce("sum", rows, axis=0)
        self.num_steps = self.num_steps + 1


def mismatches(strategy: Any) -> dict[str, Any]:
    """Does something else in the last process, and returns the message to it."""
    index = int(jax.process_index() == jax.process_count() - 1)
    numbers = np.arange(64, dtype=np.float32)

    def make_adder(data: Any) -> Adder:
        dataset = strategy.distribute_dataset(from_arrays({"x": data}, batch_size=8))
        return Adder(strategy, dataset)

    seed = make_trainer(strategy, seed=index)
    program = make_adder(numbers)
    program.scale = 1.0 + index
    batches = [{"x": rows} for rows in np.split(numbers, 8)[: 8 - index]]
    shorter = Adder(strategy, strategy.distribute_dataset(batches))
    # As after a shuffle without a seed.
    order = [{"x": rows} for rows in np.split(np.roll(numbers, index), 8)]
    shuffled = Adder(strategy, strategy.distribute_dataset(order))
    peeked = make_adder(numbers)
    if index:
        next(iter(peeked.train_dataset))
    own = jnp.full((2,), 1.0 + index)
    return {
        "seed": catch(lambda: seed.train(2)),
        "program": catch(lambda: program.train(2)),
        "run": catch(lambda: strategy.run(lambda: own * 3)),
        "argument": catch(lambda: strategy.run(jnp.square, args=(own,))),
        "gathered": catch(lambda: strategy.gather({"own": own}, axis=0)),
        "reduced": catch(lambda: strategy.reduce("mean", 1.0 + index)),
        "data": catch(lambda: shorter.train(20)),
        "shuffled": catch(lambda: shuffled.train(8)),
        "peeked": catch(lambda: peeked.train(2)),
        "again": catch(
            lambda: armillary.MultiWorkerMirroredStrategy(
                communication_options=armillary.cluster.CommunicationOptions(
                    timeout_seconds=5
                )
            )
        ),
        "equal": catch(lambda: make_adder(numbers).train(2)),
    }


def stop(strategy: Any) -> dict[str, Any]:
    """Asks for a stop in the last process, at step 6."""
    trainer = make_trainer(strategy)
    step = trainer.optimizer.step
    controller: Any = None

    def ask(output: Any) -> None:
        is_last = jax.process_index() == jax.process_count() - 1
        if int(step[...]) == 6 and is_last:
            controller.request_stop("enough")

    controller = armillary.Controller(
        trainer=trainer,
        global_step=step,
        strategy=strategy,
        steps_per_loop=3,
        train_actions=[ask],
    )
    controller.train(30)
    return {"step": int(step[...])}


def grouped(strategy: Any) -> dict[str, Any]:
    """Reduces over all devices, with one group for each process."""
    del strategy
    ops = armillary.distribute.HierarchicalCopyAllReduce()
    made = armillary.MultiWorkerMirroredStrategy(cross_device_ops=ops)

    def make(context: Any) -> Any:
        return np.arange(5, dtype=np.float32) + context.replica_id_in_sync_group

    def run(rows: Any) -> Any:
        return made.run(lambda row: armillary.all_reduce("sum", row), (rows,))

    rows = made.distribute_values_from_function(make)
    (total, *_) = local_rows(made, run(rows))
    program = str(jax.make_jaxpr(run)(rows))
    groups = re.findall(r"axis_index_groups=(\(\(.*?\)\))", program)
    return {"total": total.tolist(), "groups": groups}


def several(strategy: Any, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Runs scenarios one after the other, each with its options."""
    found = {name: find_scenario(name)(strategy, **parts[name]) for name in parts}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return found | {"may open all files": soft == hard}


def find_scenario(name: str) -> Callable[..., Any]:
    return {**globals(), "exports": exports, "saves": saves}[name]


def main() -> None:
    # Some scenarios catch the error of a process, which ends the others after a time.
    _lifeline._FAILURE_SECONDS = patience(5.0)
    scenario, result, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    strategy = None
    if scenario == "sharded":
        found = sharded(**options)
    else:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        strategy = armillary.MultiWorkerMirroredStrategy()
        sys.stderr.write("has joined\n")
        found = find_scenario(scenario)(strategy, **options)
    result.write_text(json.dumps(found))
    if strategy is not None and scenario == "preempted":
        strategy.peers.gather("the end", "")
        if not jax.process_index():
            # Process 1 would notice that the coordinator is gone.
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
