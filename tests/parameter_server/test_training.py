"""Tests of trainers under a `ParameterServerStrategy`."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import armillary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))[:, 0]


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, dataset, **options):
        super().__init__(dataset, armillary.StandardTrainerOptions(**options))
        self.strategy = strategy
        self.model = Net(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.01), wrt=nnx.Param)
        self.loss = nnx.metrics.Average()
        self.num_loops = 0

    def train_loop_begin(self):
        self.loss.reset()

    def train_step(self, iterator):
        def replica(batch):
            def loss_fn(model):
                losses = (model(batch["x"]) - batch["y"]) ** 2
                return armillary.compute_average_loss(losses), losses

            gradient = nnx.value_and_grad(loss_fn, has_aux=True)
            (_, losses), gradients = gradient(self.model)
            gradients = armillary.all_reduce("sum", gradients)
            self.optimizer.update(self.model, gradients)
            self.loss.update(values=losses)

        self.strategy.run(replica, args=(next(iterator),))

    def train_loop_end(self):
        self.num_loops += 1
        return {"loss": self.loss.compute()}


def values_of(trainer):
    state = nnx.state((trainer.model, trainer.optimizer, trainer.loss))
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def make_controller(trainer, folder, interval, **options):
    step = trainer.optimizer.step
    return armillary.Controller(
        trainer=trainer,
        global_step=step,
        strategy=trainer.strategy,
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(model=trainer.model, optimizer=trainer.optimizer),
            folder,
            step_counter=step,
            checkpoint_interval=interval,
        ),
        steps_per_loop=interval,
        **options,
    )


def test_on_one_worker_it_equals_training_without_servers(alone, problem):
    def train(strategy):
        trainer = Trainer(strategy, problem.make_data(batch_size=16))
        with strategy.scope():
            outputs = [trainer.train(5)["loss"] for _ in range(3)]
        return outputs, values_of(trainer)

    losses, values = train(alone.strategy)
    expected_losses, expected = train(armillary.distribute.DefaultStrategy())
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert values.keys() == expected.keys()
    for path, value in values.items():
        np.testing.assert_allclose(value, expected[path], 1e-4, 1e-6, err_msg=path)


def test_a_controller_trains_saves_and_resumes(coordinator, problem, tmp_path):
    strategy = coordinator.strategy
    evaluated = []

    class Evaluator(armillary.StandardEvaluator):
        def __init__(self, trainer):
            super().__init__(problem.make_data(repeat=False, shuffle_seed=None))
            self.model = nnx.view(trainer.model, use_running_average=True)
            self.error = nnx.metrics.Average()

        def eval_begin(self):
            self.error.reset()

        def eval_step(self, iterator):
            batch = next(iterator)
            self.error.update(values=(self.model(batch["x"]) - batch["y"]) ** 2)

        def eval_end(self, *_):
            evaluated.append(float(self.error.compute()))
            return {"error": evaluated[-1]}

    def train(steps):
        dataset = strategy.distribute_datasets_from_function(
            lambda context: problem.make_data(shuffle_seed=context.input_pipeline_id)
        )
        trainer = Trainer(strategy, dataset)
        evaluator = Evaluator(trainer)
        controller = make_controller(trainer, tmp_path, 20, evaluator=evaluator)
        controller.train_and_evaluate(train_steps=steps, eval_interval=40)
        return trainer

    first = train(40)
    assert (first.num_loops, int(first.optimizer.step[...])) == (2, 40)
    second = train(160)
    assert (second.num_loops, int(second.optimizer.step[...])) == (6, 160)
    assert evaluated[-1] < evaluated[0] / 5
    assert (tmp_path / "checkpoint_160").exists()


def test_a_controller_continues_after_a_lost_server(
    coordinator, problem, kill, tmp_path
):
    """The loop that docs/advanced/parameter_server_cluster.md shows."""
    trainer = Trainer(coordinator.strategy, problem.make_data())
    lost = []

    def lose(output):
        if int(trainer.optimizer.step[...]) == 20 and not lost:
            lost.append(kill(coordinator._scheduler.servers[0]))

    step = trainer.optimizer.step
    controller = make_controller(trainer, tmp_path, 10, train_actions=[lose])
    reached = []
    while int(step[...]) < 40:
        try:
            controller.train(40)
        except armillary.errors.PSUnavailableError:
            controller.restore_checkpoint()
            reached.append(int(step[...]))
    assert reached == [20]
    assert (tmp_path / "checkpoint_40").exists()


class FailsOnce(Trainer):
    """A trainer whose step fails on the first worker that finds no file."""

    path = None

    def train_step(self, iterator):
        if not self.path.exists():
            self.path.touch()
            raise ArithmeticError("the first step")
        super().train_step(iterator)


def test_training_continues_after_an_error_in_a_step(coordinator, problem, tmp_path):
    trainer = FailsOnce(coordinator.strategy, problem.make_data())
    trainer.path = tmp_path / "flag"
    controller = make_controller(trainer, tmp_path / "run", 10)
    with pytest.raises(ArithmeticError, match="the first step"):
        controller.train(20)
    controller.train(20)
    assert int(trainer.optimizer.step[...]) == 20


def test_training_continues_after_an_interrupt(
    coordinator, problem, tmp_path, monkeypatch
):
    trainer = Trainer(coordinator.strategy, problem.make_data())
    controller = make_controller(trainer, tmp_path, 10)
    join = coordinator.join
    interrupts = [KeyboardInterrupt]

    def join_later():
        if interrupts:
            raise interrupts.pop()
        join()

    monkeypatch.setattr(coordinator, "join", join_later)
    with pytest.raises(KeyboardInterrupt):
        controller.train(20)
    assert coordinator.done()
    controller.train(20)
    assert int(trainer.optimizer.step[...]) == 20


def test_batches_of_a_source_are_dealt_to_workers(coordinator, problem):
    """Two workers take five batches each; then the data has ended."""
    data = problem.make_data(repeat=False)
    trainer = Trainer(coordinator.strategy, data)
    output = trainer.train(100)
    assert output["staleness"]["max"] >= output["staleness"]["mean"] >= 0
    assert trainer.data_exhausted
    assert 4 <= int(trainer.optimizer.step[...]) <= 8
    with pytest.raises(ValueError, match="`epochs` is 2, but workers of a `Param"):
        trainer.begin_epoch(2)


def test_a_trainer_starts_workers_again_after_shutdown(make_coordinator, problem):
    coordinator = make_coordinator(num_workers=1, num_ps=1)
    trainer = Trainer(coordinator.strategy, problem.make_data())
    trainer.train(2)
    coordinator.shutdown()
    trainer.train(2)
    assert int(trainer.optimizer.step[...]) == 4
    coordinator.strategy.coordinator.shutdown()
