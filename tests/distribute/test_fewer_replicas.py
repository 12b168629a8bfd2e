"""Tests of steps that run on fewer replicas than there are devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import get_replica_context
from armillary.data import InputOptions
from armillary.distribute import VariableAggregation
from armillary.distribute._global_arrays import narrow_mesh
from armillary.distribute.replica._run import take_first_copy
from armillary.errors import BatchSizeError
from tests.tiers import slow_after_first

ROWS = np.arange(6, dtype=np.float32)


def uneven(strategy, rows=ROWS):
    """Returns a batch that two of four replicas share."""
    (batch,) = strategy.distribute_dataset([rows], InputOptions(remainder="exact"))
    return batch


def test_a_batch_has_one_part_for_each_of_fewer_replicas(strategy):
    batch = uneven(strategy)

    assert repr(batch) == "PerReplica(2 x float32[3])"
    assert [part.tolist() for part in strategy.local_results(batch)] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    own = strategy.run(
        lambda x: (x, get_replica_context().all_reduce("sum", x)), (batch,)
    )
    for value in own:
        devices = [part.devices() for part in strategy.local_results(value)]
        assert devices == [{strategy.mesh.devices[index]} for index in (0, 2)]
    np.testing.assert_array_equal(strategy.gather(batch, axis=0), ROWS)
    assert float(strategy.reduce("mean", batch, axis=0)) == ROWS.mean()


def test_collectives_are_over_so_many_replicas(strategy):
    def step_fn(x):
        context = get_replica_context()
        return {
            "sum": context.all_reduce("sum", x),
            "mean": context.all_reduce("mean", x),
            "pmean": jax.lax.pmean(x, "replica"),
            "gathered": context.all_gather(x, 0),
            "lax": jax.lax.all_gather(x, "replica", tiled=True),
        }

    values = strategy.run(step_fn, args=(uneven(strategy),))

    for name, expected in {
        "sum": [3, 5, 7],
        "mean": [1.5, 2.5, 3.5],
        "pmean": [1.5, 2.5, 3.5],
        "gathered": ROWS,
        "lax": ROWS,
    }.items():
        for value in strategy.local_results(values[name]):
            np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (VariableAggregation.SUM, 10 + 15),
        (VariableAggregation.MEAN, (10 + 3 + 10 + 12) / 2),
        (VariableAggregation.ONLY_FIRST_REPLICA, 10 + 3),
    ],
)
def test_variables_are_brought_together_over_so_many(strategy, aggregation, expected):
    variable = nnx.Variable(jnp.asarray(10.0), aggregation=aggregation)

    def step_fn(x):
        variable[...] = variable[...] + jnp.sum(x)

    strategy.run(step_fn, args=(uneven(strategy),))

    assert float(variable[...]) == expected
    for shard in variable[...].addressable_shards:
        assert float(shard.data) == expected


LOSSES = {
    "the average": lambda s, x, w: armillary.compute_average_loss(x * w),
    "with a batch size": lambda s, x, w: armillary.compute_average_loss(
        x * w, global_batch_size=6
    ),
    "a mean by hand": lambda s, x, w: jnp.mean(x * w) / s.num_replicas_in_sync,
}


@slow_after_first("name", LOSSES)
def test_a_loss_that_is_scaled_in_the_step_has_the_gradient_of_one_replica(
    strategy, name
):
    weight = nnx.Param(jnp.asarray(1.0))

    def step_fn(x):
        grad = armillary.all_reduce(
            "sum", nnx.grad(lambda w: LOSSES[name](strategy, x, w[...]))(weight)
        )
        weight[...] = weight[...] - grad[...]

    strategy.run(step_fn, args=(uneven(strategy),))

    assert float(weight[...]) == 1 - ROWS.mean()


def test_a_loss_that_is_scaled_by_a_number_from_elsewhere_is_an_error(strategy):
    weight, number = nnx.Param(jnp.asarray(1.0)), strategy.num_replicas_in_sync

    def step_fn(x):
        def loss_fn(w):
            loss = jnp.mean(x * w[...]) / number
            return loss + armillary.scale_regularization_loss(w[...])

        weight[...] = (
            weight[...] - armillary.all_reduce("sum", nnx.grad(loss_fn)(weight))[...]
        )

    message = (
        r"`step_fn` runs on 2 of 4 replicas, because more cannot share its batch "
        r"equally.*`armillary\.compute_average_loss\(losses\)`"
    )
    with pytest.raises(BatchSizeError, match=message):
        strategy.run(step_fn, args=(uneven(strategy),))

    assert float(weight[...]) == 1


def test_a_loss_that_is_divided_by_a_reduced_count_is_an_error(strategy):
    weight = nnx.Param(jnp.asarray(1.0))

    def step_fn(x):
        def loss_fn(w):
            count = get_replica_context().all_reduce("sum", jnp.sum(x * 0 + 1))
            return jnp.sum(x * w[...]) / count

        gradients = armillary.all_reduce("sum", nnx.grad(loss_fn)(weight))
        weight[...] = weight[...] - gradients[...]

    with pytest.raises(BatchSizeError, match=r"runs on 2 of 4 .* Take the .mean. of"):
        strategy.run(step_fn, args=(uneven(strategy),))

    assert float(weight[...]) == 1


def test_a_step_without_gradients_needs_not_ask(strategy):
    metric, count = nnx.metrics.Average(), nnx.Variable(jnp.asarray(0))

    def step_fn(x):
        metric.update(values=x)
        count[...] = count[...] + 1

    strategy.run(step_fn, args=(uneven(strategy),))

    assert (float(metric.total[...]), int(metric.count[...])) == (15, 6)
    assert int(count[...]) == 1


def test_arguments_for_other_numbers_of_replicas_do_not_mix(strategy, put_rows):
    four = put_rows(strategy, np.zeros((4, 3)))

    with pytest.raises(BatchSizeError, match=r"hold data for 2 and 4 replicas"):
        strategy.run(lambda x, y: x + y, args=(uneven(strategy), four))


def test_copies_that_differ_end_with_the_first_one(strategy):
    mesh = narrow_mesh(strategy.mesh, 2)
    spec = jax.sharding.PartitionSpec

    def on_replica():
        number = jax.lax.axis_index("replica") * 2 + jax.lax.axis_index("copy")
        key = jax.random.key(0)
        values = take_first_copy(mesh, {"int": number, "bool": number == 2, "key": key})
        assert values["key"] is key
        return values["int"][None], values["bool"][None]

    run = jax.shard_map(on_replica, mesh=mesh, in_specs=(), out_specs=spec("replica"))
    numbers, flags = jax.jit(run)()

    for shard in numbers.addressable_shards:
        assert int(shard.data[0]) == 2 * (shard.index[0].start or 0)
    assert flags.tolist() == [False, True]
    assert flags.dtype == bool
