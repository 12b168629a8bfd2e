"""Tests of meshes with any axes, which a user gives as sizes or as a mesh of JAX."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import armillary
from armillary import ShardedStrategy
from armillary.distribute.strategies._mesh import _arrange
from tests.distribute.identity import IdentityTrainer
from tests.mistakes import mistakes
from tests.tiers import slow_after_first

SIZE = 64
X = np.random.default_rng(0).normal(size=(48, SIZE)).astype(np.float32)
KINDS = [AxisType.Auto, AxisType.Explicit]


def make_mesh(kind, shape=(2, 4), names=("data", "model")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


class Net(nnx.Module):
    """Two layers, with a name for each axis of their kernels."""

    def __init__(self, first, second, dtype=jnp.float32):
        init = nnx.initializers.lecun_normal()
        rngs = nnx.Rngs(0)
        options = {"param_dtype": dtype, "rngs": rngs}
        self.up = nnx.Linear(
            SIZE, 2 * SIZE, kernel_init=nnx.with_partitioning(init, first), **options
        )
        self.down = nnx.Linear(
            2 * SIZE, SIZE, kernel_init=nnx.with_partitioning(init, second), **options
        )

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def make_net(*names, dtype=jnp.float32):
    with nnx.use_eager_sharding(False):
        return Net(*names, dtype=dtype)


def train(strategy, model, **options):
    """Returns the loss after some steps, and the divisions of the two kernels."""
    trainer = IdentityTrainer(strategy, model, X, **options)
    loss = float(trainer.train(4)["loss"])
    moments = trainer.optimizer.opt_state[0].mu
    specs = []
    for name in ("up", "down"):
        kernel = getattr(model, name).kernel[...]
        assert kernel.sharding == getattr(moments, name).kernel[...].sharding
        specs.append(getattr(kernel.sharding, "spec", None))
    return loss, specs


@functools.cache
def train_on_one_device(dtype=jnp.float32):
    """Returns the loss, and the first kernel."""
    model = make_net(None, None, dtype=dtype)
    loss, _ = train(armillary.OneDeviceStrategy("cpu:0"), model)
    return loss, np.asarray(model.up.kernel[...])


def loss_of_one_device():
    loss, _ = train_on_one_device()
    return loss


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_mesh_of_jax_is_taken_as_it_is(kind):
    strategy = ShardedStrategy(make_mesh(kind))
    assert strategy.mesh.shape == {"data": 2, "model": 4}
    loss, specs = train(strategy, make_net((None, "model"), ("model", None)))
    assert specs == [PartitionSpec(None, "model"), PartitionSpec("model", None)]
    assert loss == pytest.approx(loss_of_one_device(), rel=1e-5)


def test_a_function_makes_the_mesh():
    strategy = ShardedStrategy(lambda: make_mesh(AxisType.Explicit, (8,), ("x",)))
    assert strategy.mesh.axis_names == ("x",)
    assert strategy.layout.axes == ("x",)


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({"fsdp": 8}, ("data", "fsdp", "tensor")),
        ({"tensor": 2, "data": 4}, ("data", "fsdp", "tensor")),
        ({"stage": 2, "fsdp": 4}, ("data", "stage", "fsdp", "tensor")),
        ({"fsdp": 4, "stage": 2}, ("data", "fsdp", "stage", "tensor")),
        ({"data": 2, "context": 4}, ("data", "fsdp", "context", "tensor")),
    ],
)
def test_usual_axes_are_always_there(sizes, names):
    strategy = ShardedStrategy(sizes, {"up/kernel": PartitionSpec("tensor")})
    assert strategy.mesh.axis_names == names
    assert dict(strategy.mesh.shape) == {name: sizes.get(name, 1) for name in names}


@slow_after_first(
    ("mesh", "batch_axes", "expected"),
    [
        ({"data": 2, "context": 4}, None, ("data", "fsdp")),
        ({"data": 2, "context": 4}, ("context",), ("context",)),
        ({"a": 2, "b": 2, "c": 2}, ("c", "a"), ("c", "a")),
    ],
)
def test_batches_are_divided_over_the_axes_that_a_user_names(
    mesh, batch_axes, expected
):
    strategy = ShardedStrategy(mesh, batch_axes=batch_axes)
    assert strategy.layout.axes == expected
    (batch,) = strategy.distribute_dataset([X[:16]])
    count = np.prod([strategy.mesh.shape[axis] for axis in expected])
    seen = strategy.run(lambda batch: batch, args=(batch,))
    assert seen.addressable_shards[0].data.shape == (16 // count, SIZE)
    loss, _ = train(strategy, make_net(None, None))
    assert loss == pytest.approx(loss_of_one_device(), rel=1e-5)


def test_a_mesh_of_one_axis_has_no_replicas():
    """So options that compare or combine replicas have nothing to do."""
    strategy = ShardedStrategy(make_mesh(AxisType.Auto, (8,), ("model",)))
    assert strategy.num_replicas_in_sync == 1
    loss, _ = train(
        strategy,
        make_net((None, "model"), None),
        on_non_finite="skip",
        check_replicas_every=2,
    )
    assert loss == pytest.approx(loss_of_one_device(), rel=1e-5)


def test_arrays_on_a_mesh_with_explicit_axes_keep_their_division():
    mesh = make_mesh(AxisType.Explicit)
    strategy = ShardedStrategy(mesh)
    model = make_net(None, None)
    own = NamedSharding(mesh, PartitionSpec("model", "data"))
    model.up.kernel.set_value(jax.device_put(model.up.kernel[...], own))
    loss, specs = train(strategy, model)
    assert specs[0] == own.spec
    assert loss == pytest.approx(loss_of_one_device(), rel=1e-5)


def test_a_step_names_axes_of_the_mesh_without_the_mesh():
    strategy = ShardedStrategy({"data": 2, "context": 4})
    spec = PartitionSpec("data", "context")

    @armillary.function(strategy=strategy)
    def outside(x):
        return jax.lax.with_sharding_constraint(2 * x, spec)

    def inside(x):
        def roll(part):
            ring = [(i, (i + 1) % 4) for i in range(4)]
            return jax.lax.ppermute(part, "context", ring)

        x = jax.lax.with_sharding_constraint(2 * x, spec)
        return jax.shard_map(roll, in_specs=spec, out_specs=spec)(x)

    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert outside(x).sharding.spec == spec
    rolled = strategy.run(inside, args=(x,))
    np.testing.assert_array_equal(rolled, np.roll(2 * x, 2, axis=1))
    assert jax.sharding.get_abstract_mesh().empty


def test_the_scope_is_the_mesh_of_jax_and_the_names_of_flax():
    strategy = ShardedStrategy(
        {"data": 2, "fsdp": 4}, logical_rules={"embed": "fsdp", "mlp": None}
    )
    with strategy.scope():
        model = Net(("embed", "mlp"), ("mlp", "embed"))
        with strategy.scope():
            assert jax.sharding.get_mesh() == strategy.mesh
    assert jax.sharding.get_mesh().empty
    assert model.up.kernel[...].sharding.spec == PartitionSpec("fsdp", None)

    armillary.set_strategy(strategy)
    assert jax.sharding.get_mesh() == strategy.mesh
    armillary.set_strategy(None)
    assert jax.sharding.get_mesh().empty


def test_constraints_of_linen_use_the_names():
    strategy = ShardedStrategy({"fsdp": 4, "tensor": 2}, logical_rules={"b": "tensor"})

    def step_fn(x):
        return linen.with_logical_constraint(2 * x, ("b", None))

    found = strategy.run(step_fn, args=(np.ones((8, 4), np.float32),))
    assert found.sharding.spec[0] == "tensor"


MESHES = [
    {"data": 8},
    {"data": 2, "model": 4},
    {"a": 2, "b": 2, "c": 2},
    {"fsdp": 4, "expert": 2},
]


@slow_after_first("kind", KINDS, ids=str)
@slow_after_first("dtype", [jnp.float64, jnp.float32], ids=["float64", "float32"])
@slow_after_first("seed", range(6))
def test_drawn_annotations_are_followed_and_change_no_number(seed, dtype, kind):
    draw = random.Random(seed)
    sizes = draw.choice(MESHES)
    axes = list(sizes)

    def draw_names():
        free = draw.sample(axes, len(axes))
        return tuple(free.pop() if free and draw.random() < 0.6 else None for _ in "12")

    names = [draw_names(), draw_names()]
    batch_axes = tuple(draw.sample(axes, draw.randint(1, len(axes))))
    mesh = make_mesh(kind, tuple(sizes.values()), tuple(axes))
    with jax.enable_x64(dtype == jnp.float64):
        strategy = ShardedStrategy(mesh, batch_axes=batch_axes)
        model = make_net(*names, dtype=dtype)
        loss, specs = train(strategy, model)
        expected, expected_kernel = train_on_one_device(dtype)
        kernel = np.asarray(model.up.kernel[...])
    for spec, drawn in zip(specs, names, strict=True):
        is_whole = not any(drawn) and spec == PartitionSpec()
        assert is_whole or spec == PartitionSpec(*drawn)
    is_double = dtype == jnp.float64
    assert loss == pytest.approx(expected, rel=1e-6 if is_double else 1e-5)
    exactness = 1e-12 if is_double else 1e-4
    np.testing.assert_allclose(kernel, expected_kernel, rtol=0, atol=exactness)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of a machine that is not there."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def make_devices(num_slices):
    return [
        Device(i, process_index=i // 2, slice_index=i * num_slices // 8)
        for i in range(8)
    ]


@pytest.mark.parametrize(
    ("num_slices", "sizes", "dcn"),
    [
        (2, {"data": 2, "fsdp": 4}, {"data": 2}),
        (2, {"data": 4, "fsdp": 2}, {"data": 2}),
        (2, {"fsdp": 4, "data": 2}, {"fsdp": 2}),
        (1, {"data": 4, "fsdp": 2}, {"data": 4}),
        (1, {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2}),
    ],
)
def test_only_the_axes_of_dcn_cross_between_groups(num_slices, sizes, dcn):
    devices = make_devices(num_slices)
    arranged = _arrange(devices, sizes, dcn)
    assert arranged.shape == tuple(sizes.values())
    for axis, (name, size) in enumerate(sizes.items()):
        rows = np.moveaxis(arranged, axis, -1).reshape(-1, size)
        for row in rows:
            groups = [d.slice_index if num_slices > 1 else d.process_index for d in row]
            assert len(set(groups)) == dcn.get(name, 1)
            assert groups == sorted(groups)


def test_groups_that_do_not_exist_are_an_error():
    sizes = {"data": 4, "fsdp": 2}
    with pytest.raises(ValueError, match=r"`dcn` is .*2 groups.*of 4 processes"):
        _arrange(make_devices(1), sizes, {"data": 2})
    with pytest.raises(ValueError, match=r"`dcn` .*2 groups.*of 1 process\."):
        ShardedStrategy(sizes, dcn={"data": 2})


@pytest.mark.parametrize(
    ("mesh", "batch_axes", "grown"),
    [
        (None, None, {"data": 1, "fsdp": 32, "tensor": 1}),
        ({"fsdp": 4, "tensor": 2}, None, {"data": 4, "fsdp": 4, "tensor": 2}),
        (
            {"context": 8},
            ("fsdp",),
            {"data": 1, "fsdp": 4, "context": 8, "tensor": 1},
        ),
    ],
)
def test_a_plan_for_more_devices_grows_one_axis(mesh, batch_axes, grown):
    strategy = ShardedStrategy(mesh, batch_axes=batch_axes)
    with strategy.described(32, "tpu") as described:
        assert dict(described.shape) == grown


@mistakes(
    {
        TypeError: {
            r"`mesh` is 'fsdp' of type str.*\{\"fsdp\": 8\}": (
                lambda: ShardedStrategy("fsdp")
            ),
            r"`mesh` .* 3 of type int": lambda: ShardedStrategy({3: 8}),
            r"`mesh\(\)` is None": lambda: ShardedStrategy(lambda: None),
            r"`batch_axes` .*\(\"data\",\)": (
                lambda: ShardedStrategy(batch_axes="data")
            ),
            r"`dcn` is 2": lambda: ShardedStrategy({"data": 8}, dcn=2),
        },
        ValueError: {
            r"`batch_axes` has 'tp', .*\['data', 'model'\]": (
                lambda: ShardedStrategy(make_mesh(AxisType.Auto), batch_axes=["tp"])
            ),
            r"`batch_axes` is .*repeats": (
                lambda: ShardedStrategy(batch_axes=["fsdp", "fsdp"])
            ),
            r"`devices` has no meaning": (
                lambda: ShardedStrategy(make_mesh(AxisType.Auto), devices=jax.devices())
            ),
            r"`dcn` has no meaning": (
                lambda: ShardedStrategy(make_mesh(AxisType.Auto), dcn={"data": 2})
            ),
            r"`dcn` has an axis 'fsdp', .*\['data'\]": (
                lambda: ShardedStrategy({"data": 8}, dcn={"fsdp": 2})
            ),
            r"`dcn` divides the axis 'data' into 3 groups, but its size is 8": (
                lambda: ShardedStrategy({"data": 8}, dcn={"data": 3})
            ),
            r"`dcn\[\"data\"\]` is 0": (
                lambda: ShardedStrategy({"data": 8}, dcn={"data": 0})
            ),
            r"axis_name.*'model'": (
                lambda: ShardedStrategy(make_mesh(AxisType.Auto), axis_name="model")
            ),
            r"`rules\[\"up\"\]` .*'fsdp'.*\['data', 'model'\]": (
                lambda: ShardedStrategy(
                    make_mesh(AxisType.Auto), {"up": PartitionSpec("fsdp")}
                )
            ),
        },
    }
)
def test_a_mesh_that_cannot_be_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_mesh_that_leaves_devices_out_is_fine():
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    loss, _ = train(ShardedStrategy(mesh), make_net((None, "model"), None))
    assert loss == pytest.approx(loss_of_one_device(), rel=1e-5)


def test_the_earlier_name_of_the_argument_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match="`mesh=`"):
        strategy = ShardedStrategy(mesh_shape={"fsdp": 8})
    assert strategy.mesh.shape["fsdp"] == 8


@pytest.mark.parametrize("place", ["argument", "captured"])
def test_arrays_on_a_mesh_with_explicit_axes_may_be_arguments(place):
    mesh = make_mesh(AxisType.Explicit)
    x = jax.device_put(X[:16], NamedSharding(mesh, PartitionSpec("data")))
    strategy = ShardedStrategy(mesh)
    if place == "argument":
        for call in (strategy.run, armillary.function(strategy.run, strategy=strategy)):
            found = call(lambda x: (2 * x).sum(), (x,))
            np.testing.assert_allclose(found, 2 * X[:16].sum(), rtol=1e-5)
        return
    with pytest.raises(ValueError, match="aval mesh") as caught:
        strategy.run(lambda: (2 * x).sum())
    assert "Pass the array as an argument" in "\n".join(caught.value.__notes__)


class EagerTrainer(IdentityTrainer):
    """Names an axis of the mesh in its step and in a hook."""

    def train_step(self, iterator):
        def step_fn(batch):
            x = jax.lax.with_sharding_constraint(batch["x"], PartitionSpec("data"))
            self.loss.update(loss=jnp.abs(x).mean())

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self):
        kernel = self.model.up.kernel[...]
        spec = PartitionSpec(None, "model")
        divided = jax.lax.with_sharding_constraint(kernel, spec)
        return {"sum": jnp.abs(divided).sum()}


@pytest.mark.parametrize("compile_step", [True, False])
def test_steps_and_hooks_name_axes_compiled_or_not(compile_step):
    strategy = ShardedStrategy(make_mesh(AxisType.Auto))
    model = make_net(None, None)
    expected = np.abs(np.asarray(model.up.kernel[...])).sum()
    trainer = EagerTrainer(
        strategy, model, X, compile_step=compile_step, compile_loop=compile_step
    )
    with strategy.scope():
        found = trainer.train(2)["sum"]
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_two_names_of_one_argument_are_refused():
    with pytest.raises(ValueError, match="two names of one argument"):
        ShardedStrategy({"fsdp": 8}, mesh_shape={"fsdp": 8})


def test_a_controller_saves_and_restores_within_the_scope(tmp_path):
    strategy = ShardedStrategy(make_mesh(AxisType.Auto))
    with strategy.scope():
        for steps in (2, 4):
            trainer = IdentityTrainer(strategy, make_net((None, "model"), None), X)
            controller = armillary.Controller(
                trainer=trainer,
                global_step=trainer.optimizer.step,
                steps_per_loop=2,
                checkpoint_manager=armillary.CheckpointManager(
                    armillary.Checkpoint(trainer=trainer), tmp_path
                ),
            )
            controller.train(steps)
    assert int(trainer.optimizer.step[...]) == 4
    kernel = trainer.model.up.kernel[...]
    assert kernel.sharding.spec == PartitionSpec(None, "model")
