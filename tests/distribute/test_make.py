"""Tests of `strategy.make`: arrays that are made on the devices where they belong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec

import armillary
from armillary import ShardedStrategy
from armillary.errors import ReplicaContextError, StateStructureError
from tests.mistakes import mistakes
from tests.problems import read_leaves

SIZE = 64
X = np.random.default_rng(0).normal(size=(16, SIZE)).astype(np.float32)
MAKERS = {
    "sharded": lambda: ShardedStrategy({"data": 2, "fsdp": 4}),
    "mirrored": lambda: armillary.MirroredStrategy(jax.devices()[:4]),
    "one device": lambda: armillary.OneDeviceStrategy("cpu:2"),
    "central": lambda: armillary.distribute.CentralStorageStrategy(jax.devices()[:2]),
    "default": armillary.get_strategy,
}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(SIZE, 2 * SIZE, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(2 * SIZE, SIZE, rngs=rngs)
        self.name = "net"

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.up(x))))


def make_nnx():
    model = Net(nnx.Rngs(0))
    return {
        "model": model,
        "optimizer": nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param),
    }


def make_linen():
    net = linen.Sequential([linen.Dense(2 * SIZE), linen.relu, linen.Dense(SIZE)])
    params = net.init(jax.random.key(0), X)
    return {"params": params, "opt": optax.adam(1e-2).init(params)}


def make_equinox():
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(SIZE, SIZE, 2 * SIZE, 2, key=jax.random.key(0))
    arrays = equinox.filter(model, equinox.is_array)
    return model, optax.adam(1e-2).init(arrays)


def make_keras():
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(2 * SIZE, "relu"), keras.layers.Dense(SIZE)]
    model = keras.Sequential([keras.Input((SIZE,)), *layers])
    model.build()
    return model


def as_numbers(value):
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


FRAMEWORKS = [make_nnx, make_linen, make_equinox, make_keras]


@pytest.mark.parametrize("strategy", MAKERS)
@pytest.mark.parametrize("make", FRAMEWORKS)
def test_arrays_equal_the_arrays_of_the_constructor(make, strategy):
    expected = read_leaves(make())

    found = read_leaves(MAKERS[strategy]().make(make))

    assert found.keys() == expected.keys()
    assert len(found) >= 4
    for path, value in found.items():
        assert not isinstance(value, jax.core.Tracer)
        np.testing.assert_allclose(
            as_numbers(value), as_numbers(expected[path]), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("make", FRAMEWORKS)
def test_arrays_are_divided_from_the_beginning(make):
    strategy = ShardedStrategy({"fsdp": 8})

    found = read_leaves(strategy.make(make))

    large = {path: x for path, x in found.items() if x.size >= 1024}
    assert large
    for path, value in large.items():
        assert value.sharding.mesh == strategy.mesh, path
        assert "fsdp" in value.sharding.spec, path
        part = value.addressable_shards[0].data
        assert part.size * 8 == value.size


def test_a_made_model_trains_as_one_that_was_made_elsewhere():
    def train(made, strategy):
        model, optimizer = made["model"], made["optimizer"]

        @armillary.function
        def step(x):
            def step_fn(x):
                def loss_fn(model):
                    return ((model(x) - x) ** 2).mean()

                loss, gradients = nnx.value_and_grad(loss_fn)(model)
                optimizer.update(model, gradients)
                return loss

            return strategy.run(step_fn, args=(x,))

        return [float(step(X)) for _ in range(3)]

    strategy = ShardedStrategy({"data": 2, "fsdp": 4})
    losses = train(strategy.make(make_nnx), strategy)
    assert losses == train(make_nnx(), strategy)
    alone = armillary.OneDeviceStrategy("cpu:0")
    np.testing.assert_allclose(losses, train(make_nnx(), alone), rtol=1e-5)


def test_the_first_step_takes_the_memory_of_a_made_array():
    strategy = MAKERS["sharded"]()
    made = strategy.make(lambda: nnx.Param(jnp.ones((64, 64))))
    own = nnx.Param(jnp.ones((64, 64)))
    first, kept = made[...], own[...]

    def step_fn():
        made[...] *= 2.0
        own[...] *= 2.0

    strategy.run(step_fn)
    assert first.is_deleted()
    np.testing.assert_array_equal(kept, np.ones((64, 64)))
    np.testing.assert_array_equal(made[...], own[...])


def test_the_first_pure_step_takes_the_memory_of_a_made_state():
    strategy = MAKERS["sharded"]()
    state = strategy.make(lambda: {"w": jnp.ones((64, 64)), "n": jnp.zeros(())})
    first = state["w"]
    both = {"first": state, "again": {"w": first}}

    def step(state, batch):
        del batch
        return jax.tree.map(lambda leaf: leaf + 1, state), {}

    data = armillary.data.from_arrays({"x": X}, batch_size=16, repeat=True)
    trainer = armillary.StepTrainer(step, both, data, strategy=strategy)
    # The array itself is in one place, and a copy in the other.
    held = [trainer.state[place]["w"] for place in ("again", "first")]
    assert [array is first for array in held] == [True, False]
    trainer.train(1)
    assert first.is_deleted()
    for place in ("first", "again"):
        np.testing.assert_array_equal(trainer.state[place]["w"], np.full((64, 64), 2.0))


def test_annotations_and_rules_decide_as_in_a_step():
    def make():
        init = nnx.with_partitioning(nnx.initializers.ones, ("embed", None))
        rngs = nnx.Rngs(0)
        return [
            nnx.Linear(SIZE, SIZE, kernel_init=init, rngs=rngs),
            nnx.Linear(SIZE, SIZE, rngs=rngs),
        ]

    strategy = ShardedStrategy(
        {"fsdp": 4, "tensor": 2},
        rules={"1/kernel": PartitionSpec(None, "tensor")},
        logical_rules={"embed": "tensor"},
    )
    first, second = strategy.make(make)
    assert first.kernel[...].sharding.spec == PartitionSpec("tensor", None)
    assert second.kernel[...].sharding.spec == PartitionSpec(None, "tensor")


def test_arguments_and_captured_arrays_reach_the_constructor():
    weights = jnp.arange(4096.0).reshape(64, 64)

    def make(scale, *, offset):
        return {"w": weights * scale + offset}

    strategy = ShardedStrategy({"fsdp": 8})
    made = strategy.make(make, 2.0, offset=1.0)
    np.testing.assert_array_equal(made["w"], 2 * weights + 1)
    expected = NamedSharding(strategy.mesh, PartitionSpec("fsdp"))
    assert made["w"].sharding.is_equivalent_to(expected, 2)


def test_a_constructor_runs_once_and_keeps_its_plain_values():
    calls = []

    def make():
        calls.append(1)
        return Net(nnx.Rngs(0))

    strategy = MAKERS["sharded"]()
    with strategy.scope():
        model = strategy.make(make)
    assert (model.name, model.down.out_features, calls) == ("net", SIZE, [1])
    model.name = "other"
    model.up.bias[...] += 1.0  # Flax refuses this for a variable of a trace.
    assert np.asarray(model.up.bias[...]).min() == 1.0


class Holder:
    """An object of a user with an array in a closure."""

    def __init__(self):
        scale = jnp.ones(3)
        self.call = lambda x: x * scale


def make_inside():
    strategy = MAKERS["mirrored"]()
    strategy.run(lambda: strategy.make(make_nnx))


def make_with_wrong_name():
    init = nnx.with_partitioning(nnx.initializers.ones, ("embed", None))
    ShardedStrategy().make(
        lambda: nnx.Linear(SIZE, SIZE, kernel_init=init, rngs=nnx.Rngs(0))
    )


@mistakes(
    {
        TypeError: {"`fn` is 3": lambda: ShardedStrategy().make(3)},
        StateStructureError: {
            r"(?s)`Holder`.*call/scale": lambda: ShardedStrategy().make(Holder),
        },
        ReplicaContextError: {r"`strategy\.make`.*inside": make_inside},
        ValueError: {r"kernel .*'embed'.*logical_rules": make_with_wrong_name},
    }
)
def test_constructors_that_cannot_be_traced_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_class_and_its_keys_are_enough():
    rngs = nnx.Rngs(0)
    expected = Net(nnx.Rngs(0))
    model = MAKERS["sharded"]().make(Net, rngs)
    np.testing.assert_allclose(
        model.down.kernel[...], expected.down.kernel[...], rtol=1e-6
    )
    # The key has counted the draws, as it does outside of `make`.
    own = nnx.Rngs(0)
    Net(own)
    assert int(rngs.default.count[...]) == int(own.default.count[...])
    rngs.params()  # Flax refuses this for a variable of a trace.


def test_arrays_on_other_devices_are_brought():
    own = jax.device_put(jnp.arange(4096.0).reshape(64, 64), jax.devices()[3])
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    explicit = jax.device_put(own, NamedSharding(mesh, PartitionSpec("a")))
    strategy = ShardedStrategy({"fsdp": 8})
    makers = [
        lambda: strategy.make(lambda: {"w": own * 2}),
        lambda: strategy.make(lambda value: {"w": value * 2}, own),
        lambda: strategy.make(lambda value: {"w": value * 2}, explicit),
    ]
    for make in makers:
        made = make()
        np.testing.assert_array_equal(made["w"], 2 * np.asarray(own))
        assert made["w"].sharding.mesh == strategy.mesh


def test_a_rule_may_match_only_in_the_step():
    rules = {"second/kernel": PartitionSpec(None, "fsdp")}
    strategy = ShardedStrategy({"fsdp": 8}, rules)
    make = lambda: nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))  # noqa: E731
    models = {"first": strategy.make(make), "second": strategy.make(make)}

    def step_fn():
        for model in models.values():
            model.kernel[...] += 1.0

    strategy.run(step_fn)
    assert models["first"].kernel[...].sharding.spec == PartitionSpec("fsdp")
    assert models["second"].kernel[...].sharding.spec == PartitionSpec(None, "fsdp")


def make_layer():
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "fsdp"))
    return nnx.Linear(SIZE, SIZE, kernel_init=init, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("place", ["argument", "captured"])
def test_an_optimizer_that_is_made_later_follows_its_parameter(place):
    strategy = MAKERS["sharded"]()
    model = strategy.make(make_layer)
    adam = optax.adam(1e-2)
    if place == "argument":
        optimizer = strategy.make(nnx.Optimizer, model, adam, wrt=nnx.Param)
    else:
        optimizer = strategy.make(
            lambda: nnx.Optimizer(model, adam, wrt=nnx.Param),
        )

    moment = optimizer.opt_state[0].mu.kernel[...]
    # The automatic rule would divide the first axis.
    assert moment.sharding.spec == PartitionSpec(None, "fsdp")
    assert moment.sharding.is_equivalent_to(model.kernel[...].sharding, 2)


@pytest.mark.parametrize("place", ["argument", "captured"])
def test_a_state_of_optax_that_is_made_later_follows_its_parameter(place):
    strategy = ShardedStrategy({"fsdp": 8}, {"kernel": PartitionSpec(None, "fsdp")})
    params = strategy.make(lambda: {"first": {"kernel": jnp.ones((SIZE, SIZE))}})
    init = optax.adam(1e-2).init
    if place == "argument":
        state = strategy.make(init, params)
    else:
        state = strategy.make(lambda: init(params))

    moment = state[0].mu["first"]["kernel"]
    assert moment.sharding.spec == PartitionSpec(None, "fsdp")


def test_a_model_that_is_read_from_another_one_lies_by_its_own_rules():
    strategy = MAKERS["sharded"]()
    teacher = strategy.make(make_layer)

    def make_student():
        student = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(1))
        student.kernel[...] = teacher.kernel[...]
        return student, nnx.Optimizer(student, optax.adam(1e-2), wrt=nnx.Param)

    student, optimizer = strategy.make(make_student)
    for kernel in (student.kernel, optimizer.opt_state[0].mu.kernel):
        assert kernel[...].sharding.spec == PartitionSpec("fsdp")


def test_a_constructor_may_name_axes_of_the_mesh():
    spec = PartitionSpec(None, "fsdp")

    def make():
        return {"w": jax.lax.with_sharding_constraint(jnp.ones((64, 64)), spec)}

    strategy = ShardedStrategy({"fsdp": 8})
    np.testing.assert_array_equal(strategy.make(make)["w"], np.ones((64, 64)))


def test_a_value_that_python_needs_has_a_note():
    def make():
        w = jnp.ones((8, 8))
        return w if w.sum() > 0 else -w

    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        ShardedStrategy().make(make)
    assert "`strategy.make` traces `make`" in "\n".join(caught.value.__notes__)
