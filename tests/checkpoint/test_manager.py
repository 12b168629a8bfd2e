"""Tests of saving and restoring through a manager."""

import os
from collections.abc import Callable, Iterator
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

from armillary.checkpoint import Checkpoint, CheckpointManager, _folder, _writer
from armillary.checkpoint._store import Store
from armillary.errors import CheckpointError, CheckpointMismatchError

MakeManager = Callable[..., CheckpointManager]


@pytest.fixture
def make_manager(tmp_path: Path) -> Iterator[MakeManager]:
    """Returns a function that makes managers, and closes them after the test."""
    managers: list[CheckpointManager] = []

    def make(checkpoint: Checkpoint, directory: Any = None, **kwargs: Any) -> Any:
        directory = directory or tmp_path / "run"
        managers.append(CheckpointManager(checkpoint, directory, **kwargs))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


class Counter:
    """A step and an array that tells which step it was saved at."""

    def __init__(self) -> None:
        self.step = 0
        self.array = jnp.zeros(3)

    def set(self, step: int) -> None:
        self.step = step
        self.array = jnp.full(3, float(step))


class Position:
    def __init__(self) -> None:
        self.index = 0

    def get_state(self) -> dict[str, int]:
        return {"index": self.index}

    def set_state(self, state: dict[str, int]) -> None:
        self.index = state["index"]


def names(manager: CheckpointManager) -> list[str]:
    return [Path(path).name for path in manager.checkpoints]


def save_steps(manager: CheckpointManager, counter: Counter, *steps: int) -> None:
    for step in steps:
        counter.set(step)
        manager.save(step)
    manager.sync()


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
    saved, target = (
        SimpleNamespace(model=eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(seed)))
        for seed in (0, 1)
    )
    manager = make_manager(Checkpoint(run=saved))
    manager.save(1)
    manager.sync()
    make_manager(Checkpoint(run=target)).restore_or_initialize()

    x = jnp.arange(2.0)
    np.testing.assert_array_equal(saved.model(x), target.model(x))


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


def test_objects_stay_the_same_objects(make_manager: MakeManager) -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    kernel = model.kernel
    manager = make_manager(Checkpoint(model=model))
    manager.save(1)
    manager.restore_or_initialize()

    assert model.kernel is kernel


def test_restoring_does_not_trace_again(
    make_manager: MakeManager, no_retrace: Callable[[], Any]
) -> None:
    holder = SimpleNamespace(array=jnp.ones(3))
    manager = make_manager(Checkpoint(holder=holder))
    step = jax.jit(lambda x: x + 1)
    holder.array = step(holder.array)
    manager.save(1)
    manager.restore_or_initialize()
    with no_retrace():
        step(holder.array)


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


def test_host_arrays_may_change_after_save(make_manager: MakeManager) -> None:
    variable = nnx.Variable(np.zeros(100_000))
    manager = make_manager(Checkpoint(variable=variable))
    manager.save(1)
    variable.get_value()[:] = 1
    manager.restore_or_initialize()

    np.testing.assert_array_equal(variable.get_value(), np.zeros(100_000))


def test_only_the_newest_are_kept_in_the_order_of_saving(
    make_manager: MakeManager,
) -> None:
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter), max_to_keep=3)
    save_steps(manager, counter, 10, 9, 200, 30)

    assert names(manager) == ["checkpoint_9", "checkpoint_200", "checkpoint_30"]
    assert manager.latest_checkpoint == str(Path(manager.directory) / "checkpoint_30")
    assert sorted(os.listdir(manager.directory)) == sorted(names(manager))


def test_a_new_manager_goes_on_with_the_same_retention(
    make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = iter(range(1000))
    monkeypatch.setattr(_writer, "time", lambda: 3600.0 * next(hours))
    counter = Counter()
    managers = [
        make_manager(
            Checkpoint(counter=counter),
            max_to_keep=2,
            keep_checkpoint_every_n_hours=4,
        )
        for _ in range(4)
    ]
    for i, manager in enumerate(managers):
        save_steps(manager, counter, *range(3 * i, 3 * i + 3))

    *kept, _, _ = _folder.find_checkpoints(managers[-1]._directory)
    times = [entry.header.saved_at / 3600 for entry in kept]
    assert len(times) >= 2
    assert all(b - a >= 4 for a, b in zip([0, *times], times, strict=False))
    assert names(managers[-1])[-2:] == ["checkpoint_10", "checkpoint_11"]


def test_saving_a_number_again_writes_again(make_manager: MakeManager) -> None:
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter))
    counter.set(1)
    first = manager.save(7)
    counter.set(2)
    second = manager.save(7)
    manager.sync()
    counter.set(3)
    manager.restore_or_initialize()

    assert first != second
    assert manager.checkpoints == [second]
    assert os.listdir(manager.directory) == ["checkpoint_7.1"]
    np.testing.assert_array_equal(counter.array, np.full(3, 2.0))


def test_other_content_of_the_directory_is_not_touched(
    make_manager: MakeManager, tmp_path: Path
) -> None:
    foreign = {
        "events.out.tfevents.1": "events",
        "train/events": "events",
        "checkpoint_1/data": "another library",
        "checkpoint_9.orbax-checkpoint-tmp": "a file",
        "best/checkpoint_4/header": "user",
    }
    for name, text in foreign.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter), max_to_keep=1)
    save_steps(manager, counter, 1, 2, 3)

    assert names(manager) == ["checkpoint_3"]
    for name, text in foreign.items():
        assert (tmp_path / "run" / name).read_text() == text


def test_numbers_come_from_the_step_counter(make_manager: MakeManager) -> None:
    counter = Counter()
    counter.set(40)
    manager = make_manager(
        Checkpoint(counter=counter), step_counter=lambda: counter.step
    )

    assert Path(str(manager.save())).name == "checkpoint_40"
    assert Path(str(manager.save(checkpoint_number=2))).name == "checkpoint_2"


def test_numbers_count_on_without_a_step_counter(make_manager: MakeManager) -> None:
    manager = make_manager(Checkpoint(counter=Counter()))
    manager.save()
    manager.save()
    manager.sync()
    other = make_manager(Checkpoint(counter=Counter()))
    other.save()
    other.sync()

    assert names(other) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]


def test_the_interval_counts_from_the_last_save_or_restore(
    make_manager: MakeManager,
) -> None:
    counter = Counter()
    kwargs = {"step_counter": lambda: counter.step, "checkpoint_interval": 10}
    manager = make_manager(Checkpoint(counter=counter), **kwargs)
    saved = []
    for step in range(4, 40, 4):
        counter.set(step)
        if manager.save(check_interval=True):
            saved.append(step)

    assert saved == [4, 16, 28]
    assert manager.checkpoint_interval == 10
    assert manager.save() is not None
    manager.sync()

    other = make_manager(Checkpoint(counter=counter), **kwargs)
    other.restore_or_initialize()
    counter.set(45)
    assert other.save(check_interval=True) is None
    counter.set(46)
    assert other.save(check_interval=True) is not None


def test_one_tracker_knows_which_step_the_latest_checkpoint_holds(
    make_manager: MakeManager,
) -> None:
    counter = Counter()
    checkpoint = Checkpoint(counter=counter)
    manager = make_manager(checkpoint, step_counter=lambda: counter.step)
    assert not manager.has_saved_step()
    save_steps(manager, counter, 1, 2)
    assert manager.has_saved_step()
    assert not manager.has_saved_step(checkpoint_number=3)

    counter.step = 3
    assert not manager.has_saved_step()
    manager.save(checkpoint_number=30)
    manager.sync()
    assert manager.has_saved_step(checkpoint_number=30)
    assert not manager.has_saved_step()

    first, _, last = manager.checkpoints
    manager.restore(first)
    assert not manager.has_saved_step()
    manager.restore(last)
    assert manager.has_saved_step()
    without_counter = make_manager(checkpoint)
    without_counter.save(3)
    assert not without_counter.has_saved_step()


def test_without_an_interval_every_save_is_due(make_manager: MakeManager) -> None:
    manager = make_manager(Checkpoint(counter=Counter()), step_counter=lambda: 3)

    assert manager.save(check_interval=True) is not None
    assert manager.save(check_interval=True) is not None


def test_binding_a_step_counter_keeps_the_users(make_manager: MakeManager) -> None:
    manager = make_manager(Checkpoint(counter=Counter()))
    assert manager.step_counter is None

    first = nnx.Variable(jnp.asarray(3))
    manager.bind_step_counter(first)
    manager.bind_step_counter(lambda: 9)

    assert manager.step_counter is first
    assert Path(str(manager.save())).name == "checkpoint_3"


def test_init_fn_runs_only_if_there_is_no_checkpoint(
    make_manager: MakeManager,
) -> None:
    counter, calls = Counter(), []
    manager = make_manager(
        Checkpoint(counter=counter), init_fn=lambda: calls.append("init")
    )
    assert manager.restore_or_initialize() is None
    assert calls == ["init"]

    path = manager.save(1)

    assert manager.restore_or_initialize() == path
    assert calls == ["init"]


def test_a_mismatch_changes_nothing(make_manager: MakeManager) -> None:
    position = Position()
    saved = make_manager(
        Checkpoint(model=nnx.Linear(3, 3, rngs=nnx.Rngs(0)), data=position)
    )
    saved.save(1)
    saved.sync()
    position.index = 5
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(1))
    manager = make_manager(Checkpoint(model=model, data=position))
    before = dict(manager.checkpoint.read_leaves())

    with pytest.raises(
        CheckpointMismatchError,
        match=r"~ model/kernel: float32 \(3, 3\) in the checkpoint, float32 \(4, 3\)",
    ):
        manager.restore_or_initialize()

    after = manager.checkpoint.read_leaves()
    assert all(after[path] is leaf for path, leaf in before.items())
    assert position.index == 5


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none", "which does not exist"),
        ("file", "which is a file"),
        ("folder", "a folder that is not a complete checkpoint"),
        (".", "a folder that is not a complete checkpoint"),
    ],
)
def test_restoring_what_is_not_a_checkpoint_names_those_that_are(
    make_manager: MakeManager, name: str, reason: str
) -> None:
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter))
    save_steps(manager, counter, 1, 2)
    directory = Path(manager.directory)
    (directory / "file").touch()
    (directory / "folder").mkdir()

    with pytest.raises(
        CheckpointError, match=rf"{reason}.*: '.*checkpoint_2', '.*checkpoint_1'\."
    ):
        manager.restore(directory / name)


def test_any_checkpoint_may_be_restored(make_manager: MakeManager) -> None:
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter))
    save_steps(manager, counter, 1, 2)

    path = manager.restore(manager.checkpoints[0])

    assert path == manager.checkpoints[0]
    np.testing.assert_array_equal(counter.array, np.ones(3))


def test_a_checkpoint_without_arrays_round_trips(make_manager: MakeManager) -> None:
    position = Position()
    position.index = 8
    manager = make_manager(Checkpoint(data=position))
    manager.save(1)
    position.index = 0
    manager.restore_or_initialize()

    assert position.index == 8


def test_a_directory_that_cannot_be_written_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    with pytest.raises(ValueError, match=r"this user may not write to .*chmod"):
        CheckpointManager(Checkpoint(counter=Counter()), tmp_path / "run")


def test_a_directory_that_cannot_be_written_can_be_read(
    make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter()
    save_steps(make_manager(Checkpoint(counter=counter)), counter, 1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    manager = make_manager(Checkpoint(counter=counter))

    assert manager.restore_or_initialize() is not None
    with pytest.raises(CheckpointError, match="this user may not write to"):
        manager.save(2)


def test_a_failed_save_is_raised_by_sync_once(
    make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter))
    save_steps(manager, counter, 1)

    wait = Store.wait

    def fail(store: Store) -> None:
        wait(store)
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "wait", fail)
        manager.save(2)
        with pytest.raises(
            CheckpointError, match="checkpoint_2` failed: OSError: No space left"
        ):
            manager.sync()

    manager.sync()
    assert names(manager)[0] == "checkpoint_1"


def test_a_save_that_cannot_start_is_an_error(
    make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter))
    save_steps(manager, counter, 1)

    def fail(*args: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_folder, "choose_path", fail)
        with pytest.raises(
            CheckpointError, match="checkpoint_2` failed: OSError: No space left"
        ):
            manager.save(2)

    save_steps(manager, counter, 3)
    assert names(manager) == ["checkpoint_1", "checkpoint_3"]


def test_a_closed_manager_can_save_again(make_manager: MakeManager) -> None:
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter))
    save_steps(manager, counter, 1)
    manager.close()
    manager.close()
    save_steps(manager, counter, 2)

    assert names(manager) == ["checkpoint_1", "checkpoint_2"]


def test_a_relative_directory_stays_the_same(
    make_manager: MakeManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter), "relative")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    save_steps(manager, counter, 1)

    assert manager.directory == str(tmp_path / "relative")
    assert names(manager) == ["checkpoint_1"]
