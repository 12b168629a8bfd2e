"""Tests of cross-device operations: equal numbers, different collectives."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import all_reduce, compute_average_loss
from armillary.distribute import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReduceOp,
    ReductionToOneDevice,
    VariableAggregation,
)
from armillary.distribute.replica._cross_device import find_groups
from armillary.errors import DoubleReductionError, ReplicaMismatchError
from armillary.plan._traffic import find_traffic
from tests.mistakes import mistakes
from tests.problems import MLP, Classifier


class Gathered(CrossDeviceOps):
    """A user's own: gathers all parts, and combines them in one order."""

    def reduce(self, op, values):
        combine = {ReduceOp.SUM: jnp.sum, ReduceOp.MAX: jnp.max, ReduceOp.MIN: jnp.min}
        parts = [jax.lax.all_gather(value, "replica") for value in values]
        return [combine[op](each, axis=0) for each in parts]


class InPairs(CrossDeviceOps):
    """A user's own: sums in pairs of neighbors, and then across the pairs."""

    def reduce(self, op, values):
        assert op is ReduceOp.SUM
        pairs = [[0, 1], [2, 3]]
        across = [[0, 2], [1, 3]]

        def sum_over(value, groups):
            parts = jax.lax.all_gather(value, "replica", axis_index_groups=groups)
            return jnp.sum(parts, axis=0)

        return tuple(sum_over(sum_over(value, pairs), across) for value in values)


OPS = {
    "nccl": NcclAllReduce(),
    "one group": HierarchicalCopyAllReduce(),
    "groups": HierarchicalCopyAllReduce(devices_per_group=2),
    "groups, each array": HierarchicalCopyAllReduce(0, devices_per_group=2),
    "one device": ReductionToOneDevice(),
    "own": Gathered(),
    "own, in pairs": InPairs(),
}


def make_strategy(ops, count=4):
    return armillary.MirroredStrategy(jax.devices()[:count], cross_device_ops=ops)


def make_parts(strategy):
    def make(context):
        number = context.replica_id_in_sync_group
        floats = np.random.default_rng(number).normal(size=(3, 5)).astype(np.float32)
        return {"x": floats, "y": floats[0, 0], "n": np.arange(3) + number}

    return strategy.distribute_values_from_function(make)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("kind", OPS)
def test_every_way_gives_the_numbers_of_xla(kind, op):
    def reduce_under(strategy):
        reduced = strategy.run(
            lambda parts: all_reduce(op, parts), (make_parts(strategy),)
        )
        assert all(leaf.is_shared for leaf in reduced.values())
        return [leaf.array for leaf in reduced.values()]

    expected = reduce_under(make_strategy(None))
    found = reduce_under(make_strategy(OPS[kind]))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("kind", ["nccl", "groups", "one device", "own"])
def test_largest_and_smallest_values_go_the_same_way(kind, op):
    strategy = make_strategy(OPS[kind])
    parts = make_parts(strategy)
    found = strategy.run(lambda parts: all_reduce(op, parts), (parts,))
    combine = {"max": np.max, "min": np.min}[op]
    for name, part in parts.items():
        np.testing.assert_array_equal(found[name].array, combine(part.array, axis=0))


def test_the_sum_on_one_device_is_exactly_the_sum_in_the_order_of_the_replicas():
    strategy = make_strategy(ReductionToOneDevice(), count=8)
    parts = make_parts(strategy)
    found = strategy.run(lambda parts: all_reduce("sum", parts), (parts,))
    expected = functools.reduce(np.add, np.asarray(parts["x"].array))
    np.testing.assert_array_equal(found["x"].array, expected)


def train(strategy, **options):
    # Adam would make steps of full size of rounding, where a gradient is 0.
    trainer = Classifier(strategy, MLP(nnx.Rngs(0)), optax.sgd(0.1), **options)
    trainer.train(3)
    return trainer


@pytest.fixture(scope="module")
def expected():
    return train(make_strategy(None))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nccl", "groups", "one device", "own"])
def test_a_trainer_gets_the_same_numbers(kind, expected):
    trainer = train(make_strategy(OPS[kind]), check_replicas_every=3)
    pairs = zip(
        jax.tree.leaves(nnx.state((trainer.model, trainer.accuracy))),
        jax.tree.leaves(nnx.state((expected.model, expected.accuracy))),
        strict=True,
    )
    for one, other in pairs:
        if jnp.issubdtype(one.dtype, jnp.number):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trainer.losses, expected.losses, rtol=1e-4)


@pytest.mark.parametrize("kind", ["groups", "one device", "own"])
def test_a_loss_of_all_replicas_has_a_derivative(kind):
    strategy = make_strategy(OPS[kind])
    parts = make_parts(strategy)

    def step_fn(parts):
        loss = armillary.over_replicas(lambda w: jnp.mean(w * parts["x"] ** 2))
        return jax.value_and_grad(loss)(3.0)

    value, gradient = strategy.run(step_fn, (parts,))
    expected = np.mean(parts["x"].array ** 2)
    np.testing.assert_allclose(value.array, 3 * expected, rtol=1e-5)
    np.testing.assert_allclose(gradient.array, expected, rtol=1e-5)


def find_rounds(ops, num_values=64):
    """Returns the collectives of a compiled sum over 8 replicas of float32.

    Each is its kind, the groups of devices, and the bytes that a device has of the
    larger one of its operand and its result.
    """
    strategy = make_strategy(ops, count=8)
    values = strategy.distribute_values_from_function(
        lambda context: jnp.ones(num_values)
    )
    step = jax.jit(lambda x: strategy.run(lambda x: all_reduce("sum", x), (x,)))
    text = step.lower(values).compile().as_text()
    found = re.findall(
        r"f32\[(\d+)\]\S* (all-reduce|reduce-scatter|all-gather)\(.*"
        r"replica_groups=(?:\{\{(.*?)\}\}|mesh)",  # a whole mesh, from JAX 0.12
        text,
    )
    rounds = []
    for size, kind, listed in found:
        listed = listed or "0,1,2,3,4,5,6,7"
        groups = [[int(n) for n in each.split(",")] for each in listed.split("},{")]
        times = len(groups[0]) if kind == "reduce-scatter" else 1
        rounds.append((kind, groups, 4 * int(size) * times))
    # The same collectives as the plan reads from the program.
    traffic = find_traffic(text, depth=0, num_devices=8).collectives
    assert [(each.kind, each.num_bytes) for each in traffic] == [
        (kind, size) for kind, _, size in rounds
    ]
    return rounds


def count_bytes_between_hosts(rounds):
    """Returns the bytes that a device gives to collectives across two hosts of 4."""
    return sum(
        size
        for _, groups, size in rounds
        if any({device // 4 for device in group} == {0, 1} for group in groups)
    )


def test_groups_send_fewer_bytes_between_hosts():
    plain = find_rounds(None)
    assert [kind for kind, _, _ in plain] == ["all-reduce"]
    assert count_bytes_between_hosts(plain) == 4 * 64

    rounds = find_rounds(HierarchicalCopyAllReduce(devices_per_group=4))
    hosts = [[0, 1, 2, 3], [4, 5, 6, 7]]
    across = [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [(kind, groups) for kind, groups, _ in rounds] == [
        ("reduce-scatter", hosts),
        ("reduce-scatter", across),
        ("all-gather", across),
        ("all-gather", hosts),
    ]
    # A quarter of the values, there and back, where an all-reduce sends all of them
    # there and back.
    assert count_bytes_between_hosts(rounds) == 2 * (4 * 64) / 4


@pytest.mark.parametrize("num_values", [1, 7, 30])
def test_any_number_of_values_is_summed_in_groups(num_values):
    strategy = make_strategy(HierarchicalCopyAllReduce(devices_per_group=2), count=8)
    parts = strategy.distribute_values_from_function(
        lambda context: np.arange(num_values) + context.replica_id_in_sync_group
    )
    found = strategy.run(lambda x: all_reduce("sum", x), (parts,))
    np.testing.assert_array_equal(found.array, parts.array.sum(axis=0))


def test_packs_are_rounds():
    def count(ops):
        strategy = make_strategy(ops)
        program = jax.make_jaxpr(
            lambda parts: strategy.run(lambda parts: all_reduce("sum", parts), (parts,))
        )({"a": jnp.ones(4), "b": jnp.ones(4), "c": jnp.ones(8)})
        return str(program).count("= reduce_scatter[")

    # Two reduce-scatters in each round.
    grouped = functools.partial(HierarchicalCopyAllReduce, devices_per_group=2)
    assert [count(grouped(n)) for n in (0, 1, 2, 9)] == [6, 2, 4, 6]


@pytest.mark.parametrize(
    ("hosts", "groups"),
    [
        ([0, 0, 1, 1], [[0, 1], [2, 3]]),
        ([3, 5, 3, 5], [[0, 2], [1, 3]]),
        ([0, 0, 0], None),
        ([0, 1, 2], None),
        ([0, 0, 1], None),
    ],
)
def test_the_replicas_of_a_host_are_a_group(hosts, groups):
    assert find_groups(hosts) == groups


@pytest.mark.parametrize("kind", ["groups", "one device", "own"])
def test_an_uneven_batch_is_summed_over_fewer_replicas(kind):
    strategy = make_strategy(OPS[kind])
    data = np.arange(11, dtype=np.float32)
    dataset = strategy.distribute_dataset(
        armillary.data.from_arrays(data, batch_size=8),
        armillary.data.InputOptions(remainder="exact"),
    )
    weight = nnx.Param(jnp.asarray(2.0))

    @armillary.function
    def step(batch):
        def step_fn(batch):
            def loss_fn(weight):
                return compute_average_loss(batch * weight[...])

            return all_reduce("sum", nnx.grad(loss_fn)(weight))[...]

        return strategy.reduce("mean", strategy.run(step_fn, args=(batch,)))

    assert [float(step(batch)) for batch in dataset] == [3.5, 9.0]


def test_metrics_are_summed_by_xla():
    class Halved(Gathered):
        def reduce(self, op, values):
            return [each / 2 for each in super().reduce(op, values)]

    strategy = make_strategy(Halved())
    count = nnx.Variable(jnp.asarray(0.0), aggregation=VariableAggregation.SUM)

    def step_fn():
        count[...] += 1
        return all_reduce("sum", jnp.ones(()))

    assert float(strategy.run(step_fn).array) == 2
    assert float(count[...]) == 4


REDUCED_TWICE = {
    "a sum of what is reduced": lambda x: all_reduce("sum", all_reduce("sum", x)),
    "a mean of what is divided": lambda x: all_reduce("mean", compute_average_loss(x)),
    "a sum of a weighted mean": (
        lambda x: all_reduce("sum", armillary.weighted_mean(x, jnp.ones(5)))
    ),
    "a sum of gradients of a reduced loss": (
        lambda x: all_reduce(
            "sum", jax.grad(lambda w: all_reduce("mean", jnp.mean(w * x)))(2.0)
        )
    ),
}


@pytest.mark.parametrize("kind", ["nccl", "groups", "one device", "own"])
@pytest.mark.parametrize("name", REDUCED_TWICE)
def test_reducing_twice_is_an_error(kind, name):
    strategy = make_strategy(OPS[kind])
    parts = make_parts(strategy)
    with pytest.raises(DoubleReductionError, match=r"over replicas at .*test_cross_"):
        strategy.run(lambda parts: REDUCED_TWICE[name](parts["x"][0]), (parts,))


RIGHT = {
    "a mean of what is reduced": lambda x: all_reduce("mean", all_reduce("mean", x)),
    "a sum of what is divided": lambda x: all_reduce("sum", compute_average_loss(x)),
    "a mean of gradients of a reduced loss": (
        lambda x: all_reduce(
            "mean", jax.grad(lambda w: all_reduce("mean", jnp.mean(w * x)))(2.0)
        )
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nccl", "groups", "one device", "own"])
@pytest.mark.parametrize("name", RIGHT)
def test_reducing_once_is_right(kind, name):
    def run(strategy):
        parts = make_parts(strategy)
        result = strategy.run(lambda parts: RIGHT[name](parts["x"][0]), (parts,))
        return result.array

    expected = run(make_strategy(None))
    np.testing.assert_allclose(run(make_strategy(OPS[kind])), expected, rtol=1e-5)


class Ring(CrossDeviceOps):
    """Adds in another order on each replica, so that sums of floats differ."""

    def reduce(self, op, values):
        (value,) = total = values
        for _ in range(3):
            value = jax.lax.ppermute(
                value, "replica", [(i, (i + 1) % 4) for i in range(4)]
            )
            total = [total[0] + value]
        return total


class OfOneReplica(CrossDeviceOps):
    def reduce(self, op, values):
        return [jnp.where(jax.lax.axis_index("replica") == 0, x, 0) for x in values]


class Waiting(CrossDeviceOps):
    def reduce(self, op, values):
        is_first = jax.lax.axis_index("replica") == 0
        total = jax.lax.cond(
            is_first, lambda x: jax.lax.psum(x, "replica"), lambda x: x, values[0]
        )
        return [jax.lax.pmean(total, "replica")]


class Stacked(CrossDeviceOps):
    def reduce(self, op, values):
        return [jax.lax.all_gather(value, "replica") for value in values]


class Missing(CrossDeviceOps):
    pass


def reduce_by(ops):
    strategy = make_strategy(ops)
    strategy.run(lambda: all_reduce("sum", jnp.ones(4)))


@mistakes(
    {
        TypeError: {
            "`cross_device_ops` is 'nccl' of type str, but it must be a": (
                lambda: make_strategy("nccl")
            )
        },
        ValueError: {
            "`devices_per_group` is 3, but the strategy has 4 devices": (
                lambda: make_strategy(HierarchicalCopyAllReduce(devices_per_group=3))
            ),
            "`devices_per_group` is 0": (
                lambda: HierarchicalCopyAllReduce(devices_per_group=0)
            ),
            "`num_packs` is 2, .*bytes_per_pack": lambda: NcclAllReduce(num_packs=2),
            "`num_packs` is -1": lambda: HierarchicalCopyAllReduce(num_packs=-1),
            "`num_packs` is True": lambda: HierarchicalCopyAllReduce(num_packs=True),
            r"`reduce` of Stacked\(\) made float32\[4, 4\] of float32\[4\]": (
                lambda: reduce_by(Stacked())
            ),
        },
        ReplicaMismatchError: {
            r"`reduce` of Ring\(\) may leave(?s:.*)jax.lax.all_gather": (
                lambda: reduce_by(Ring())
            ),
            r"`reduce` of OfOneReplica\(\) may leave": lambda: reduce_by(
                OfOneReplica()
            ),
            r"`reduce` of Waiting\(\) has a branch .*test_cross_device_ops": (
                lambda: reduce_by(Waiting())
            ),
        },
    }
)
def test_values_that_cannot_be_reduced_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_class_without_a_reduction_is_an_error():
    with pytest.raises(NotImplementedError, match=r"Missing has no `reduce`\. Write"):
        reduce_by(Missing())


def test_a_sum_in_one_group_alone_is_not_equal_everywhere():
    class OneLevel(CrossDeviceOps):
        def reduce(self, op, values):
            pairs = [[0, 1], [2, 3]]
            parts = jax.lax.all_gather(values, "replica", axis_index_groups=pairs)
            return [jnp.sum(each, axis=0) for each in parts]

    with pytest.raises(ReplicaMismatchError, match="OneLevel"):
        reduce_by(OneLevel())


def test_arguments_of_an_operation_may_differ():
    class Weighed(CrossDeviceOps):
        def reduce(self, op, values):
            return [jax.lax.psum(value, "replica") * self.weight for value in values]

    ops = Weighed()
    strategy = make_strategy(ops)
    parts = make_parts(strategy)

    def step_fn(parts):
        ops.weight = parts["y"]
        return all_reduce("sum", parts["x"])

    with pytest.raises(ReplicaMismatchError, match="Weighed"):
        strategy.run(step_fn, (parts,))
