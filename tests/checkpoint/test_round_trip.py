"""What was saved comes back: bits, kinds of objects, devices and memory."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import armillary
from armillary.checkpoint import Checkpoint, CheckpointManager

MakeManager = Callable[..., CheckpointManager]


class Position:
    def __init__(self) -> None:
        self.index = 0

    def get_state(self) -> dict[str, int]:
        return {"index": self.index}

    def set_state(self, state: dict[str, int]) -> None:
        self.index = state["index"]


def as_numpy(value: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        assert actual[path].dtype == value.dtype, path
        np.testing.assert_array_equal(
            as_numpy(actual[path]), as_numpy(value), err_msg=path
        )


class Run:
    """A model, its optimizer, a metric and random state, as a program has them."""

    def __init__(self, seed: int) -> None:
        self.rngs = nnx.Rngs(seed, dropout=seed + 1)
        self.model = nnx.Sequential(
            nnx.Linear(4, 8, rngs=self.rngs),
            nnx.Dropout(0.5, rngs=self.rngs),
            nnx.Linear(8, 1, rngs=self.rngs),
        )
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)
        self.metric = nnx.metrics.Average("loss")
        self.data = Position()
        self.checkpoint = Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            metric=self.metric,
            rngs=self.rngs,
            data=self.data,
        )

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            x = jnp.full((2, 4), float(self.data.index % 3) + 1)
            loss, grads = nnx.value_and_grad(lambda model, x=x: model(x).sum() ** 2)(
                self.model
            )
            grads = armillary.all_reduce("sum", grads)
            self.optimizer.update(self.model, grads)
            self.metric.update(loss=loss)
            self.data.index += 1


@pytest.mark.slow
def test_a_restored_run_goes_on_bit_by_bit(make_manager: MakeManager) -> None:
    run = Run(seed=0)
    manager = make_manager(run.checkpoint, step_counter=run.optimizer.step)
    run.train(2)
    path = manager.save()
    run.train(2)
    manager.sync()

    other = Run(seed=7)
    restored = make_manager(other.checkpoint).restore_or_initialize()
    other.train(2)

    assert restored == path
    assert path is not None
    assert Path(path).name == "checkpoint_2"
    assert other.data.index == 4
    expected = run.checkpoint.read_leaves()
    assert any("key" in path for path in expected)
    assert_same(other.checkpoint.read_leaves(), expected)


def test_every_dtype_and_kind_of_object_round_trips(make_manager: MakeManager) -> None:
    def build(scale: int) -> SimpleNamespace:
        params = {"w": jnp.full((2, 3), scale), "b": jnp.full(3, scale, jnp.bfloat16)}
        return SimpleNamespace(
            params=params,
            opt_state=optax.adam(0.1).init(params),
            flags=[jnp.asarray(scale > 1), jnp.asarray(scale, jnp.int8)],
            half=jnp.asarray([scale, -scale], jnp.float16),
            complex=jnp.asarray(scale * 1j, jnp.complex64),
            key=jax.random.key(scale),
            keys=jax.random.split(jax.random.key(scale, impl="rbg"), 2),
            empty=jnp.zeros((0, scale * 0 + 3)),
            legacy=jax.random.PRNGKey(scale),
            host=nnx.Variable(np.full(2, scale, np.float64)),
            number=nnx.Variable(scale),
        )

    saved, target = build(5), build(1)
    manager = make_manager(Checkpoint(state=saved))
    manager.save(1)
    manager.sync()
    make_manager(Checkpoint(state=target)).restore_or_initialize()

    expected = Checkpoint(state=saved).read_leaves()
    actual = Checkpoint(state=target).read_leaves()
    assert actual["state/number"] == 5
    del expected["state/number"], actual["state/number"]
    assert_same(actual, expected)


@pytest.mark.slow
def test_equinox_modules_round_trip(make_manager: MakeManager) -> None:
    eqx = pytest.importorskip(
        "equinox", reason="This test needs Equinox: pip install equinox."
    )
    models = [eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(seed)) for seed in range(4)]
    saved, target = (
        {"run": SimpleNamespace(model=one), "held": {"model": other}}
        for one, other in (models[:2], models[2:])
    )
    manager = make_manager(Checkpoint(**saved))
    manager.save(1)
    manager.sync()
    make_manager(Checkpoint(**target)).restore_or_initialize()

    for one, other in (
        (models[0], target["run"].model),
        (models[1], target["held"]["model"]),
    ):
        np.testing.assert_array_equal(one(jnp.arange(2.0)), other(jnp.arange(2.0)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layers:
    kernels: Any
    scale: Any


def test_a_registered_object_is_saved_once_and_restored(
    make_manager: MakeManager,
) -> None:
    def build(value: float) -> Layers:
        kernel = jnp.full(2, value)
        return Layers([{"w": kernel}, Layers((kernel + 1,), kernel)], kernel + 2)

    saved, target = build(1.0), build(5.0)
    manager = make_manager(Checkpoint(model=saved))
    assert sorted(manager.checkpoint.read_leaves()) == [
        "model/kernels/0/w",
        "model/kernels/1/kernels/0",
        "model/kernels/1/scale",
        "model/scale",
    ]
    manager.save(1)
    manager.sync()
    make_manager(Checkpoint(model=target)).restore_or_initialize()
    jax.tree.map(np.testing.assert_array_equal, target, saved)


def on_devices(count: int, kind: str = "device") -> NamedSharding:
    devices = np.asarray(jax.devices()[:count])
    return NamedSharding(
        jax.sharding.Mesh(devices, ("r",)), PartitionSpec("r"), memory_kind=kind
    )


@pytest.mark.parametrize(("saved_on", "restored_on"), [(4, 1), (1, 8), (4, 8), (8, 4)])
def test_arrays_move_to_the_devices_of_the_program(
    make_manager: MakeManager, saved_on: int, restored_on: int
) -> None:
    def build(count: int, value: float) -> SimpleNamespace:
        sharded = on_devices(count)
        replicated = NamedSharding(sharded.mesh, PartitionSpec())
        keys = jax.random.split(jax.random.key(int(value)), 8)
        return SimpleNamespace(
            sharded=jax.device_put(jnp.full((8, 3), value), sharded),
            replicated=jax.device_put(jnp.full((8, 3), value), replicated),
            keys=jax.device_put(keys, sharded),
        )

    saved, target = build(saved_on, 5.0), build(restored_on, 0.0)
    shardings = {name: leaf.sharding for name, leaf in vars(target).items()}
    manager = make_manager(Checkpoint(state=saved))
    manager.save(1)
    manager.sync()
    make_manager(Checkpoint(state=target)).restore_or_initialize()

    assert {name: leaf.sharding for name, leaf in vars(target).items()} == shardings
    assert_same(vars(target), vars(saved))


def test_memory_kinds_are_kept(make_manager: MakeManager) -> None:
    holder = SimpleNamespace(
        array=jax.device_put(jnp.ones((4, 2)), on_devices(4, "pinned_host"))
    )
    manager = make_manager(Checkpoint(holder=holder))
    manager.save(1)
    manager.restore_or_initialize()

    assert holder.array.sharding.memory_kind == "pinned_host"


def test_objects_stay_the_same_and_nothing_is_traced_again(
    make_manager: MakeManager, no_retrace: Callable[[], Any]
) -> None:
    variable = nnx.Variable(jnp.ones(3))
    holder = SimpleNamespace(variable=variable)
    manager = make_manager(Checkpoint(holder=holder))
    step = jax.jit(lambda x: x + 1)
    variable.set_value(step(variable.get_value()))
    manager.save(1)
    manager.restore_or_initialize()
    assert holder.variable is variable
    with no_retrace():
        step(variable.get_value())


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["free", "replicated", "sharded"])
def test_donating_the_arrays_after_save_does_not_change_what_is_saved(
    make_manager: MakeManager, placement: str
) -> None:
    def place(value: float) -> jax.Array:
        array = jnp.full((1024, 1024), value)
        sharding = on_devices(4)
        if placement == "replicated":
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        return array if placement == "free" else jax.device_put(array, sharding)

    holder = SimpleNamespace(arrays=[place(float(i)) for i in range(6)])
    step = jax.jit(lambda arrays: [a + 100 for a in arrays], donate_argnums=0)
    holder.arrays = step(holder.arrays)
    manager = make_manager(Checkpoint(holder=holder))

    manager.save(1)
    for _ in range(10):
        holder.arrays = step(holder.arrays)
    jax.block_until_ready(holder.arrays)
    manager.restore_or_initialize()

    for i, array in enumerate(holder.arrays):
        np.testing.assert_array_equal(array, np.full((1024, 1024), i + 100.0))


def test_cpu_buffers_that_numpy_refers_to_are_not_reused() -> None:
    array = jnp.ones((256, 256)) + 1
    pointer = array.unsafe_buffer_pointer()
    view = np.asarray(array)
    assert view.__array_interface__["data"][0] == pointer

    result = jax.jit(lambda x: x + 1, donate_argnums=0)(array)

    assert result.unsafe_buffer_pointer() != pointer
    np.testing.assert_array_equal(view, np.full((256, 256), 2.0))


def test_a_checkpoint_without_arrays_round_trips(make_manager: MakeManager) -> None:
    position = Position()
    position.index = 8
    manager = make_manager(Checkpoint(data=position))
    manager.save(1)
    position.index = 0
    manager.restore_or_initialize()

    assert position.index == 8


def test_a_save_of_replicas_compiles_nothing(make_manager, no_retrace):
    mesh = jax.make_mesh((4,), ("replica",))
    sharding = NamedSharding(mesh, PartitionSpec())
    weights = jax.device_put(np.arange(64.0, dtype=np.float32), sharding)
    manager = make_manager(Checkpoint(run=SimpleNamespace(weights=weights)))
    with no_retrace():
        path = manager.save(1)
        manager.sync()
    restored = SimpleNamespace(weights=jax.device_put(jnp.zeros(64), sharding))
    make_manager(Checkpoint(run=restored)).restore(path)
    assert restored.weights.sharding == sharding
    np.testing.assert_array_equal(restored.weights, weights)
