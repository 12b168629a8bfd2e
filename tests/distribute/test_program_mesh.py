"""Tests of programs that set a mesh or other settings of JAX themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import armillary
from armillary.distribute import CentralStorageStrategy
from tests.tiers import slow_after_first

ROWS = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
MAKERS = {
    "mirrored": lambda: armillary.MirroredStrategy(jax.devices()[:4]),
    "one device": lambda: armillary.OneDeviceStrategy("cpu:1"),
    "sharded": lambda: armillary.ShardedStrategy(
        {"data": 2, "fsdp": 2}, devices=jax.devices()[4:]
    ),
    "central": lambda: CentralStorageStrategy(jax.devices()[:2]),
    "multi worker": lambda: armillary.MultiWorkerMirroredStrategy(),
}


def make_mesh(kind, count=4):
    names = ("data", "model")[: 2 if count > 1 else 1]
    shape = (2, count // 2) if count > 1 else (1,)
    kinds = (kind,) * len(names)
    return jax.make_mesh(shape, names, devices=jax.devices()[:count], axis_types=kinds)


class Trainer(armillary.StandardTrainer, armillary.StandardEvaluator):
    def __init__(self, strategy):
        options = armillary.data.InputOptions(remainder="exact")
        source = armillary.data.from_arrays(ROWS, batch_size=8)
        armillary.StandardTrainer.__init__(
            self, strategy.distribute_dataset(source, options)
        )
        armillary.StandardEvaluator.__init__(self, strategy.distribute_dataset(source))
        self.strategy = strategy
        self.model = nnx.Linear(3, 512, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.01), wrt=nnx.Param)
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self):
        self.loss.reset()

    def losses(self, model, batch):
        return jnp.mean((model(batch) - 1) ** 2, axis=1)

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(model):
                losses = self.losses(model, batch)
                return jnp.mean(losses), losses

            gradients, losses = nnx.grad(loss_fn, has_aux=True)(self.model)
            self.optimizer.update(self.model, armillary.all_reduce("mean", gradients))
            self.loss.update(loss=losses)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self):
        return {"loss": self.loss.compute()}

    def eval_begin(self):
        self.loss.reset()

    def eval_step(self, iterator):
        def step_fn(batch):
            self.loss.update(loss=self.losses(self.model, batch))

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self, *state):
        assert state == ()
        return {"loss": self.loss.compute()}


def train(strategy, directory):
    """Trains, evaluates, saves and restores; returns numbers that tell what it did."""
    for num_steps in (2, 3):
        trainer = Trainer(strategy)
        manager = armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer), str(directory)
        )
        controller = armillary.Controller(
            trainer=trainer,
            evaluator=trainer,
            global_step=trainer.optimizer.step,
            strategy=strategy,
            steps_per_loop=1,
            checkpoint_manager=manager,
        )
        controller.train(num_steps)
    evaluated = controller.evaluate()
    (predicted, *_) = armillary.predict(trainer.model, [ROWS], strategy=strategy)
    kernel = np.asarray(trainer.model.kernel[...])
    return kernel, float(evaluated["loss"]), predicted


def own_loop(strategy):
    """Runs the calls of a loop without a trainer."""
    weights = nnx.Param(jnp.ones(3))
    options = armillary.data.InputOptions(place_on_device=True)

    def step_fn(batch):
        gradient = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights[...])
        gradient = armillary.all_reduce("mean", gradient)
        weights[...] = weights[...] - 0.1 * gradient
        return jnp.sum(batch, axis=1)

    @armillary.function
    def train_step(batch):
        return strategy.run(step_fn, args=(batch,))

    with strategy.scope():
        source = armillary.data.from_arrays(ROWS[:16], batch_size=8)
        (first, second) = strategy.distribute_dataset(source, options)
        strategy.run(step_fn, args=(first,))
        sums = train_step(second)
    return (
        np.asarray(weights[...]),
        np.asarray(strategy.gather(sums, axis=0)),
        np.asarray(strategy.reduce("mean", sums, axis=0)),
        np.concatenate([np.asarray(x) for x in strategy.local_results(sums)]),
    )


@pytest.mark.slow
@slow_after_first("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@slow_after_first("strategy", MAKERS)
def test_training_in_a_mesh_of_the_program_is_as_without(strategy, kind, tmp_path):
    expected = train(MAKERS[strategy](), tmp_path / "without")

    with jax.set_mesh(make_mesh(kind)):
        found = train(MAKERS[strategy](), tmp_path / "within")
        still_set = jax.sharding.get_abstract_mesh().axis_names

    assert still_set == ("data", "model")
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6)


@slow_after_first("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@slow_after_first("strategy", MAKERS)
def test_a_loop_in_a_mesh_of_the_program_is_as_without(strategy, kind):
    expected = own_loop(MAKERS[strategy]())

    with jax.set_mesh(make_mesh(kind)):
        found = own_loop(MAKERS[strategy]())

    for value, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_a_mesh_of_other_devices_is_left(count):
    expected = own_loop(MAKERS["mirrored"]())

    with jax.set_mesh(make_mesh(AxisType.Auto, count)):
        found = own_loop(MAKERS["mirrored"]())

    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)


def test_the_mesh_of_a_sharded_strategy_holds_in_its_steps():
    strategy = armillary.ShardedStrategy({"data": 2, "fsdp": 4})

    def step_fn(batch):
        return jax.lax.with_sharding_constraint(batch, PartitionSpec("data"))

    with jax.set_mesh(strategy.mesh):
        result = armillary.function(strategy.run, strategy=strategy)(
            step_fn, (jnp.ones((8, 3)),)
        )

    assert result.sharding.spec[0] == "data"


def test_the_default_strategy_leaves_the_mesh_of_the_program():
    mesh = make_mesh(AxisType.Explicit)

    @armillary.function
    def double(x):
        return jax.reshard(2 * x, PartitionSpec("data"))

    with jax.set_mesh(mesh):
        found = double(jnp.ones((4, 2)))

    assert found.sharding.spec[0] == "data"


def test_a_model_with_annotations_trains_on_replicas():
    """Flax' guides make such a model within the mesh of the program."""
    strategy = MAKERS["mirrored"]()
    (batch,) = strategy.distribute_dataset([ROWS[:8]])

    with jax.set_mesh(make_mesh(AxisType.Auto)):
        kernel = nnx.Param(jnp.ones((3, 2)), out_sharding=(None, "model"))

        def step_fn(batch):
            gradient = jax.grad(lambda k: jnp.mean((batch @ k) ** 2))(kernel[...])
            kernel[...] = kernel[...] - armillary.all_reduce("mean", gradient)

        strategy.run(step_fn, args=(batch,))

    expected = 1 - jax.grad(lambda k: jnp.mean((ROWS[:8] @ k) ** 2))(jnp.ones((3, 2)))
    np.testing.assert_allclose(kernel[...], expected, rtol=1e-5)


def make_step_trainer(strategy, traced):
    def step(state, batch):
        traced(jax.config.jax_default_matmul_precision)
        total = armillary.all_reduce("sum", jnp.sum(batch @ state, axis=0))
        return state, {"total": jnp.sum(total)}

    source = armillary.data.from_arrays(ROWS[:16], batch_size=8, repeat=True)
    return armillary.StepTrainer(step, jnp.ones((3, 3)), source, strategy=strategy)


@pytest.fixture
def noted(monkeypatch):
    """Returns the precisions that steps were traced with, and how to note one."""
    found = []
    monkeypatch.setattr(jax.config, "note_precision", found.append, raising=False)
    return found


@slow_after_first("strategy", ["mirrored", "one device", "sharded"])
def test_a_precision_reaches_into_the_step_of_a_trainer(strategy, noted):
    trainer = make_step_trainer(MAKERS[strategy](), jax.config.note_precision)

    with jax.default_matmul_precision("highest"):
        trainer.train(1)
    assert noted[-1] == "highest"
    trainer.train(1)
    assert noted[-1] is None
    count = len(noted)
    trainer.train(1)
    assert len(noted) == count


@pytest.mark.parametrize("strategy", ["mirrored", "one device", "sharded"])
def test_a_precision_reaches_into_a_function(strategy, noted):
    @armillary.function(strategy=MAKERS[strategy]())
    def product(x):
        jax.config.note_precision(jax.config.jax_default_matmul_precision)
        return x @ x

    for precision in ("highest", None, "highest", None):
        with jax.default_matmul_precision(precision):
            product(jnp.ones((2, 2)))

    assert noted == ["highest", None]


def test_a_default_device_does_not_move_a_step():
    trainer = make_step_trainer(MAKERS["mirrored"](), lambda _: None)

    with jax.default_device(jax.devices()[7]):
        trainer.train(2)

    assert trainer.state.sharding.device_set == set(jax.devices()[:4])


@slow_after_first("strategy", ["mirrored", "one device", "sharded"])
def test_a_guard_of_transfers_does_not_stop_a_loop(strategy):
    class Counting(armillary.StandardTrainer):
        def __init__(self, strategy):
            source = armillary.data.from_arrays(ROWS[:16], batch_size=8, repeat=True)
            super().__init__(strategy.distribute_dataset(source))
            self.strategy, self.total = strategy, jnp.zeros(())

        def train_step(self, iterator):
            def step_fn(batch):
                total = armillary.all_reduce("sum", jnp.sum(batch))
                self.total = self.total + total

            self.strategy.run(step_fn, args=(next(iterator),))

    trainer = Counting(MAKERS[strategy]())
    with jax.transfer_guard("disallow"):
        trainer.train(4)

    assert float(trainer.total) == pytest.approx(2 * float(ROWS[:16].sum()), rel=1e-4)
