"""Ways to sum over replicas: equal numbers, by other collectives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import core

import armillary
from armillary.distribute import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from tests.mistakes import mistakes
from tests.problems import MLP, Classifier


class Gathered(CrossDeviceOps):
    """A user's own: gathers all parts, and adds them up in one order."""

    def all_reduce(self, value, axis_name, num_replicas):
        parts = jax.lax.all_gather(value, axis_name)
        assert parts.shape[0] == num_replicas
        return jnp.sum(parts, 0)


KINDS = {
    "nccl": (NcclAllReduce(), {"all-reduce"}),
    "groups": (
        HierarchicalCopyAllReduce(),
        {"reduce-scatter", "all-gather"},
    ),
    "one device": (ReductionToOneDevice(), {"collective-permute"}),
    "own": (Gathered(), {"all-gather"}),
}


def make_strategy(ops):
    return armillary.MirroredStrategy(jax.devices()[:4], cross_device_ops=ops)


def train(strategy, **options):
    # Adam would make steps of full size of rounding, where a gradient is 0.
    trainer = Classifier(strategy, MLP(nnx.Rngs(0)), optax.sgd(0.1), **options)
    trainer.train(3)
    return trainer


@pytest.fixture(scope="module")
def expected():
    return train(make_strategy(None))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_gets_the_same_numbers(kind, expected):
    ops, collectives = KINDS[kind]
    trainer = train(make_strategy(ops), check_replicas_every=3)
    pairs = zip(
        jax.tree.leaves(nnx.state((trainer.model, trainer.accuracy))),
        jax.tree.leaves(nnx.state((expected.model, expected.accuracy))),
        strict=True,
    )
    for one, other in pairs:
        if jnp.issubdtype(one.dtype, jnp.number):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trainer.losses, expected.losses, rtol=1e-4)
    (program,) = trainer._train.loop._programs._programs.values()
    step = program.step.program
    text = jax.jit(core.jaxpr_as_fun(step)).lower(*step.in_avals).as_text()
    found = re.findall(
        r"stablehlo\.(all_reduce|all_gather|reduce_scatter|coll\w+)", text
    )
    assert {name.replace("_", "-") for name in found} == collectives


def test_groups_are_those_of_neighbours():
    strategy = make_strategy(HierarchicalCopyAllReduce(group_size=2))
    total = nnx.Variable(jnp.zeros(3), aggregation=armillary.VariableAggregation.SUM)

    def step_fn(x):
        total[...] = total[...] + x

    ids = strategy.distribute_values_from_function(
        lambda context: jnp.arange(3.0) + context.replica_id_in_sync_group
    )
    strategy.run(step_fn, args=(ids,))
    np.testing.assert_array_equal(total[...], [6, 10, 14])
    (function,) = [value for _, value in strategy._functions._functions.values()]
    (program,) = function._programs.values()
    step = program.step.program
    text = jax.jit(core.jaxpr_as_fun(step)).lower(*step.in_avals).as_text()
    groups = re.findall(r"replica_groups = dense<(\[\[.*?\]\])>", text)
    assert groups == ["[[0, 1], [2, 3]]", "[[0, 2], [1, 3]]", "[[0, 1], [2, 3]]"]


@pytest.mark.parametrize("kind", ["groups", "one device"])
def test_an_uneven_batch_is_summed_over_fewer_replicas(kind):
    strategy = make_strategy(KINDS[kind][0])
    data = np.arange(11, dtype=np.float32)
    dataset = strategy.distribute_dataset(
        armillary.data.from_arrays(data, batch_size=8),
        armillary.InputOptions(remainder="exact"),
    )
    weight = nnx.Param(jnp.asarray(2.0))

    @armillary.function
    def step(batch):
        def step_fn(batch):
            def loss_fn(weight):
                return armillary.compute_average_loss(batch * weight[...])

            return armillary.all_reduce("sum", nnx.grad(loss_fn)(weight))[...]

        return strategy.reduce("mean", strategy.run(step_fn, args=(batch,)))

    assert [float(step(batch)) for batch in dataset] == [3.5, 9.0]


class Wrong(CrossDeviceOps):
    def all_reduce(self, value, axis_name, num_replicas):
        return jax.lax.all_gather(value, axis_name)


def run_wrong():
    strategy = make_strategy(Wrong())
    ids = strategy.distribute_values_from_function(lambda _: jnp.ones(2))
    strategy.run(
        lambda x: armillary.get_replica_context().all_reduce("sum", x), args=(ids,)
    )


@mistakes(
    {
        TypeError: {
            "`cross_device_ops` is 'nccl' of type str, but it must be a": (
                lambda: make_strategy("nccl")
            )
        },
        ValueError: {
            "`group_size` is 3, but it must be a divisor of the number of .* is 4": (
                lambda: make_strategy(HierarchicalCopyAllReduce(group_size=3))
            ),
            "`group_size` is 0, but it must be a positive integer": (
                lambda: HierarchicalCopyAllReduce(group_size=0)
            ),
            r"`all_reduce` of Wrong\(\) made float32\[4, 2\] of float32": run_wrong,
        },
    }
)
def test_what_cannot_be_summed_is_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
