"""Tests that saving and restoring keeps bits, types, devices and memory."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from armillary.checkpoint import Checkpoint
from armillary.checkpoint._content import describe_leaves
from armillary.checkpoint._leaves import as_restored, stored_sharding
from armillary.errors import CheckpointError
from tests.patience import patience
from tests.tiers import slow_after_first


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


def find_dtypes() -> list[str]:
    """Returns the names of the dtypes of which JAX makes arrays here."""
    found: list[str] = []
    for name in dir(ml_dtypes):
        is_known = isinstance(getattr(ml_dtypes, name), type) and hasattr(jnp, name)
        # XLA fails with arrays of single bits (JAX 0.10.2).
        if is_known and name not in ("int1", "uint1"):
            with contextlib.suppress(jax.errors.JaxRuntimeError, TypeError):
                jnp.zeros(3, name)
                found.append(name)
    return found


def test_narrow_dtypes_round_trip(make_manager):
    names = find_dtypes()
    assert {"bfloat16", "float8_e4m3", "float8_e4m3fn", "int4", "uint2"} <= set(names)

    def build(value: int) -> dict[str, jax.Array]:
        return {name: jnp.asarray([value, 1, 1], name) for name in names}

    saved, target = build(2), build(1)
    manager = make_manager(Checkpoint(state=saved))
    manager.save(1)
    manager.sync()
    make_manager(Checkpoint(state=target)).restore_or_initialize()

    assert_same(target, saved)


def test_every_dtype_and_kind_of_object_round_trips(make_manager):
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
            narrow=jnp.array([scale % 4, 0, 1], "uint2"),
            host=nnx.Variable(np.full(2, scale, np.float64)),
            host_narrow=nnx.Variable(np.full(2, scale % 4, jnp.dtype("int4"))),
            number=nnx.Variable(scale),
            net=equinox.nn.MLP(2, 3, 4, 1, key=jax.random.key(scale)),
        )

    saved, target = build(5), build(1)
    manager = make_manager(Checkpoint(state=saved))
    manager.save(1)
    manager.sync()
    make_manager(Checkpoint(state=target)).restore_or_initialize()

    expected = Checkpoint(state=saved).read_leaves()
    actual = Checkpoint(state=target).read_leaves()
    np.testing.assert_array_equal(target.net(jnp.ones(2)), saved.net(jnp.ones(2)))
    assert actual["state/number"] == 5
    del expected["state/number"], actual["state/number"]
    assert_same(actual, expected)


def on_devices(count: int, kind: str = "device") -> NamedSharding:
    devices = np.asarray(jax.devices()[:count])
    return NamedSharding(
        jax.sharding.Mesh(devices, ("r",)), PartitionSpec("r"), memory_kind=kind
    )


@pytest.mark.parametrize(
    ("saved_on", "restored_on", "kind"),
    [(4, 1, "device"), (1, 8, "device"), (8, 4, "pinned_host")],
)
def test_arrays_move_to_the_devices_of_the_program(
    make_manager, saved_on, restored_on, kind
):
    def build(count: int, value: float) -> SimpleNamespace:
        sharded = on_devices(count, kind)
        replicated = NamedSharding(sharded.mesh, PartitionSpec())
        keys = jax.random.split(jax.random.key(int(value)), 8)
        return SimpleNamespace(
            sharded=jax.device_put(jnp.full((8, 3), value), sharded),
            replicated=jax.device_put(jnp.full((8, 3), value), replicated),
            keys=jax.device_put(keys, on_devices(count)),
        )

    saved, target = build(saved_on, 5.0), build(restored_on, 0.0)
    shardings = {name: leaf.sharding for name, leaf in vars(target).items()}
    manager = make_manager(Checkpoint(state=saved))
    manager.save(1)
    manager.sync()
    make_manager(Checkpoint(state=target)).restore_or_initialize()

    assert {name: leaf.sharding for name, leaf in vars(target).items()} == shardings
    assert_same(vars(target), vars(saved))


PROGRAM = """
import sys
import jax, jax.numpy as jnp
import armillary
assert jax.device_count() == 1
state = {"sharded": jnp.zeros(24)}
armillary.Checkpoint(state=state).read(sys.argv[1])
assert (state["sharded"] == jnp.arange(24.0)).all()
"""


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_is_read_in_a_process_with_one(make_manager):
    state = {"sharded": jax.device_put(jnp.arange(24.0), on_devices(8))}
    manager = make_manager(Checkpoint(state=state))
    path = manager.save(1)
    manager.close()
    alone = {**os.environ, "XLA_FLAGS": ""}
    program = [sys.executable, "-c", PROGRAM, str(path)]
    subprocess.run(program, check=True, timeout=patience(120), env=alone)


@slow_after_first("placement", ["free", "replicated", "sharded"])
def test_donating_the_arrays_after_save_does_not_change_what_is_saved(
    make_manager, placement
):
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


def test_values_without_numbers_are_an_error_that_names_all():
    leaves = {"a": "text", "b": object(), "c": np.asarray(["a"]), "d": 1.0}
    with pytest.raises(
        TypeError,
        match=r"(?s)holds 3 values .*  a: str 'text'\n  b: object .*\n  c: ndarray",
    ):
        describe_leaves(leaves)


def test_free_arrays_stay_free_and_on_a_device_that_is_not_the_default():
    with jax.default_device(jax.devices()[3]):
        target = jnp.zeros(3)
    assert stored_sharding(target) is None

    restored = as_restored(np.ones(3, np.float32), target)

    assert restored.devices() == {jax.devices()[3]}
    assert not restored.committed


@pytest.mark.parametrize("number", [2**40, -3, 0.1, np.int64(2**40)])
def test_a_number_of_python_is_restored_as_it_was(make_manager, number):
    variable = nnx.Variable(number)
    manager = make_manager(Checkpoint(variable=variable))
    manager.save(1)
    variable.set_value(type(number)(0))
    manager.restore_or_initialize()
    restored = variable.get_value()
    assert (restored, type(restored)) == (number, type(number))


# The names that sweeps make, and others that mean something to a shell or a pattern.
ODD_NAMES = ["lr=[0.1,0.2]", "run [a]", "[1]", "a\\b", "{a}", "what?", "*", "é %20#"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_checkpoint_is_restored_from_a_directory_of_any_name(
    name, tmp_path, make_manager
):
    saved = SimpleNamespace(weights=jnp.arange(6.0), count=jnp.ones((), jnp.int32))
    manager = make_manager(Checkpoint(model=saved), tmp_path / name)
    manager.save(1)
    manager.sync()
    restored = SimpleNamespace(weights=jnp.zeros(6), count=jnp.zeros((), jnp.int32))

    make_manager(Checkpoint(model=restored), tmp_path / name).restore_or_initialize()

    np.testing.assert_array_equal(restored.weights, saved.weights)
    assert restored.count == 1
    assert (tmp_path / name / "checkpoint_1").is_dir()


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_checkpoint_of_any_name_is_written_and_read(name, tmp_path):
    saved = SimpleNamespace(weights=jnp.arange(6.0))
    path = Checkpoint(model=saved).write(tmp_path / name)
    restored = SimpleNamespace(weights=jnp.zeros(6))

    Checkpoint(model=restored).read(path)

    np.testing.assert_array_equal(restored.weights, saved.weights)


def test_a_save_that_cannot_be_read_back_is_an_error(make_manager, monkeypatch):
    saved = SimpleNamespace(weights=jnp.arange(6.0))
    manager = make_manager(Checkpoint(model=saved), max_to_keep=1)
    first = manager.save(1)
    manager.sync()
    # As where Orbax finds nothing to put together, and leaves it at that.
    monkeypatch.setattr(
        "orbax.checkpoint._src.serialization.ocdbt_utils.merge_ocdbt_per_process_files",
        leave_files_apart,
    )

    manager.save(2)
    with pytest.raises(CheckpointError, match=r"checkpoint_2` failed"):
        manager.sync()

    assert manager.checkpoints == [first]


async def leave_files_apart(*args, **kwargs):
    del args, kwargs
