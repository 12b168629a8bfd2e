"""A state is restored in parts where memory has no room for old and new arrays."""

import gc
import itertools
import resource
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.checkpoint import _reader, _room
from armillary.checkpoint._content import describe_leaves
from armillary.checkpoint._in_parts import NUM_PARTS, divide
from armillary.errors import CheckpointError, DatasetStateError

NUM_LAYERS = 8
SIZE = 64


class Model(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        layers = [nnx.Linear(SIZE, SIZE, rngs=rngs) for _ in range(NUM_LAYERS)]
        self.layers = nnx.List(layers)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class Pair(NamedTuple):
    first: jax.Array
    second: jax.Array


class Position:
    """A state that a restore sets after the arrays."""

    def __init__(self):
        self.refused = None
        self.state = 0

    def get_state(self):
        return self.state

    def set_state(self, state):
        if state == self.refused:
            raise DatasetStateError("no such position")
        self.state = state


@pytest.fixture
def reads(monkeypatch):
    """Lets memory be too small for two copies; returns the arrays of each read."""
    found = []
    original = _reader.FolderSource.read_arrays

    def read_arrays(self, shardings, specs):
        if shardings:
            found.append([*shardings])
        return original(self, shardings, specs)

    monkeypatch.setattr(_room, "has_room", lambda leaves, specs: False)
    monkeypatch.setattr(_reader.FolderSource, "read_arrays", read_arrays)
    return found


def make_objects(seed):
    """Makes the objects of a run, with places of every kind."""
    model = Model(seed)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    params = {"w": jnp.full(300, seed), "more": [jnp.full((9, 9), seed, jnp.bfloat16)]}
    pair = SimpleNamespace(value=Pair(jnp.full(5, seed), jnp.full(6, seed)))
    return {
        "model": model,
        "optimizer": optimizer,
        "params": params,
        "pair": pair,
        "key": {"value": jax.random.key(seed)},
        "position": Position(),
    }


def read(objects):
    """Returns all arrays, as NumPy arrays."""
    leaves = armillary.Checkpoint(**objects).read_leaves()
    arrays = {}
    for path, leaf in leaves.items():
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        arrays[path] = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return arrays


def test_parts_give_the_values_of_the_whole(tmp_path, reads):
    saved = make_objects(1)
    saved["position"].state = 7
    path = armillary.Checkpoint(**saved).save(tmp_path / "ckpt")
    objects = make_objects(2)
    params = objects["params"]
    more = params["more"]

    report = armillary.Checkpoint(**objects).read(path)

    expected = read(saved)
    assert {*report.restored} == {*expected, "position"}
    for name, array in read(objects).items():
        np.testing.assert_array_equal(array, expected[name], strict=True)
    assert NUM_PARTS <= len(reads) < 2 * NUM_PARTS
    assert sorted(itertools.chain(*reads)) == sorted(expected)
    assert objects["position"].state == 7
    # Dictionaries and lists that the program holds have the new arrays.
    assert objects["params"] is params
    assert params["more"] is more
    assert float(more[0][0, 0]) == 1


def step(state, batch):
    """Moves each array of the state by the mean of a batch."""
    change = armillary.all_reduce("mean", jnp.mean(batch))
    return jax.tree.map(lambda array: array + change, state), {"change": change}


def make_state():
    return {f"layer_{i}": jnp.zeros((SIZE, SIZE)) for i in range(2 * NUM_LAYERS)}


def make_controller(directory, strategy):
    rows = np.arange(32, dtype=np.float32)
    source = armillary.data.from_arrays(rows, batch_size=8, repeat=True)
    trainer = armillary.StepTrainer(step, make_state(), source, strategy=strategy)
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer), directory, checkpoint_interval=2
    )
    return armillary.Controller(
        trainer=trainer,
        global_step=trainer.global_step,
        steps_per_loop=2,
        checkpoint_manager=manager,
    )


STRATEGIES = {
    "one device": lambda: armillary.OneDeviceStrategy("cpu:0"),
    "divided": lambda: armillary.ShardedStrategy(rules={"layer": jax.P(None, "fsdp")}),
}


def count_live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture
def live_bytes(monkeypatch):
    """Returns the bytes of all arrays, noted at each array that is restored."""
    found = []
    original = _reader.as_restored

    def as_restored(stored, leaf):
        found.append(count_live_bytes())
        return original(stored, leaf)

    monkeypatch.setattr(_reader, "as_restored", as_restored)
    return found


@pytest.mark.parametrize("kind", STRATEGIES)
def test_old_arrays_leave_memory_while_new_ones_come(tmp_path, reads, live_bytes, kind):
    make_controller(tmp_path, STRATEGIES[kind]()).train(4)
    expected = make_controller(tmp_path / "other", STRATEGIES[kind]())
    expected.train(6)
    before = count_live_bytes()
    controller = make_controller(tmp_path, STRATEGIES[kind]())
    controller.train(6)

    state = expected.trainer.state
    size = sum(array.nbytes for array in state.values())
    assert len(reads) >= NUM_PARTS
    assert max(live_bytes) - before < 1.4 * size
    for name, array in controller.trainer.state.items():
        np.testing.assert_array_equal(array, state[name], strict=True)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_arrays_of_a_step_leave_memory_too(tmp_path, reads, live_bytes, kind):
    controller = make_controller(tmp_path, STRATEGIES[kind]())
    controller.train(4)
    path = armillary.Checkpoint(trainer=controller.trainer).save(tmp_path / "saved")
    controller.train(6)
    # Copies, because a NumPy array may share the memory of a CPU device.
    expected = jax.tree.map(np.array, controller.trainer.state)
    size = sum(array.nbytes for array in expected.values())
    before = count_live_bytes()

    armillary.Checkpoint(trainer=controller.trainer).read(path)

    assert max(live_bytes) - before < 0.4 * size
    assert count_live_bytes() <= before
    controller.train(6)
    for name, array in controller.trainer.state.items():
        np.testing.assert_array_equal(array, expected[name], strict=True)


class Trainer(armillary.StandardTrainer):
    """Trains variables, and a tuple of arrays that programs read as one value."""

    def __init__(self):
        rows = np.arange(32, dtype=np.float32)
        super().__init__(armillary.data.from_arrays(rows, batch_size=8, repeat=True))
        arrays = list(make_state().values())
        self.layers = nnx.List(map(nnx.Param, arrays[:8]))
        self.more = tuple(arrays[8:])

    def train_step(self, iterator):
        change = jnp.mean(next(iterator))
        for layer in self.layers:
            layer[...] += change
        first, *others = self.more
        self.more = (first, *(array + change for array in others))


def test_arrays_of_variables_and_containers_leave_memory_too(
    tmp_path, reads, live_bytes
):
    trainer = Trainer()
    trainer.train(2)
    path = armillary.Checkpoint(trainer=trainer).save(tmp_path / "saved")
    trainer.train(2)
    expected = jax.tree.map(np.copy, read({"trainer": trainer}))
    before = count_live_bytes()

    armillary.Checkpoint(trainer=trainer).read(path)

    assert max(live_bytes) - before < 0.4 * 16 * SIZE**2 * 4
    assert count_live_bytes() <= before
    trainer.train(2)
    for name, array in read({"trainer": trainer}).items():
        np.testing.assert_array_equal(array, expected[name], strict=True)


def test_an_error_in_between_leaves_nothing_to_use(tmp_path, reads, monkeypatch):
    saved = make_objects(1)
    path = armillary.Checkpoint(**saved).save(tmp_path / "ckpt")
    objects = make_objects(2)
    checkpoint = armillary.Checkpoint(**objects)
    original = _reader.FolderSource.read_arrays

    def fail(self, shardings, specs):
        if len(reads) == 3:
            raise OSError("the network is gone")
        return original(self, shardings, specs)

    monkeypatch.setattr(_reader.FolderSource, "read_arrays", fail)
    with pytest.raises(CheckpointError, match="the network is gone") as caught:
        checkpoint.read(path)

    num_replaced = len(reads[0]) + len(reads[1]) + len(reads[2])
    (note,) = caught.value.__notes__
    assert f"{num_replaced} arrays" in note
    assert "deleted" in note
    assert "start the program again" in note
    leaves = checkpoint.read_leaves()
    deleted = {name for name, leaf in leaves.items() if leaf.is_deleted()}
    assert deleted == {*reads[0], *reads[1], *reads[2]}
    with pytest.raises(CheckpointError, match=f"{num_replaced} arrays"):
        checkpoint.save(tmp_path / "mixture")

    # The next restore brings everything back.
    monkeypatch.setattr(_reader.FolderSource, "read_arrays", original)
    checkpoint.read(path)
    expected = read(saved)
    for name, array in read(objects).items():
        np.testing.assert_array_equal(array, expected[name], strict=True)


def test_a_refused_position_leaves_nothing_to_use(tmp_path, reads):
    path = armillary.Checkpoint(**make_objects(1)).save(tmp_path / "ckpt")
    objects = make_objects(2)
    objects["position"].refused = 0

    with pytest.raises(DatasetStateError) as caught:
        armillary.Checkpoint(**objects).read(path)
    assert "`position`" in caught.value.__notes__[0]
    assert "deleted" in caught.value.__notes__[1]
    assert all(
        leaf.is_deleted()
        for leaf in armillary.Checkpoint(**objects).read_leaves().values()
    )

    # If it may differ, only the arrays are restored.
    objects = make_objects(2)
    objects["position"].refused = 0
    objects["position"].state = 5
    report = armillary.Checkpoint(**objects).read(path, may_differ="position")
    assert report.kept == ("position",)
    assert objects["position"].state == 5
    assert float(objects["params"]["w"][0]) == 1


def test_an_error_of_the_first_part_changes_nothing(tmp_path, reads, monkeypatch):
    path = armillary.Checkpoint(**make_objects(1)).save(tmp_path / "ckpt")
    objects = make_objects(2)
    expected = read(objects)

    def fail(self, shardings, specs):
        raise OSError("the network is gone")

    monkeypatch.setattr(_reader, "read_arrays", fail)
    with pytest.raises(CheckpointError, match="Nothing was restored") as caught:
        armillary.Checkpoint(**objects).read(path)
    assert not hasattr(caught.value, "__notes__")
    for name, array in read(objects).items():
        np.testing.assert_array_equal(array, expected[name], strict=True)


def test_parts_have_about_the_same_size():
    arrays = {f"small_{i}": np.zeros(10, np.float32) for i in range(40)}
    arrays["large"] = np.zeros(1000, np.float32)
    specs = describe_leaves(arrays)
    # An eighth is 700 bytes, and a small array has 40.
    assert [len(part) for part in divide(arrays, specs)] == [17, 17, 6, 1]
    del arrays["large"]
    assert [len(part) for part in divide(arrays, specs)] == [5] * NUM_PARTS
    assert divide([], specs) == []


def has_room(leaves):
    return _room.has_room(leaves, describe_leaves(leaves))


def test_the_memory_of_devices_and_of_the_machine_counts(monkeypatch):
    left = {}
    monkeypatch.setattr(_room, "find_bytes_left", lambda place: left[place])
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    leaves = {
        "divided": jax.device_put(jnp.zeros(200, jnp.float32), sharding),
        "numpy": np.zeros(100, np.float32),
    }
    # Devices of a CPU share the memory of the machine. So do two buffers of a read.
    left[None] = 3 * 1200 / 0.9
    assert has_room(leaves)
    left[None] -= 4
    assert not has_room(leaves)


class Chip:
    """A device of an accelerator that tells how much memory it has."""

    platform = "tpu"

    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_an_accelerator_says_how_much_is_left():
    chip = Chip({"bytes_limit": 1000, "bytes_in_use": 300, "num_allocs": 1})
    assert _room.find_bytes_left(chip) == 700
    assert _room.find_bytes_left(Chip(None)) == np.inf
    assert _room.find_bytes_left(Chip({"num_allocs": 1})) == np.inf


def write_files(tmp_path, monkeypatch, **texts):
    """Lets files of the test stand for the files of the system."""
    for name, text in texts.items():
        file = tmp_path / name.replace("_", "/", 1)
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(_room, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(_room, "_CGROUP", tmp_path / "group")


def test_the_least_bound_of_the_machine_counts(tmp_path, monkeypatch):
    limits = {}
    unlimited = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(
        _room.resource, "getrlimit", lambda kind: limits.get(kind, unlimited)
    )
    write_files(tmp_path, monkeypatch)
    assert _room.find_bytes_left(None) == np.inf  # As on macOS.

    meminfo = "MemTotal:  900 kB\nMemAvailable:  800 kB\nHugePages_Total:  0\n"
    write_files(tmp_path, monkeypatch, proc_meminfo=meminfo)
    assert _room.find_bytes_left(None) == 800 * 1024

    status = "Name:\tpython\nVmSize:\t  300 kB\nVmData:\t  200 kB\n"
    (tmp_path / "proc" / "self").mkdir()
    (tmp_path / "proc" / "self" / "status").write_text(status)
    limits[resource.RLIMIT_DATA] = (900 * 1024, 900 * 1024)
    assert _room.find_bytes_left(None) == 700 * 1024
    limits[resource.RLIMIT_AS] = (900 * 1024, 900 * 1024)
    assert _room.find_bytes_left(None) == 600 * 1024

    group = {"group_memory.max": "max\n", "group_memory.current": "0\n"}
    write_files(tmp_path, monkeypatch, **group)
    assert _room.find_bytes_left(None) == 600 * 1024
    group = {"group_memory.max": "5000\n", "group_memory.current": "2000\n"}
    write_files(tmp_path, monkeypatch, **group)
    assert _room.find_bytes_left(None) == 3000
