"""Trains the network of `digits.py` asynchronously, on parameter servers.

The trainer and the evaluator are from `digits.py`; only the strategy differs. On one
machine, Ray starts workers and servers for as long as the program runs:

    python examples/parameter_server.py --workers 2 --servers 1

It needs the extra `ray`. It prints the accuracy on the test images, about 99%.

On several machines, start this program for each task of a cluster, with a `TF_CONFIG`
that has the addresses of one `chief`, of `worker` and of `ps`.
"""

import argparse
import os
from pathlib import Path

import optax
from flax import nnx

import armillary
from armillary.distribute.coordinator import Server
from armillary.distribute.partitioners import MinSizePartitioner
from digits import CNN, Evaluator, Trainer, load_data

BATCH_SIZE = 64


def make_strategy(options: argparse.Namespace) -> armillary.ParameterServerStrategy:
    """Returns the strategy, on the cluster of `TF_CONFIG` or on this machine."""
    partitioner = MinSizePartitioner(min_shard_bytes=32 << 10, max_shards=4)
    if "TF_CONFIG" not in os.environ:
        return armillary.ParameterServerStrategy(
            num_workers=options.workers,
            num_ps=options.servers,
            variable_partitioner=partitioner,
        )
    resolver = armillary.cluster.TFConfigClusterResolver()
    if resolver.task_type in {"worker", "ps"}:
        Server(resolver).join()
        raise SystemExit
    return armillary.ParameterServerStrategy(resolver, variable_partitioner=partitioner)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a CNN on parameter servers.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/parameter_server"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    options = parser.parse_args()

    strategy = make_strategy(options)
    train, test = load_data()
    train_data = armillary.data.from_arrays(
        train, batch_size=BATCH_SIZE, shuffle_seed=0, repeat=True
    )
    test_data = armillary.data.from_arrays(test, batch_size=BATCH_SIZE)
    with strategy.scope():
        model = CNN(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    trainer = Trainer(
        strategy.distribute_dataset(train_data), strategy, model, optimizer
    )
    evaluator = Evaluator(strategy.distribute_dataset(test_data), strategy, model)

    manager = armillary.CheckpointManager(
        armillary.Checkpoint(model=model, optimizer=optimizer),
        options.run_dir / "checkpoints",
        step_counter=optimizer.step,
        checkpoint_interval=200,
    )
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=evaluator,
        global_step=optimizer.step,
        steps_per_loop=100,
        checkpoint_manager=manager,
        summary_dir=options.run_dir,
        strategy=strategy,
    )
    result = controller.train_and_evaluate(options.steps, eval_interval=500)
    print(f"Test accuracy {result['accuracy']:.2%}")


if __name__ == "__main__":
    main()
