"""Tests that adapters train as on one device, next to a base that never moves."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.errors import CheckpointError, CheckpointMismatchError
from armillary.plan._compile_worker import compile_exported
from armillary.plan._compiler import export_loop
from armillary.trainer._described import described
from tests.lora.training import Trainer, make_manager
from tests.problems import assert_identical, read_state
from tests.stored_arrays import list_stored_arrays

DEVICES = jax.devices()[:4]
STRATEGIES = {
    "mirrored": lambda: armillary.MirroredStrategy(DEVICES),
    "sharded": lambda: armillary.ShardedStrategy({"fsdp": 4}, devices=DEVICES),
}


def make_trainer(name="one", **options):
    make = STRATEGIES.get(name, lambda: armillary.OneDeviceStrategy("cpu:0"))
    return Trainer(make(), **options)


def is_of_base(path):
    is_parameter = path.rpartition("/")[2] in ("kernel", "bias")
    return path.startswith("model/") and is_parameter


def read_base(trainer):
    return [each.get_value() for each in armillary.lora.base(trainer.model)]


@pytest.fixture(scope="module")
def alone():
    """The state after six steps on one device, and before them."""
    trainer = make_trainer()
    before = read_state(trainer)
    trainer.train(6)
    return before, read_state(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_the_training_of_one_device(alone, name):
    before, expected = alone
    trainer = make_trainer(name)
    trainer.train(6)
    found = read_state(trainer)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=2e-4, atol=2e-5)
    base = {path: value for path, value in before.items() if is_of_base(path)}
    assert len(base) == 6
    assert_identical({path: found[path] for path in base}, base)
    moved = [p for p in found if not np.array_equal(found[p], before[p])]
    assert "model/layers/lora_a" in moved
    assert "model/layers/lora_b" in moved


@pytest.mark.slow
def test_the_base_stays_the_same_arrays_and_sharded():
    trainer = make_trainer("sharded")
    trainer.train(1)
    before = read_base(trainer)
    trainer.train(3)
    for array, expected in zip(read_base(trainer), before, strict=True):
        assert array is expected
        assert not array.is_deleted()
    kernel = trainer.model.layers.kernel[...]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4
    # The optimizer has nothing for the base.
    optimizer = {p: v for p, v in read_state(trainer).items() if "optimizer" in p}
    assert all("lora" in path or value.ndim == 0 for path, value in optimizer.items())


def measure(strategy, count, depth):
    """Returns the memory of the program of some steps with a wide base."""
    trainer = Trainer(strategy, width=256, depth=depth)
    with described(trainer, count, "cpu") as loop:
        program = export_loop(loop, "cpu")
    mesh = strategy.mesh
    return compile_exported(
        program, mesh, "cpu", loop.compiler_options
    ).memory_analysis()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mirrored", "sharded"])
def test_the_program_of_a_step_holds_no_second_base(name):
    count = 4 if name == "sharded" else 1
    strategy = armillary.MirroredStrategy(DEVICES[:1])
    if name == "sharded":
        strategy = STRATEGIES[name]()
    layer = 4 * 256**2
    memory = measure(strategy, count, depth=8)
    deeper = measure(strategy, count, depth=16)

    base = 8 * layer / count
    assert base <= memory.argument_size_in_bytes < 1.5 * base
    # The outputs are the adapters and the state of their optimizer.
    assert memory.output_size_in_bytes < 0.5 * base
    # A few layers are collected or transposed at a time, however many there are.
    assert memory.temp_size_in_bytes < 3 * layer
    assert deeper.argument_size_in_bytes > memory.argument_size_in_bytes + base
    assert deeper.temp_size_in_bytes < memory.temp_size_in_bytes + 0.25 * base


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "mirrored", "sharded"])
def test_a_resumed_run_equals_one_without_a_stop_bit_for_bit(tmp_path, name):
    trainer = make_trainer(name)
    trainer.train(3)
    trainer.train(3)
    expected = read_state(trainer)

    first = make_trainer(name)
    manager = make_manager(first, tmp_path)
    first.train(3)
    path = manager.save()
    manager.sync()
    whole = armillary.Checkpoint(trainer=first).write(tmp_path / "whole")
    of_base = list_stored_arrays(whole) - list_stored_arrays(path)
    assert len(of_base) == len(read_base(first))
    assert all(is_of_base(array.removeprefix("trainer/")) for array in of_base)

    second = make_trainer(name)
    manager = make_manager(second, tmp_path)
    manager.restore_or_initialize()
    second.train(3)
    assert_identical(read_state(second), expected)


@pytest.mark.slow
def test_a_controller_resumes_on_other_devices_and_refuses_a_wrong_base(tmp_path):
    def run(name, steps, **options):
        trainer = make_trainer(name, **options)
        controller = armillary.Controller(
            trainer=trainer,
            global_step=trainer.optimizer.step,
            steps_per_loop=2,
            strategy=trainer.strategy,
            checkpoint_manager=make_manager(trainer, tmp_path),
        )
        controller.train(steps)
        return trainer

    run("sharded", 4)
    trainer = run("mirrored", 6)
    assert trainer.optimizer.step[...] == 6
    with pytest.raises(CheckpointMismatchError) as error:
        run("one", 8, seed=1)
    assert "trainer/model/layers/kernel" in str(error.value)
    assert "trainer/model/last/kernel" in str(error.value)
    assert "leave_out" in str(error.value)


@pytest.mark.slow
def test_a_base_that_is_trained_by_mistake_is_refused_at_the_first_save(tmp_path):
    trainer = make_trainer()
    manager = make_manager(trainer, tmp_path)
    trainer.optimizer.update(
        trainer.model, nnx.state(trainer.model, nnx.LoRAParam)
    )  # adapters may change
    manager.save()
    trainer.model.last.kernel[...] += 1e-7 * trainer.model.last.kernel[...]
    with pytest.raises(CheckpointError, match="trainer/model/last/kernel"):
        manager.save(2)
    manager.close()


class Normalized(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(x))


@pytest.mark.slow
def test_a_merged_model_keeps_its_statistics_while_training_continues():
    trainer = make_trainer()
    trainer.model = Normalized()
    armillary.lora.add(trainer.model, rank=2, where="kernel", rngs=nnx.Rngs(1))
    adam = optax.adam(0.02)
    trainer.optimizer = nnx.Optimizer(trainer.model, adam, wrt=nnx.LoRAParam)
    trainer.train(2)
    merged = armillary.lora.merge(trainer.model)
    merged.eval()
    x = np.ones((2, 16), "float32")
    expected = np.array(merged(x))
    trainer.train(2)
    np.testing.assert_array_equal(merged(x), expected)
