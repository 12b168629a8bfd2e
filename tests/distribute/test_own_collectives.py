"""Steps with collectives of their own compute as one device: three recipes.

The tests run the programs of the pages in `docs/recipes`, except their last loop.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import armillary
from armillary.errors import ReplicaContextError
from armillary.xla._flops import count_flops
from tests.meta.test_docs import REPOSITORY, find_blocks
from tests.tiers import slow_after_first

RECIPES = ["ring_attention", "mixture_of_experts", "pipeline"]
EXACTNESS = 1e-5


def load(name, **constants):
    """Returns the names of a recipe before it trains.

    Args:
        name: The name of the page.
        **constants: Values that replace constants of the program.
    """
    path = REPOSITORY / "docs" / "recipes" / f"{name}.md"
    blocks = [body for info, _, body in find_blocks(path) if info == "python"]
    program, found, _ = "".join(blocks).partition("\nfor strategy in ")
    assert found
    names = {"__name__": "recipe"}
    exec(compile(program, str(path), "exec"), names)
    assert constants.keys() <= names.keys()
    names.update(constants)
    return names


def make_strategy(axis, count, **options):
    mesh = jax.make_mesh((8 // count, count), ("data", axis))
    return armillary.ShardedStrategy(mesh, **options)


def train(recipe, strategy):
    """Returns the losses of some steps, and the parameters before and after them."""
    params = recipe["params"] if "params" in recipe else recipe["make_params"]()
    trainer = armillary.StepTrainer(
        recipe["step"], params, recipe["source"], strategy=strategy
    )
    losses = [float(trainer.train(1)["loss"]) for _ in range(4)]
    return losses, params, jax.device_get(trainer.state)


@pytest.fixture
def one():
    return armillary.OneDeviceStrategy("cpu:1")


@slow_after_first("name", RECIPES)
def test_a_recipe_trains_as_one_device(name, one):
    """Parameters move by the gradients, so equal parameters are equal gradients."""
    recipe = load(name)
    expected, before, whole = train(recipe, one)

    losses, _, parts = train(recipe, recipe["sharded"])

    np.testing.assert_allclose(losses, expected, rtol=EXACTNESS)
    for key, value in whole.items():
        moved = np.abs(value - before[key]).max()
        assert moved > 100 * EXACTNESS
        np.testing.assert_allclose(parts[key], value, rtol=0, atol=EXACTNESS)


@pytest.mark.parametrize(
    ("name", "key"), [("mixture_of_experts", "up"), ("pipeline", "layers")]
)
def test_a_device_holds_its_part_of_the_parameters(name, key):
    recipe = load(name)
    params = recipe["sharded"].make(recipe["make_params"])
    parts = [shard.data.shape[0] for shard in params[key].addressable_shards]
    assert parts == [2] * 8


def gradients_of(fn, *args):
    """Returns the result of a function, and gradients with uneven weights."""

    def weighted(*args):
        result = fn(*args)
        weights = jnp.cos(jnp.arange(result.size, dtype="float32"))
        return jnp.sum(result * weights.reshape(result.shape)), result

    gradients, result = jax.grad(weighted, range(len(args)), has_aux=True)(*args)
    return result, gradients


def assert_equal(strategy, one, fn, plain, *args):
    """Asserts that a function and its gradients are the same as on one device.

    Args:
        strategy: Its mesh has the axis of the function.
        one: A strategy with one device.
        fn: A function of a recipe, which runs under both strategies.
        plain: The same function without parts, written another way.
        *args: The arguments of both functions.
    """
    with one.scope():
        expected = jax.device_get(jax.jit(gradients_of, static_argnums=0)(plain, *args))
    whole = jax.device_get(one.run(gradients_of, args=(fn, *args)))
    found = jax.device_get(strategy.run(gradients_of, args=(fn, *args)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    for other in (whole, found):
        jax.tree.map(assert_close, other, expected)


def assert_close(value, expected):
    # Gradients of large attention scores are large, and sums differ by their order.
    scale = np.abs(np.asarray(expected)).max(initial=1.0)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=EXACTNESS * scale)


def draw(*shape, scale=1.0):
    rng = np.random.default_rng(sum(shape))
    return (scale * rng.normal(size=shape)).astype("float32")


def attend_one_by_one(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    is_past = jnp.tri(q.shape[1], dtype=bool)
    scores = jnp.where(is_past[None, None], scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@slow_after_first("count", [4, 1, 2, 8])
def test_ring_attention_is_exact(count, one):
    """Large scores show that the softmax is computed safely."""
    q = draw(8, 16, 2, 4, scale=20)
    k = draw(8, 16, 2, 4, scale=20)[::-1]
    v = draw(8, 16, 2, 4)
    attend = load("ring_attention")["attend"]
    strategy = make_strategy("context", count)
    assert_equal(strategy, one, attend, attend_one_by_one, q, k, v)


def test_other_layers_are_divided_along_the_sequence():
    recipe = load("ring_attention")
    strategy = recipe["sharded"]
    weights = draw(6, 2, 4)

    def step_fn(x):
        q = jnp.einsum("btd,dhk->bthk", x, weights)
        return jnp.einsum("bthk,dhk->btd", recipe["attend"](q, q, q), weights)

    (x,) = strategy.distribute_dataset([draw(8, 16, 6)])
    y = strategy.run(step_fn, args=(x,))
    assert y.sharding.spec[:2] == ("data", "context")


def make_experts(count):
    rules = {"up|down": PartitionSpec("expert")}
    axes = ("data", "expert")
    return make_strategy("expert", count, rules=rules, batch_axes=axes)


def apply_all_experts(router, up, down, x):
    """Returns the outputs of a mixture, and the balance of its experts."""
    gates = jax.nn.softmax(x @ router)
    hidden = jax.nn.relu(jnp.einsum("td,edf->tef", x, up))
    outputs = jnp.einsum("tef,efd->ted", hidden, down)
    is_chosen = jax.nn.one_hot(jnp.argmax(gates, axis=1), gates.shape[1])
    y = jnp.einsum("ted,te->td", outputs, is_chosen * gates)
    means = jnp.mean(is_chosen, axis=0) * jnp.mean(gates, axis=0)
    return jnp.append(y, gates.shape[1] * jnp.sum(means))


@slow_after_first("is_even", [False, True])
@slow_after_first("count", [4, 2, 8])
def test_experts_compute_as_one_device_if_no_token_is_dropped(count, is_even, one):
    recipe = load("mixture_of_experts", CAPACITY_FACTOR=8)
    router = draw(6, 8)
    if not is_even:  # all tokens choose one expert
        router = np.zeros((6, 8), "float32")
    arrays = router, draw(8, 6, 10), draw(8, 10, 6), draw(64, 6)

    def fn(router, up, down, x):
        params = {"router": router, "up": up, "down": down}
        y, balance, _ = recipe["mixture"](params, x)
        return jnp.append(y, balance)

    assert_equal(make_experts(count), one, fn, apply_all_experts, *arrays)


def test_tokens_over_the_capacity_are_dropped():
    recipe = load("mixture_of_experts", CAPACITY_FACTOR=2)
    up = np.ones((8, 6, 10), "float32")
    down = np.ones((8, 10, 6), "float32")
    x = np.ones((64, 6), "float32")
    params = {"router": np.zeros((6, 8), "float32"), "up": up, "down": down}

    y, _, dropped = make_experts(4).run(recipe["mixture"], args=(params, x))

    # Each device has 8 tokens for the same expert, and places for 2 of them.
    assert float(dropped) == 0.75
    is_kept = np.arange(64) % 8 < 2
    np.testing.assert_array_equal(np.asarray(y) != 0, is_kept[:, None].repeat(6, 1))


def apply_in_order(layers, x):
    for kernel in layers:
        x = x + jnp.tanh(x @ kernel)
    return x


@slow_after_first("microbatches", [4, 1, 8])
@slow_after_first("count", [4, 1, 2, 8])
def test_a_pipeline_computes_as_its_layers_in_order(count, microbatches, one):
    recipe = load("pipeline", WIDTH=6, MICROBATCHES=microbatches)
    layers = draw(8, 6, 6, scale=0.3)
    x = draw(64, 6)
    strategy = make_strategy("stage", count)
    assert_equal(strategy, one, recipe["pipeline"], apply_in_order, layers, x)


def test_calls_that_combine_replicas_are_refused_in_a_part_of_one():
    strategy = armillary.ShardedStrategy({"data": 8})
    calls = {
        "all_reduce": lambda x: armillary.all_reduce("mean", x),
        "all_gather": lambda x: armillary.get_replica_context().all_gather(x, axis=0),
        "compute_average_loss": armillary.compute_average_loss,
    }
    rows = np.ones((8, 2), np.float32)
    for name, call in calls.items():

        def step_fn(batch, call=call):
            spec = jax.sharding.PartitionSpec("data")
            whole = jax.sharding.PartitionSpec()
            return jax.shard_map(call, in_specs=spec, out_specs=whole, check_vma=False)(
                batch
            )

        with pytest.raises(ReplicaContextError, match=rf"`.*{name}`.*pmean.*\"data\""):
            strategy.run(step_fn, args=(rows,))


def test_an_axis_of_the_mesh_outside_of_shard_map_is_explained():
    strategy = armillary.ShardedStrategy({"context": 8})
    with pytest.raises(NameError) as caught:
        strategy.run(lambda: jax.lax.psum(jnp.ones(2), "context"))
    (note,) = caught.value.__notes__
    assert "'context' is an axis of the mesh" in note
    assert "`jax.shard_map(" in note


def test_the_work_of_all_devices_is_counted():
    strategy = armillary.ShardedStrategy({"data": 8})

    def multiply(rows, weights):
        return rows @ weights

    def step_fn(rows, weights):
        spec = jax.sharding.PartitionSpec("data")
        whole = jax.sharding.PartitionSpec()
        divided = jax.shard_map(multiply, in_specs=(spec, whole), out_specs=spec)
        return divided(rows, weights)

    shapes = jnp.ones((16, 4)), jnp.ones((4, 3))
    with strategy.scope():
        program = jax.make_jaxpr(step_fn)(*shapes)
    assert count_flops(program) == {"float32": 2 * 16 * 4 * 3}
