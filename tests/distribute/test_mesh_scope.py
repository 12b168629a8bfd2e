"""Tests of the mesh and of the names for axes that a scope sets for JAX and Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

import armillary
from armillary import ShardedStrategy
from tests.mistakes import mistakes

SIZES = {"data": 2, "fsdp": 4}
RULES = {"embed": "fsdp"}


def make_layer(names, size=64):
    """Returns a layer whose kernel Flax places, if there is a mesh."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return nnx.Linear(size, 64, kernel_init=init, rngs=nnx.Rngs(0))


def make_in_scope(names, size=64, **rules):
    with ShardedStrategy(SIZES, logical_rules=rules).scope():
        return make_layer(names, size)


def find_notes(call):
    """Returns the notes of the error of a call."""
    with pytest.raises(Exception) as caught:
        call()
    return "\n".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (
            lambda: make_in_scope(("embed", "mlp"), embed="fsdp"),
            ["'mlp'", "['data', 'fsdp', 'tensor']", 'logical_rules={"mlp": "tensor"}'],
        ),
        (lambda: make_in_scope(("fsdp", None), size=63), ["shape", "'fsdp'"]),
        (lambda: make_in_scope(("fsdp", None, None)), ["shape"]),
        (
            lambda: make_in_scope(("embed", "heads"), embed="fsdp", heads="fsdp"),
            ["annotation"],
        ),
    ],
    ids=["unknown name", "odd size", "too many names", "one axis twice"],
)
def test_an_annotation_that_flax_cannot_place_has_a_note(call, parts):
    notes = find_notes(call)
    for part in [*parts, "`strategy.make(fn)`"]:
        assert part in notes


def test_an_error_of_the_user_in_a_scope_has_no_note():
    def call():
        with ShardedStrategy(SIZES).scope():
            jax.lax.with_sharding_constraint(jnp.ones(8), PartitionSpec("model"))

    with pytest.raises(ValueError, match="model") as caught:
        call()
    assert "strategy.make" not in "\n".join(getattr(caught.value, "__notes__", ()))


PROGRAM_RULES = (("mlp", "data"), ("embed", "data"))


@pytest.mark.parametrize("library", [nnx, linen])
def test_rules_of_the_program_count_for_names_without_a_rule_of_the_strategy(library):
    strategy = ShardedStrategy(SIZES, logical_rules=RULES)
    with library.logical_axis_rules(PROGRAM_RULES):
        made = strategy.make(make_layer, ("embed", "mlp"))
        with strategy.scope():
            placed = make_layer(("embed", "mlp"))
            named = linen.logical_to_mesh_axes(("embed", "mlp"))
    expected = PartitionSpec("fsdp", "data")
    assert made.kernel[...].sharding.spec == expected
    assert placed.kernel[...].sharding.spec == expected
    assert named == expected
    assert not linen.get_logical_axis_rules()


def test_rules_of_the_program_count_under_a_strategy_without_rules():
    strategy = ShardedStrategy(SIZES)
    with nnx.logical_axis_rules(PROGRAM_RULES):
        made = strategy.make(make_layer, (None, "mlp"))
    assert made.kernel[...].sharding.spec == PartitionSpec(None, "data")


def make_program_mesh():
    return jax.make_mesh((8,), ("x",))


def test_a_mesh_that_the_program_sets_later_outlives_the_chosen_strategy():
    strategy = ShardedStrategy(SIZES)
    mesh = make_program_mesh()
    with jax.set_mesh(strategy.mesh):  # Restores what the bare calls set.
        armillary.set_strategy(strategy)
        jax.set_mesh(mesh)
        armillary.set_strategy(None)
        assert jax.sharding.get_mesh() == mesh


def test_a_strategy_is_chosen_and_left_within_a_mesh_of_the_program():
    strategy = ShardedStrategy(SIZES)
    mesh = make_program_mesh()
    with jax.set_mesh(mesh):
        armillary.set_strategy(strategy)
        assert jax.sharding.get_mesh() == strategy.mesh
        armillary.set_strategy(None)
        assert jax.sharding.get_mesh() == mesh
        armillary.set_strategy(None)
        assert jax.sharding.get_mesh() == mesh
    assert jax.sharding.get_mesh().empty


def test_a_mesh_that_the_program_has_left_does_not_come_back():
    with jax.set_mesh(make_program_mesh()):
        armillary.set_strategy(ShardedStrategy(SIZES))
    armillary.set_strategy(None)
    assert jax.sharding.get_mesh().empty


def test_a_second_strategy_replaces_the_mesh_of_the_first():
    second = ShardedStrategy({"fsdp": 8})
    armillary.set_strategy(ShardedStrategy(SIZES))
    armillary.set_strategy(second)
    assert jax.sharding.get_mesh() == second.mesh
    armillary.set_strategy(None)
    assert jax.sharding.get_mesh().empty


# A mesh with an axis `replica`

X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)


def make_with_replica(**options):
    mesh = jax.make_mesh((2, 4), ("replica", "model"))
    return ShardedStrategy(mesh, batch_axes=("replica",), **options)


def train(strategy, step_fn):
    """Returns the losses of some steps."""
    weights = nnx.Param(jnp.eye(64) / 2)

    @armillary.function
    def step(x):
        return strategy.run(step_fn, args=(weights, x))

    losses = [float(step(X)) for _ in range(3)]
    return losses, weights


def descend(weights, x):
    def loss_fn(weights):
        return jnp.mean((x @ weights - x) ** 2)

    loss, gradient = jax.value_and_grad(loss_fn)(weights[...])
    weights[...] -= armillary.all_reduce("mean", gradient)
    return armillary.all_reduce("mean", loss)


def test_an_axis_of_the_mesh_may_be_called_replica():
    strategy = make_with_replica(rules={"": PartitionSpec("model")})
    assert strategy.axis_name == "replica_"
    assert strategy.layout.num_shares == 2

    losses, weights = train(strategy, descend)

    expected, _ = train(armillary.OneDeviceStrategy("cpu:0"), descend)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert weights[...].sharding.spec == PartitionSpec("model")


def test_shard_map_may_name_the_axis_replica_next_to_a_reduction():
    strategy = make_with_replica()
    spec = PartitionSpec("replica")

    def step_fn(x):
        sums = jax.shard_map(
            lambda part: jax.lax.psum(part.sum(), "replica")[None],
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )(x)
        return armillary.all_reduce("mean", sums)

    found = strategy.run(step_fn, args=(X,))
    np.testing.assert_allclose(found, [X.sum()] * 2, rtol=1e-4)


def test_a_collective_over_that_axis_belongs_into_shard_map():
    strategy = make_with_replica()

    def step_fn(x):
        return jax.lax.pmean(x.mean(), "replica")

    with pytest.raises(NameError) as caught:
        strategy.run(step_fn, args=(X,))
    assert "`jax.shard_map" in "\n".join(caught.value.__notes__)


@mistakes(
    {
        ValueError: {
            r"`axis_name` is 'model'.*'replica', 'model'": (
                lambda: make_with_replica(axis_name="model")
            ),
        },
        TypeError: {"`axis_name` is 3": lambda: make_with_replica(axis_name=3)},
    }
)
def test_a_name_that_the_user_has_chosen_stays(call, error, message):
    assert make_with_replica(axis_name="batch").axis_name == "batch"
    with pytest.raises(error, match=message):
        call()


class Holder:
    """Holds a strategy where a function does not look for it."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.weights = nnx.Param(jnp.eye(64) / 2)

    def step(self, x):
        return self.strategy.run(descend, args=(self.weights, x))


def test_a_function_may_run_a_step_under_a_strategy_that_it_does_not_reach():
    holder = Holder(ShardedStrategy(SIZES))
    compiled = armillary.function(lambda x: holder.step(x))

    losses = [float(compiled(X)) for _ in range(3)]

    expected, _ = train(armillary.OneDeviceStrategy("cpu:0"), descend)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert holder.weights[...].sharding.spec == PartitionSpec("fsdp")
