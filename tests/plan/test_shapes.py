"""Tests of plans for models that have shapes and no arrays."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import armillary
from armillary._planned import planning
from armillary.errors import StateStructureError
from armillary.plan import plan
from tests.plan import decoder, shapes
from tests.plan.shapes import BATCH_SIZE, WIDTH, Trainer, make_state, make_trainer

SHAPE = {"data": 2, "fsdp": 4}


def figures(found):
    """Returns the figures of a plan that do not depend on time."""
    record = json.loads(found.as_json())
    return {name: x for name, x in record.items() if name != "compile_seconds"}


def test_a_plan_of_shapes_has_the_figures_of_arrays():
    of_arrays = plan(make_trainer(), 8, abstract=True)
    of_shapes = plan(make_trainer, 8, abstract=True)
    assert figures(of_shapes) == figures(of_arrays)
    assert of_shapes.held_bytes < of_shapes.state_bytes / 3


def test_a_model_that_fits_on_no_machine_is_planned():
    found = plan(shapes.make_huge_trainer, 512, abstract=True)
    assert found.mesh == {"data": 128, "fsdp": 4, "tensor": 1}
    # Three arrays for each parameter, of which each device holds a quarter.
    parameters = 64 * (8 * 2**28 + 5 * 2**14)
    assert found.state_bytes == pytest.approx(12 * parameters, rel=1e-6)
    assert found.held_bytes == pytest.approx(3 * parameters, rel=1e-3)


def test_make_returns_shapes_in_a_plan_and_values_of_scalars():
    strategy = armillary.ShardedStrategy(SHAPE)
    with planning():
        rngs = nnx.Rngs(params=0, dropout=1)
        model, optimizer = strategy.make(make_state)
        layer = strategy.make(nnx.Linear, 64, 64, rngs=rngs)
    kernel = model.blocks.up.kernel.get_value()
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    assert (kernel.shape, kernel.dtype) == ((4, WIDTH, 4 * WIDTH), jnp.float32)
    assert isinstance(layer.kernel.get_value(), jax.ShapeDtypeStruct)
    # A program may read a counter, and the constructor has drawn from the argument.
    assert int(optimizer.step) == 0
    assert int(rngs.params.count[...]) == 2


def test_an_annotation_that_does_not_fit_is_an_error_in_a_plan():
    def make_layer():
        init = nnx.with_partitioning(nnx.initializers.zeros, ("fsdp", None))
        return nnx.Linear(6, 8, kernel_init=init, rngs=nnx.Rngs(0))

    strategy = armillary.ShardedStrategy(SHAPE)
    with (
        planning(),
        pytest.raises(
            ValueError, match="devices cannot share axis 0 of 6 equally: in the mesh"
        ),
    ):
        strategy.make(make_layer)


def test_models_of_eval_shape_are_planned_but_not_trained():
    strategy = armillary.ShardedStrategy(SHAPE)
    trainer = Trainer(strategy, *nnx.eval_shape(make_state))
    found = plan(trainer, 8, abstract=True)
    assert found.state_bytes == plan(make_trainer, 8, abstract=True).state_bytes
    with pytest.raises(StateStructureError, match="no values") as error:
        trainer.train(1)
    assert "model/blocks/down/kernel: float32 (4, 256, 64)" in str(error.value)
    assert "strategy.make(make_model)" in str(error.value)


OPTIMIZER = optax.adamw(1e-3)


def make_pure_state():
    key = jax.random.key(0)
    params = {
        "up": jax.random.normal(key, (4, WIDTH, 4 * WIDTH)),
        "down": jnp.zeros((4, 4 * WIDTH, WIDTH)),
    }
    return params, OPTIMIZER.init(params)


def pure_step(state, batch):
    def loss_fn(params):
        @jax.checkpoint
        def apply(x, layer):
            return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None

        return ((jax.lax.scan(apply, batch["x"], params)[0] - 1) ** 2).mean()

    params, opt_state = state
    loss, gradients = jax.value_and_grad(loss_fn)(params)
    gradients = armillary.all_reduce("mean", gradients)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def make_pure_trainer(state, strategy=None):
    rows = {"x": np.ones((BATCH_SIZE, WIDTH), np.float32)}
    source = armillary.data.from_arrays(rows, batch_size=BATCH_SIZE)
    strategy = strategy or armillary.ShardedStrategy(SHAPE)
    return armillary.StepTrainer(pure_step, state, source, strategy=strategy)


def test_the_state_of_a_pure_step_may_be_shapes():
    of_arrays = plan(make_pure_trainer(make_pure_state()), 16, abstract=True)
    trainer = make_pure_trainer(jax.eval_shape(make_pure_state))
    assert figures(plan(trainer, 16, abstract=True)) == figures(of_arrays)

    def make():
        strategy = armillary.ShardedStrategy(SHAPE)
        return make_pure_trainer(strategy.make(make_pure_state), strategy)

    assert figures(plan(make, 16, abstract=True)) == figures(of_arrays)
    with pytest.raises(StateStructureError, match="state/0/down: float32"):
        trainer.train(1)


def test_a_shape_keeps_the_division_that_it_has():
    strategy = armillary.ShardedStrategy(SHAPE)

    def plan_with(spec):
        sharding = NamedSharding(strategy.mesh, spec)
        state = jax.eval_shape(make_pure_state)
        up = jax.ShapeDtypeStruct((4, WIDTH, 4 * WIDTH), "float32", sharding=sharding)
        state[0]["up"] = up
        return plan(make_pure_trainer(state, strategy), 16, abstract=True)

    both = plan_with(PartitionSpec(None, "data", "fsdp"))
    one = plan_with(PartitionSpec(None, "fsdp"))
    # On 16 devices, `data` has four. The two moments are divided like the parameter.
    part = 3 * 4 * (4 * WIDTH * 4 * WIDTH) // 4
    assert one.held_bytes - both.held_bytes == part - part // 4


def test_variants_of_the_options_are_compiled():
    found = plan(
        make_trainer,
        "cpu:8",
        per_replica_batch=512,
        steps_per_loop=1,
        variants=[{"accumulate_steps": 8}, {"accumulate_steps": 3}],
    )
    in_parts, impossible = found.variants
    assert in_parts.memory.temporaries < found.memory.temporaries / 2
    assert impossible.memory is None
    assert "accumulate_steps" in str(impossible.error)
    saved = found.memory.total - in_parts.memory.total
    table = str(found)
    assert "with accumulate_steps=8" in table
    assert f"{saved / 1e6:.2f} MB less" in table
    assert "not possible: " in table
    record = json.loads(found.as_json())
    assert record["variants"][0]["options"] == {"accumulate_steps": 8}
    assert record["variants"][0]["memory"]["total"] == in_parts.memory.total


def test_wrong_variants_are_errors_before_anything_is_compiled():
    trainer = make_trainer()
    with pytest.raises(ValueError, match="'remats', which is not an option"):
        plan(trainer, "cpu:8", variants=[{"remats": True}])
    with pytest.raises(ValueError, match="with `abstract=True` nothing is compiled"):
        plan(trainer, 8, abstract=True, variants=[{"accumulate_steps": 2}])
    with pytest.raises(TypeError, match="variants"):
        plan(trainer, "cpu:8", variants="accumulate_steps")


def test_the_peak_names_the_temporaries_of_a_step():
    found = plan(make_trainer, "cpu:8", per_replica_batch=256)
    largest, *_ = found.peak
    # The layer's activations of the examples on a device, which the CPU widens.
    assert tuple(json.loads(largest.shape[3:])) == (256, 4 * WIDTH)
    assert largest.num_bytes == 4 * 256 * 4 * WIDTH
    assert "transpose(jvp" in largest.made_by
    total = sum(each.num_bytes for each in found.peak)
    assert 0.7 * found.memory.temporaries < total <= found.memory.temporaries
    assert "f32[256,256]" in str(found)
    assert json.loads(found.as_json())["peak"][0] == dataclasses.asdict(largest)


def test_groups_of_a_mesh_of_several_axes_and_slow_links():
    def make():
        return make_trainer(dcn={"data": 2})

    found = plan(make, "cpu:2x8")
    assert found.mesh == {"data": 4, "fsdp": 4, "tensor": 1}
    assert {each.group_size for each in found.of_step("all-gather")} == {4}
    sizes = {each.group_size for each in found.of_step("all-reduce")}
    assert {4} <= sizes <= {4, 16}
    # Parameters are collected inside a host. Gradients cross the slow links.
    assert not any(each.is_slow for each in found.of_step("all-gather"))
    slow = [each for each in found.of_step("all-reduce") if each.is_slow]
    assert slow
    sent = sum(each.num_bytes * each.times for each in slow)
    assert (
        found.slow_bytes
        == sent
        < sum(each.num_bytes * each.times for each in found.of_step())
    )
    assert found.num_groups == 2
    assert "between 2 groups of devices" in str(found)
    without = plan(make_trainer, "cpu:16")
    assert without.num_groups == 1
    assert "over slow links" not in str(without)


def test_devices_whose_groups_do_not_fit_dcn_are_an_error():
    def make():
        return make_trainer(dcn={"data": 2})

    message = r"`dcn` of the strategy is \{'data': 2\}.*'cpu:4x4' has 4 hosts"
    with pytest.raises(ValueError, match=message):
        plan(make, "cpu:4x4")
    with pytest.raises(ValueError, match="'4xv5e:2x2' has 4 slices"):
        plan(make, "4xv5e:2x2", abstract=True)


def test_a_function_that_makes_no_trainer_is_an_error():
    with pytest.raises(TypeError, match="StandardTrainer"):
        plan(lambda: "a trainer", 8, abstract=True)


@pytest.mark.slow
def test_a_decoder_of_70_billion_parameters_is_planned_in_little_memory(tmp_path):
    target = tmp_path / "plan.json"
    program = Path(decoder.__file__)
    words = ["plan", f"{program}:make_trainer", "--topology", "cpu:64"]
    code = (
        "import re, resource, sys; from armillary._cli import main; "
        f"code = main([*{words!r}, '--json', {str(target)!r}]); "
        # `ru_maxrss` of a process begins with the size of its parent.
        "status = open('/proc/self/status').read(); "
        "own = int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]); "
        "children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss; "
        "print(max(own, children)); sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "PYTHONPATH": str(Path(armillary.__file__).parents[1])},
    )
    kilobytes = int(result.stdout.splitlines()[-1])
    assert kilobytes < 10**6
    found = json.loads(target.read_text())
    assert found["state_bytes"] > 12 * 70e9
    assert found["state_bytes_per_device"] < found["state_bytes"] / 63
    assert found["mesh"] == {"data": 1, "fsdp": 64, "tensor": 1}
    # No device holds the model, which is 282 GB.
    assert found["memory"]["temporaries"] < 4 * 70e9 / 5
    assert found["peak"][0]["shape"] == "f32[80,1,4096,8192]"


@pytest.mark.slow
def test_the_command_runs_a_program_for_more_devices_than_there_are():
    words = ["plan", f"{shapes.__file__}:make_controller", "--topology", "cpu:16"]
    result = subprocess.run(
        [sys.executable, "-m", "armillary", *words, "--try", "steps_per_chunk=5"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "PYTHONPATH": str(Path(armillary.__file__).parents[1])},
    )
    assert "1, over data=4, fsdp=4, tensor=1" in result.stdout
    assert "2 each, 32 global" in result.stdout
    assert "with steps_per_chunk=5" in result.stdout


def test_a_controller_with_checkpoints_is_planned_and_restores_nothing(tmp_path):
    def make(name="checkpoints"):
        trainer = make_trainer()
        checkpoint = armillary.Checkpoint(trainer=trainer)
        return armillary.Controller(
            trainer=trainer,
            global_step=trainer.optimizer.step,
            strategy=trainer.strategy,
            steps_per_loop=4,
            checkpoint_manager=armillary.CheckpointManager(checkpoint, tmp_path / name),
        )

    make().train(4)
    saved = sorted(each.name for each in (tmp_path / "checkpoints").iterdir())
    found = plan(make, 8, abstract=True)
    assert figures(found) == figures(plan(make_trainer, 8, abstract=True))
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == saved
