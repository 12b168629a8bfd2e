"""Tests of strategies whose axis has the name that a model uses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import armillary
from armillary.distribute import (
    CentralStorageStrategy,
    HierarchicalCopyAllReduce,
    ReductionToOneDevice,
)
from armillary.parameter_server._tasks import WorkerStrategy
from tests.distribute.contract import TPUOnCPU
from tests.tiers import slow_after_first

ROWS = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
MAKERS = {
    "one device": lambda name: armillary.OneDeviceStrategy("cpu:1", axis_name=name),
    "mirrored 1": lambda name: armillary.MirroredStrategy(
        jax.devices()[:1], axis_name=name
    ),
    "mirrored": lambda name: armillary.MirroredStrategy(
        jax.devices()[:4], axis_name=name
    ),
    "central": lambda name: CentralStorageStrategy(jax.devices()[:2], axis_name=name),
    "multi worker": lambda name: armillary.MultiWorkerMirroredStrategy(axis_name=name),
    "tpu": lambda name: TPUOnCPU(axis_name=name),
    "sharded": lambda name: armillary.ShardedStrategy(
        {"data": 2, "fsdp": 4}, axis_name=name
    ),
    "worker": lambda name: WorkerStrategy(0, 1, name),
}


class Model(linen.Module):
    """A model of another library, which names the axis itself."""

    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False, axis_name="batch")(x)
        return linen.Dense(1)(x)


def train(strategy, num_steps=3):
    """Trains a model that names the axis, with a key, a metric and one reduction."""
    model = Model()
    variables = model.init(jax.random.key(0), ROWS)

    def step(state, batch):
        def loss_fn(params):
            statistics = {"batch_stats": state["batch_stats"]}
            outputs, new = model.apply(
                {"params": params, **statistics}, batch, mutable=["batch_stats"]
            )
            return jnp.mean((outputs - 1) ** 2), new

        (loss, new), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            state["params"]
        )
        gradients = jax.lax.pmean(gradients, "batch")
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
        number = jax.lax.axis_index("batch")
        return {"params": params, **new}, {"loss": loss, "number": number}

    source = armillary.data.from_arrays(ROWS, batch_size=16, repeat=True)
    trainer = armillary.StepTrainer(step, variables, source, strategy=strategy)
    metrics = trainer.train(num_steps)
    return trainer.state, metrics


def check_like_one_device(strategy):
    expected, _ = train(armillary.OneDeviceStrategy("cpu:0", axis_name="batch"))

    found, metrics = train(strategy)

    for path, value in jax.tree.leaves_with_path(expected):
        other = dict(jax.tree.leaves_with_path(found))[path]
        np.testing.assert_allclose(other, value, atol=1e-5, err_msg=str(path))
    numbers = np.arange(strategy.num_replicas_in_sync)
    assert float(metrics["number"]) == numbers.mean()


def test_a_model_that_names_the_axis_trains_on_replicas():
    check_like_one_device(MAKERS["mirrored"]("batch"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "mirrored"])
def test_a_model_that_names_the_axis_trains_under_every_strategy(kind):
    check_like_one_device(MAKERS[kind]("batch"))


@slow_after_first("kind", MAKERS)
def test_everything_in_run_is_over_the_named_axis(kind):
    strategy = MAKERS[kind]("batch")
    total = nnx.metrics.Average("loss")
    statistic = nnx.BatchStat(jnp.zeros(()))
    rngs = nnx.Rngs(0)
    model = nnx.Linear(3, 1, rngs=rngs)

    def step_fn(batch):
        context = armillary.get_replica_context()
        total.update(loss=batch[:, 0])
        statistic[...] = jnp.mean(batch)
        drawn = jax.random.uniform(rngs())

        def loss_fn(model, batch):
            return jnp.mean(model(batch) ** 2)

        whole = armillary.over_replicas(loss_fn)
        return {
            "gradient": nnx.grad(whole)(model, batch),
            "sum": armillary.all_reduce("sum", jnp.sum(batch)),
            "psum": jax.lax.psum(jnp.sum(batch), "batch"),
            "rows": jnp.sum(context.all_gather(batch, axis=0)),
            "drawn": context.all_gather(drawn[None], axis=0),
        }

    (batch,) = strategy.distribute_dataset([ROWS])
    found = armillary.function(strategy.run, strategy=strategy)(step_fn, (batch,))

    expected = nnx.grad(lambda model: jnp.mean(model(ROWS) ** 2))(model)
    for name in ("kernel", "bias"):
        (gradient, *_) = strategy.local_results(found["gradient"][name].get_value())
        np.testing.assert_allclose(gradient, expected[name][...], rtol=1e-5)
    for name in ("sum", "psum", "rows"):
        value = float(strategy.reduce("mean", found[name]))
        assert value == pytest.approx(float(ROWS.sum()), rel=1e-5)
    drawn = np.ravel(strategy.local_results(found["drawn"])[0])
    assert len(set(drawn.tolist())) == strategy.num_replicas_in_sync
    assert float(total.compute()) == pytest.approx(float(ROWS[:, 0].mean()), rel=1e-5)
    assert float(statistic[...]) == pytest.approx(float(ROWS.mean()), rel=1e-5)


@pytest.mark.parametrize(
    "ops", [ReductionToOneDevice(), HierarchicalCopyAllReduce(1, 2)]
)
def test_cross_device_operations_are_over_the_named_axis(ops):
    strategy = armillary.MirroredStrategy(jax.devices()[:4], ops, axis_name="batch")
    (batch,) = strategy.distribute_dataset([ROWS])

    total = strategy.run(lambda x: armillary.all_reduce("sum", jnp.sum(x)), (batch,))

    value = float(strategy.reduce("mean", total))
    assert value == pytest.approx(float(ROWS.sum()), rel=1e-5)


def test_an_uneven_batch_runs_over_the_named_axis():
    for name in ("batch", "copy"):
        strategy = armillary.MirroredStrategy(jax.devices()[:4], axis_name=name)
        options = armillary.data.InputOptions(remainder="exact")
        (batch,) = strategy.distribute_dataset([ROWS[:6]], options)

        total = strategy.run(lambda x, n=name: jax.lax.psum(jnp.sum(x), n), (batch,))

        value = float(strategy.reduce("mean", total))
        assert value == pytest.approx(float(ROWS[:6].sum()), rel=1e-5)


def test_copies_are_compared_over_the_named_axis():
    options = armillary.StandardTrainerOptions(
        check_replicas_every=1, on_non_finite="raise"
    )

    class Trainer(armillary.StandardTrainer):
        def __init__(self, strategy):
            source = armillary.data.from_arrays(ROWS, batch_size=16, repeat=True)
            super().__init__(strategy.distribute_dataset(source), options)
            self.strategy, self.total = strategy, jnp.zeros(())

        def train_step(self, iterator):
            def step_fn(batch):
                self.total = self.total + jax.lax.psum(jnp.sum(batch), "batch")

            self.strategy.run(step_fn, args=(next(iterator),))

    trainer = Trainer(MAKERS["mirrored"]("batch"))
    trainer.train(2)

    assert float(trainer.total) == pytest.approx(2 * float(ROWS.sum()), rel=1e-5)


def test_a_plan_counts_replicas_on_the_named_axis():
    def step(state, batch):
        return state + jax.lax.psum(jnp.sum(batch), "batch"), {}

    source = armillary.data.from_arrays(ROWS, batch_size=16, repeat=True)
    strategy = MAKERS["mirrored"]("batch")
    trainer = armillary.StepTrainer(step, jnp.zeros(()), source, strategy=strategy)

    planned = armillary.plan.plan(trainer, 8, abstract=True)

    assert planned.mesh == {"batch": 8}
    assert planned.num_replicas == 8
    assert not planned.is_divided


@pytest.mark.parametrize("kind", ["default", "one device", "mirrored", "sharded"])
def test_an_unknown_axis_is_explained(kind):
    default = armillary.distribute.DefaultStrategy()
    strategy = default if kind == "default" else MAKERS[kind]("replica")
    named = "MirroredStrategy" if kind == "default" else type(strategy).__name__

    def step(state, batch):
        return state + jax.lax.psum(jnp.sum(batch), "batch"), {}

    source = armillary.data.from_arrays(ROWS, batch_size=16, repeat=True)
    trainer = armillary.StepTrainer(step, jnp.zeros(()), source, strategy=strategy)
    with pytest.raises(NameError, match="batch") as caught:
        trainer.train(1)

    (note,) = [note for note in caught.value.__notes__ if "axis of replicas" in note]
    assert f"is called 'replica' under {strategy!r}" in note
    assert f'{named}(axis_name="batch")' in note


def test_an_axis_outside_of_run_is_explained():
    class Trainer(armillary.StandardTrainer):
        def __init__(self, strategy):
            super().__init__(strategy.distribute_dataset([ROWS]))
            self.strategy = strategy

        def train_step(self, iterator):
            jax.lax.psum(jnp.ones(()), "batch")

    with pytest.raises(NameError) as caught:
        Trainer(MAKERS["mirrored"]("batch")).train(1)

    assert "exists only inside `strategy.run`" in caught.value.__notes__[0]


@pytest.mark.parametrize("call", ["all_reduce", "all_gather"])
def test_an_axis_of_the_same_name_is_an_error(call):
    strategy = MAKERS["mirrored"]("batch")
    (batch,) = strategy.distribute_dataset([np.ones((12, 3), np.float32)])

    def reduce(row):
        context = armillary.get_replica_context()
        if call == "all_reduce":
            return context.all_reduce("sum", row)
        return context.all_gather(row, axis=0)

    def step_fn(batch):
        return jax.vmap(reduce, axis_name="batch")(batch)

    message = f"`{call}` was called where 'batch' is an axis of size 3.*4 replicas"
    with pytest.raises(armillary.errors.ReplicaContextError, match=message):
        strategy.run(step_fn, (batch,))


def make_mesh_of_the_step():
    kinds = (jax.sharding.AxisType.Auto,)
    devices = jax.devices()[:4]
    return jax.make_mesh((4,), ("batch",), devices=devices, axis_types=kinds)


def sum_over(mesh, rows):
    """Returns a sum over rows that divides them over a mesh with an axis `batch`."""
    spec = jax.sharding.PartitionSpec

    def total(rows):
        return jax.lax.psum(jnp.sum(rows, axis=0), "batch")

    mapped = jax.shard_map(total, mesh=mesh, in_specs=spec("batch"), out_specs=spec())
    return mapped(rows)


@pytest.fixture
def divided():
    """Returns a function that sums over a mesh of the step."""
    mesh = make_mesh_of_the_step()

    def call(rows):
        # In the step, the mesh of the strategy is set.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return sum_over(mesh, rows)

    return call


def test_another_mesh_in_a_step_has_a_note():
    mesh = make_mesh_of_the_step()
    strategy = armillary.ShardedStrategy({"data": 4}, devices=jax.devices()[:4])
    (batch,) = strategy.distribute_dataset([ROWS])
    with pytest.raises(ValueError, match="should match the mesh") as caught:
        strategy.run(lambda rows: sum_over(mesh, rows), (batch,))
    notes = "\n".join(caught.value.__notes__)
    assert "`armillary.ShardedStrategy(mesh)`" in notes
    assert "use_abstract_mesh(mesh.abstract_mesh)" in notes


def test_a_mesh_of_the_step_may_have_an_axis_of_the_same_name(divided):
    strategy = armillary.ShardedStrategy(
        {"data": 4}, devices=jax.devices()[:4], axis_name="batch"
    )
    (batch,) = strategy.distribute_dataset([ROWS])

    found = strategy.run(divided, (batch,))

    np.testing.assert_allclose(found, ROWS.sum(axis=0), rtol=1e-5)


def test_a_name_for_two_axes_of_a_step_is_an_error(divided):
    strategy = armillary.ShardedStrategy(
        {"data": 4}, devices=jax.devices()[:4], axis_name="batch"
    )
    (batch,) = strategy.distribute_dataset([ROWS])

    def step_fn(batch):
        return divided(batch), jax.lax.psum(batch, "batch")

    message = "`shard_map` at .*over an axis 'batch' of its mesh.*uses it at .*step_fn"
    with pytest.raises(armillary.errors.ReplicaContextError, match=message):
        strategy.run(step_fn, (batch,))


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "worker"])
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (3, TypeError, "`axis_name` is 3 of type int.*one name, a string"),
        (("a", "b"), TypeError, r"`axis_name` is \('a', 'b'\) of type tuple"),
        (None, TypeError, "`axis_name` is None of type NoneType"),
        ("", ValueError, "`axis_name` is '', but the axis of replicas needs a name"),
        (" ", ValueError, "`axis_name` is ' ', but the axis of replicas needs a name"),
    ],
)
def test_a_name_that_is_none_is_refused(kind, name, error, message):
    with pytest.raises(error, match=message):
        MAKERS[kind](name)


def test_an_axis_of_the_mesh_is_refused():
    message = "`axis_name` is 'fsdp'.*'data', 'fsdp', 'tensor'.*`axis_name=\"batch\"`"
    with pytest.raises(ValueError, match=message):
        MAKERS["sharded"]("fsdp")


def test_a_server_strategy_takes_the_name():
    strategy = armillary.ParameterServerStrategy(axis_name="batch")

    assert strategy.axis_name == "batch"
    assert float(strategy.run(lambda: jax.lax.psum(1.0, "batch"))) == 1
    with pytest.raises(TypeError, match="`axis_name` is 3"):
        armillary.ParameterServerStrategy(axis_name=3)
    with pytest.raises(ValueError, match="`axis_name` is ''"):
        armillary.ParameterServerStrategy(axis_name="")
