"""Tests of state that a user keeps in the memory of the host (`pinned_host`)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.data import from_arrays
from armillary.distribute.program._flat_state import FlatState
from armillary.state._lift import State
from tests.problems import make_strategy, read_state
from tests.tiers import slow_after_first

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(32, 8)).astype("float32")}
OPTIONS = {
    "in loops": {},
    "one by one": {"compile_loop": False},
    "checked": {"on_non_finite": "skip"},
    "eagerly": {"compile_step": False},
}


def to_host(array):
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


def offload(optimizer):
    """Moves the state of an optimizer to the memory of the host."""
    nnx.update(optimizer, jax.tree.map(to_host, nnx.state(optimizer)))


def find_kinds(root):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(nnx.state(root))}


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, **options):
        options = armillary.StandardTrainerOptions(**options)
        super().__init__(from_arrays(DATA, batch_size=16, repeat=True), options)
        self.strategy = strategy
        self.model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self):
        self.loss.reset()

    def train_step(self, iterator):
        def run(batch):
            def loss_fn(model):
                return jnp.mean((model(batch["x"]) - 1) ** 2)

            loss, gradients = nnx.value_and_grad(loss_fn)(self.model)
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)
            self.loss.update(loss=loss)

        self.strategy.run(run, args=(next(iterator),))

    def train_loop_end(self):
        return {"loss": self.loss.compute()}


def make_any_strategy(name):
    if name == "sharded":
        return armillary.ShardedStrategy({"data": 2, "fsdp": 4})
    if name == "default":
        return armillary.get_strategy()
    return make_strategy({"one": 1, "mirrored": 4}[name])


@slow_after_first("options", OPTIONS)
@pytest.mark.parametrize("name", ["default", "one", "mirrored", "sharded"])
def test_the_state_of_an_optimizer_stays_on_the_host(name, options):
    strategy = make_any_strategy(name)
    trainers = [Trainer(strategy, **OPTIONS[options]) for _ in range(2)]
    offload(trainers[0].optimizer)
    for _ in range(2):
        losses = [trainer.train(3)["loss"] for trainer in trainers]
        assert find_kinds(trainers[0].optimizer) == {"pinned_host"}
        assert find_kinds(trainers[0].model) == {"device"}
        np.testing.assert_allclose(*losses, rtol=1e-6)
    states = list(map(read_state, trainers))
    for path, array in states[1].items():
        np.testing.assert_allclose(states[0][path], array, rtol=1e-6, err_msg=path)


def test_divided_state_stays_divided_on_the_host():
    strategy = armillary.ShardedStrategy({"fsdp": 8})
    trainer = Trainer(strategy)
    trainer.train(1)
    offload(trainer.optimizer)
    trainer.train(2)
    for leaf in jax.tree.leaves(nnx.state(trainer.optimizer)):
        assert leaf.sharding.memory_kind == "pinned_host"
        assert leaf.sharding.mesh == strategy.mesh


def test_a_state_may_move_to_the_host_between_loops():
    trainer = Trainer(make_strategy(1))
    trainer.train(2)
    offload(trainer.optimizer)
    trainer.train(2)
    assert find_kinds(trainer.optimizer) == {"pinned_host"}
    # A new value from the device goes where the last one was.
    state = nnx.state(trainer.optimizer)
    new = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    nnx.update(trainer.optimizer, new)
    trainer.train(2)
    assert find_kinds(trainer.optimizer) == {"pinned_host"}


def test_parameters_on_the_host_are_evaluated():
    class Evaluator(armillary.StandardEvaluator):
        def __init__(self, model):
            super().__init__(from_arrays(DATA, batch_size=16))
            self.model = model
            self.mean = nnx.metrics.Average("mean")

        def eval_begin(self):
            self.mean.reset()

        def eval_step(self, iterator):
            self.mean.update(mean=self.model(next(iterator)["x"]))

        def eval_end(self, *state):
            del state
            return {"mean": self.mean.compute()}

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    wanted = Evaluator(model).evaluate(-1)["mean"]
    nnx.update(model, jax.tree.map(to_host, nnx.state(model)))
    found = Evaluator(model).evaluate(-1)["mean"]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert find_kinds(model) == {"pinned_host"}


def test_a_pure_step_keeps_its_optimizer_on_the_host():
    optimizer = optax.adam(0.1)
    params = jnp.ones((8, 8))

    def step(state, batch):
        params, opt_state = state
        gradients = jax.grad(lambda p: jnp.mean((batch["x"] @ p) ** 2))(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {}

    opt_state = jax.tree.map(to_host, optimizer.init(params))
    data = from_arrays(DATA, batch_size=16, repeat=True)
    trainer = armillary.StepTrainer(step, (params, opt_state), data)
    trainer.train(3)
    params, opt_state = trainer.state
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(opt_state)}
    assert kinds == {"pinned_host"}
    assert params.sharding.memory_kind == "device"


def test_a_function_takes_and_returns_variables_on_the_host():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(to_host, nnx.state(model)))

    @armillary.function
    def double():
        model.kernel[...] = model.kernel[...] * 2
        return model(DATA["x"])

    kernel = np.asarray(model.kernel[...])
    outputs = double()
    assert find_kinds(model) == {"pinned_host"}
    np.testing.assert_allclose(outputs, DATA["x"] @ (2 * kernel), rtol=1e-4, atol=1e-6)


def test_central_storage_keeps_its_own_place():
    strategy = armillary.CentralStorageStrategy(jax.devices()[:1])
    trainer = Trainer(strategy)
    offload(trainer.optimizer)
    trainer.train(2)
    flat = FlatState(State([(trainer, "")]), strategy)
    assert not flat.homes._on_host


@pytest.mark.parametrize("name", ["one", "sharded"])
def test_a_checkpoint_keeps_the_memory(tmp_path, name):
    strategy = make_any_strategy(name)
    trainer = Trainer(strategy)
    offload(trainer.optimizer)
    trainer.train(2)
    path = armillary.Checkpoint(trainer=trainer).write(tmp_path / "saved")
    again = Trainer(strategy)
    offload(again.optimizer)
    armillary.Checkpoint(trainer=again).read(path)
    assert find_kinds(again.optimizer) == {"pinned_host"}
    np.testing.assert_array_equal(again.model.kernel[...], trainer.model.kernel[...])
    trainer.train(2)
    again.train(2)
    np.testing.assert_array_equal(again.model.kernel[...], trainer.model.kernel[...])
    assert find_kinds(again.optimizer) == {"pinned_host"}
