"""Tests of plans without a compiler, and of their errors."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export
from jax.sharding import PartitionSpec

import armillary
from armillary._cli import main
from armillary.errors import PlanError
from armillary.plan import Memory, Plan, plan
from armillary.plan._compiler import export_loop
from armillary.plan._costs import COLLECTIVE_KINDS, find_traced
from armillary.plan._plan import find_largest
from armillary.plan._targets import parse_topology
from armillary.trainer._described import described
from tests.plan.digits_mlp import (
    BATCH_SIZE,
    NUM_PARAMETERS,
    Trainer,
    cross_entropy,
    make_arrays,
    make_trainer,
)
from tests.tiers import slow_after_first

MB = 10**6


@pytest.fixture(autouse=True)
def no_wheels(monkeypatch):
    monkeypatch.delenv("ARMILLARY_PLAN_WHEELS", raising=False)


@pytest.mark.slow
def test_an_abstract_plan_has_the_sums_and_the_work_of_any_number_of_replicas():
    for count in (8, 1000):
        found = plan(make_trainer(), count, abstract=True)
        assert (found.num_replicas, found.per_replica_batch) == (count, BATCH_SIZE)
        assert found.global_batch == count * BATCH_SIZE
        # The gradients, and of the metric the sum and the count.
        reduced = sum(each.num_bytes for each in found.of_step("all-reduce"))
        assert reduced == 4 * NUM_PARAMETERS + 8
        assert found.of_step() == found.of_step("all-reduce")
        # Forward, the gradient of each kernel, and of the hidden layer.
        work = 2 * BATCH_SIZE * (2 * 64 * 128 + 3 * 128 * 10)
        assert found.flops == {"float32": work}
        # Parameters, Adam's two moments, its count, the step, and the metric.
        assert found.state_bytes == 3 * 4 * NUM_PARAMETERS + 4 + 4 + 8
        assert found.memory is found.fits is None


@pytest.mark.slow
def test_gradients_in_another_dtype_send_half_the_bytes():
    class Halved(Trainer):
        def improve(self, batch):
            def loss_fn(model):
                losses = cross_entropy(model(batch["image"]), batch["label"])
                return armillary.compute_average_loss(losses)

            grads = nnx.grad(loss_fn)(self.model)
            grads = armillary.all_reduce("sum", grads, dtype=jnp.bfloat16)
            self.optimizer.update(self.model, grads)

    found = plan(make_trainer(kind=Halved), 8, abstract=True)
    reduced = [each.num_bytes for each in found.of_step("all-reduce")]
    assert sum(reduced) == 2 * NUM_PARAMETERS


@pytest.mark.slow
def test_a_plan_shows_the_groups_of_cross_device_operations():
    ops = armillary.distribute.HierarchicalCopyAllReduce(devices_per_group=4)
    strategy = armillary.MirroredStrategy(jax.devices()[:4], cross_device_ops=ops)
    source = armillary.data.from_arrays(make_arrays(), batch_size=BATCH_SIZE)
    trainer = Trainer(strategy, strategy.distribute_dataset(source))
    found = plan(trainer, 8, abstract=True)
    scattered = found.of_step("reduce-scatter")
    assert [each.group_size for each in scattered] == [4, 2]
    inside, across = (each.num_bytes for each in scattered)
    assert 4 * NUM_PARAMETERS <= inside < 4 * (NUM_PARAMETERS + 8)
    assert across == inside / 4


def test_a_trace_shows_collectives_of_every_kind():
    axis = ("replica",)

    def step(x):
        sizes = jnp.ones((4, 2), int)
        return (
            jax.lax.psum(x, axis),
            jax.lax.all_gather(x, axis),
            jax.lax.psum_scatter(x, axis),
            jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
            jax.lax.ragged_all_to_all(x, x, *sizes, axis_name=axis),
            jax.lax.ppermute(x, axis, [(0, 1), (1, 0)]),
            jax.lax.pbroadcast(x, axis, 0),
        )

    program = jax.make_jaxpr(step, axis_env=[("replica", 2)])(jnp.ones(2))
    found = list(find_traced(program, {"replica": 2}, {}))

    assert sorted(each.kind for each in found) == sorted(COLLECTIVE_KINDS)
    assert {each.num_bytes for each in found if each.kind != "all-gather"} == {8}


@pytest.mark.slow
def test_replicas_keep_their_batch_unless_another_is_asked_for():
    on_four = make_trainer(4)
    assert plan(on_four, 16, abstract=True).per_replica_batch == BATCH_SIZE // 4
    found = plan(on_four, "v5e:4x4", abstract=True, per_replica_batch=3)
    assert (found.num_replicas, found.global_batch) == (16, 48)


def make_sharded(**options):
    source = armillary.data.from_arrays(make_arrays(), batch_size=BATCH_SIZE)
    strategy = armillary.ShardedStrategy(**options)
    return Trainer(strategy, strategy.distribute_dataset(source))


@pytest.mark.slow
def test_each_device_has_a_part_of_a_sharded_state():
    rules = {"hidden/kernel": PartitionSpec("fsdp", "tensor")}
    trainer = make_sharded(mesh={"fsdp": 4, "tensor": 2}, rules=rules)
    before = repr(trainer.strategy)
    found = plan(trainer, 64, abstract=True)
    assert found.mesh == {"data": 8, "fsdp": 4, "tensor": 2}
    # A batch of 64 on 4 devices becomes one for 32.
    assert (found.per_replica_batch, found.global_batch) == (16, 512)
    assert found.num_replicas == 1
    hidden, output = 64 * 128 // 8, 128 * 10 // 4
    assert found.held_bytes == 3 * 4 * (hidden + 128 + output + 10) + 16
    assert found.state_bytes == plan(make_trainer(), 8, abstract=True).state_bytes
    work = 2 * 512 * (2 * 64 * 128 + 3 * 128 * 10)
    assert found.flops == {"float32": work / 64}
    assert "1, over data=8, fsdp=4, tensor=2" in str(found)
    assert "not known before a compiler divides the step" in str(found)
    # The strategy is on its own devices again.
    assert repr(trainer.strategy) == before
    trainer.train(2)


def test_a_step_is_divided_on_a_mesh_of_one_axis():
    trainer = make_sharded(mesh=jax.make_mesh((8,), ("fsdp",)))
    found = plan(trainer, 64, abstract=True)
    assert (found.mesh, found.num_replicas) == ({"fsdp": 64}, 1)
    work = 2 * found.global_batch * (2 * 64 * 128 + 3 * 128 * 10)
    assert found.flops == {"float32": work / 64}
    assert "not known before a compiler divides the step" in str(found)


def test_devices_that_a_mesh_does_not_divide_are_an_error():
    trainer = make_sharded(mesh={"fsdp": 4, "tensor": 2})
    message = r"12 devices to plan for, which `mesh` does not divide: it has 4 al"
    with pytest.raises(ValueError, match=message):
        plan(trainer, 12, abstract=True)


@pytest.mark.slow
def test_planning_leaves_the_trainer_its_strategy_and_its_data_as_they_were():
    planned, other = make_trainer(2), make_trainer(2)
    plan(planned, "v5e:2x2", abstract=True)
    assert planned.strategy.num_replicas_in_sync == 2
    assert planned.train(3) == other.train(3)
    plan(planned, "v5e:2x2", abstract=True)
    assert planned.train(3) == other.train(3)
    kernels = [trainer.model.hidden.kernel[...] for trainer in (planned, other)]
    assert np.array_equal(*kernels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"on_non_finite": "skip"},
        {"check_replicas_every": 2},
        {"compile_hooks": False},
        {"input_options": armillary.data.InputOptions(place_on_device=True)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_kind_of_loop_can_be_planned(options):
    found = plan(make_trainer(**options), 8, abstract=True)
    sums = [each.num_bytes for each in found.of_step("all-reduce")]
    assert 4 * NUM_PARAMETERS + 8 <= sum(sums) <= 4 * NUM_PARAMETERS + 16


class InParts(Trainer):
    def improve(self, batch):
        def loss_fn(batch):
            losses = cross_entropy(self.model(batch["image"]), batch["label"])
            return armillary.compute_average_loss(losses)

        _, gradients = armillary.value_and_grad(loss_fn, self.model, batch=batch)
        gradients = armillary.all_reduce("sum", gradients)
        self.optimizer.update(self.model, gradients)


@slow_after_first("parts", [1, 4])
def test_a_step_in_parts_is_planned_in_parts(parts):
    trainer = make_trainer(kind=InParts, accumulate_steps=parts)
    with described(trainer, 8, "cpu", per_replica_batch=32) as loop:
        program = str(loop.step)
    assert ("f32[32,128]" in program) == (parts == 1)
    assert ("f32[8,128]" in program) == (parts == 4)
    found = plan(trainer, 8, per_replica_batch=32, abstract=True)
    assert json.loads(found.as_json())["accumulate_steps"] == parts
    assert ("32 each, 256 global, in 4 parts" in str(found)) == (parts == 4)


class PrintsFromTheDevice(Trainer):
    def improve(self, batch):
        jax.debug.print("{}", batch["label"][0])
        super().improve(batch)


class HasItsOwnLoop(Trainer):
    def train(self, num_steps):
        return {}


def test_programs_that_cannot_be_planned_are_errors(tmp_path, monkeypatch):
    def fails(error, message, *arguments, **options):
        with pytest.raises(error, match=message):
            plan(*arguments, **options)

    trainer = make_trainer()
    fails(ValueError, "describes no devices", trainer, 8)
    own = make_trainer(kind=HasItsOwnLoop)
    fails(ValueError, "overrides `train`, so it", own, 8, abstract=True)
    prints = make_trainer(kind=PrintsFromTheDevice)
    fails(
        PlanError,
        r"`train_step` calls Python from the device \(debug.*test_plan.py:\d+",
        prints,
        8,
        abstract=True,
    )
    single = make_trainer()
    single.strategy = armillary.OneDeviceStrategy("cpu:0")
    single.train_dataset = single.strategy.distribute_dataset([{"x": np.ones((2, 1))}])
    fails(ValueError, "is for one device", single, 8, abstract=True)


@pytest.mark.parametrize("make", [make_trainer, make_sharded])
def test_a_process_of_a_job_plans_alone(make, monkeypatch):
    trainer = make()
    placement = trainer.strategy.placement
    layout = replace(placement.layout, peers=SimpleNamespace(count=2, is_alone=False))
    monkeypatch.setattr(
        trainer.strategy, "placement", replace(placement, layout=layout)
    )
    with trainer.strategy.described(16, "cpu") as mesh:
        assert mesh.size == 16
        assert trainer.strategy.layout.peers.is_alone
    assert trainer.strategy.layout is layout


def test_a_missing_compiler_is_an_error_that_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ARMILLARY_PLAN_WHEELS", str(tmp_path))
    for topology, package in (
        ("v5e:2x2", "libtpu"),
        ("h100:1x8", f"jax-cuda13-plugin=={jax.__version__}"),
    ):
        with pytest.raises(PlanError) as error:
            plan(make_trainer(), topology)
        assert str(tmp_path) in str(error.value)
        assert f"pip install --no-deps --target plan-wheels {package}" in (
            str(error.value).replace("'", "")
        )


def test_a_search_for_a_batch_needs_the_memory_of_a_device():
    with pytest.raises(ValueError, match=r"`find_batch` is True.*'cpu:4'.*`target="):
        plan(make_trainer, "cpu:4", find_batch=True)


@pytest.mark.parametrize("limit", [0, 1, 5, 63, 64, 65, 1000])
def test_the_search_for_a_batch_ends_within_an_eighth_of_the_limit(limit):
    found = find_largest(64, limit >= 64, lambda size: size <= limit)
    assert found <= limit <= found + max(0, found // 8)


@pytest.mark.parametrize("limit", [0, 7, 8, 36, 64, 100])
def test_the_search_for_a_batch_keeps_it_divisible_into_parts(limit):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= limit

    found = find_largest(64, limit >= 64, fits, unit=8)
    assert all(size % 8 == 0 for size in [*tried, found])
    assert found <= limit < found + max(8, found // 8 + 8)


def test_a_plan_is_a_table_and_json():
    found = plan(make_trainer(), "v5e:16x16", abstract=True)
    table = str(found)
    assert "v5e:16x16: traced, not compiled" in table
    assert "64 each, 16384 global" in table
    assert max(map(len, table.splitlines())) <= 88
    record = json.loads(found.as_json())
    assert record["num_replicas"] == 256
    assert record["fits"] is None
    assert record["collectives"][0]["kind"] == "all-reduce"


def test_memory_is_the_sum_that_a_device_holds_at_the_same_time():
    memory = Memory(
        arguments=10 * MB,
        donated=6 * MB,
        temporaries=4 * MB,
        outputs=7 * MB,
        code=MB,
        batches_ahead=2 * MB,
    )
    assert memory.total == 18 * MB
    found = Plan(
        parse_topology("v5e:1x1"), {"replica": 1}, 1, 1, 1, 1, 1, {}, is_abstract=False
    )
    assert found.fits is False
    assert "the compiler needs more of 16 GB" in str(found)
    found.memory = memory
    assert found.fits is True
    assert "fits: 18 MB of 16 GB" in str(found)


@pytest.mark.slow
def test_the_command_prints_the_plan_and_writes_it(tmp_path, capsys):
    program = __file__.replace("test_plan.py", "digits_mlp.py")
    target = tmp_path / "plan.json"
    words = ["plan", f"{program}:make_controller", "--topology", "64", "--abstract"]
    assert main([*words, "--json", str(target)]) == 0
    assert "64: traced, not compiled" in capsys.readouterr().out
    assert json.loads(target.read_text())["steps_per_program"] == 100
    assert main([*words[:3], "v5e:2x2"]) == 2
    assert "pip install --no-deps" in capsys.readouterr().err
    with pytest.raises(
        SystemExit, match=r"has no function 'nothing'. It has .*make_con"
    ):
        main(["plan", f"{program}:nothing", "--topology", "8", "--abstract"])


def test_the_compiling_process_needs_no_armillary():
    worker = armillary.plan.__file__.replace("__init__", "_compile_worker")
    code = (
        f"import runpy, sys; runpy.run_path({worker!r}); "
        "print([name for name in sys.modules if name in ('armillary', 'jax')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
def test_convolutions_of_a_plan_are_divided_as_those_that_run():
    class Images(armillary.StandardTrainer):
        def __init__(self):
            self.strategy = armillary.ShardedStrategy({"data": 2, "fsdp": 4})
            images = np.ones((16, 8, 8, 2), np.float32)
            source = armillary.data.from_arrays(images, batch_size=16)
            super().__init__(self.strategy.distribute_dataset(source))
            self.conv = nnx.Conv(2, 4, (3, 3), rngs=nnx.Rngs(0))
            self.optimizer = nnx.Optimizer(self.conv, optax.sgd(0.1), wrt=nnx.Param)

        def train_step(self, iterator):
            self.strategy.run(self.improve, args=(next(iterator),))

        def improve(self, images):
            gradients = armillary.all_reduce(
                "sum", nnx.grad(lambda conv: conv(images).mean())(self.conv)
            )
            self.optimizer.update(self.conv, gradients)

    with described(Images(), 16, "cpu") as loop:
        text = export.deserialize(bytearray(export_loop(loop, "cpu"))).mlir_module()
    # Each convolution has two operands and a result. One sums over examples.
    lines = text.splitlines()
    (at,) = [i for i, line in enumerate(lines) if "stablehlo.convolution" in line]
    around = lines[at - 2 : at + 2]
    assert sum("sharding_constraint" in line for line in around) == 3
