"""Tests of training loops, compiled for TPUs and GPUs that are not there.

These tests need the wheels of the compilers: installed, or in the folder that the
environment variable `ARMILLARY_PLAN_WHEELS` names (`docs/devices/plan.md`). They assert
what a user of the hardware cares about.
"""

from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import armillary
from armillary.errors import PlanError
from armillary.plan import Plan, plan
from armillary.plan._compiler import compile_loop, find_wheels
from armillary.plan._costs import count_rounds
from armillary.plan._targets import parse_topology
from armillary.trainer._described import described
from tests.plan.digits_mlp import NUM_PARAMETERS, cross_entropy, make_trainer

LARGE = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("v5e:16x16", "v5p:8x8x8", "h100:8x8")
]
LEARNING_RATE, CAPACITY, EXAMPLES = 1e-3, 20, 64
# One process, which compiles each plan once.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("compiled plans"),
]


@pytest.fixture(params=["v5e:2x2", "h100:1x8", *LARGE])
def topology(request):
    try:
        find_wheels(parse_topology(request.param).target.platform)
    except PlanError as error:
        pytest.skip(str(error))
    return request.param


@cache
def make_plan(topology: str) -> Plan:
    return plan(make_trainer(), topology)


def test_the_whole_state_is_donated(topology):
    memory = make_plan(topology).memory
    # All but counters and the metric, whose copies cost less than a donation.
    assert memory.donated >= 3 * 4 * NUM_PARAMETERS
    assert memory.outputs - memory.donated < 10_000


def test_gradients_are_summed_in_one_pass_of_their_own_size(topology):
    found = make_plan(topology)
    assert count_rounds(found.of_step(), "all-reduce") == 1
    assert found.of_step() == found.of_step("all-reduce")
    sizes = sorted(each.num_bytes for each in found.of_step())
    # The metric's sum and count are sent with the gradients, or separately.
    assert sum(sizes) == 4 * NUM_PARAMETERS + 8
    assert sizes[-1] >= 4 * NUM_PARAMETERS
    assert {each.group_size for each in found.of_step()} == {found.num_replicas}


def test_nothing_inside_the_loop_reaches_the_host(topology):
    assert make_plan(topology).host_transfers == ()


def test_the_compiled_program_fits_into_the_memory_of_a_device(topology):
    found = make_plan(topology)
    assert found.fits
    assert "compiled, not run" in str(found)


def test_temporaries_are_no_larger_than_in_a_loop_written_by_hand(topology):
    devices = parse_topology(topology)
    trainer = make_trainer()
    with described(trainer, devices.num_devices, devices.target.platform) as loop:
        ours = compile_loop(loop, devices)
    by_hand = compile_loop(write_by_hand(loop), devices)
    # For 512 chips ours takes 0.23 MB more, of 1.8; on others none.
    for kind in "temporaries", "arguments":
        assert ours.memory[kind] <= 1.02 * by_hand.memory[kind] + 250_000


def write_by_hand(loop):
    """Returns the same loop in plain JAX, for the same devices."""
    mesh, adam = loop.mesh, optax.adam(LEARNING_RATE)

    def put(shape, dtype, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    shapes = [(64, 128), (128,), (128, 10), (10,)]
    params = [put(shape, jnp.float32) for shape in shapes]
    state = jax.tree.map(
        lambda leaf: put(leaf.shape, leaf.dtype), jax.eval_shape(adam.init, params)
    )
    leaves, tree = jax.tree.flatten((params, state))
    count = (CAPACITY, mesh.size, EXAMPLES)
    batches = [
        put((*count, 64), jnp.float32, None, "replica"),
        put(count, jnp.int32, None, "replica"),
    ]

    def step(carry, batch):
        params, state, total = carry
        image, label = (part[0] for part in batch)

        def loss_fn(params):
            hidden = jax.nn.relu(image @ params[0] + params[1][None])
            losses = cross_entropy(hidden @ params[2] + params[3][None], label)
            return jnp.sum(losses) / (EXAMPLES * mesh.size)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads = armillary.all_reduce("sum", grads)
        updates, state = adam.update(grads, state, params)
        total += jax.lax.psum(loss, "replica")
        return (optax.apply_updates(params, updates), state, total), None

    def run(leaves, batches):
        def on_replica(carry, batches):
            return jax.lax.scan(step, carry, batches)[0]

        whole = PartitionSpec()
        mapped = jax.shard_map(
            on_replica,
            mesh=mesh,
            in_specs=(whole, PartitionSpec(None, "replica")),
            out_specs=whole,
        )
        params, state, total = mapped(
            (*tree.unflatten(leaves), jnp.float32(0)), batches
        )
        return jax.tree.leaves((params, state)), [total]

    shardings = NamedSharding(mesh, PartitionSpec())
    fn = jax.jit(run, donate_argnums=0, out_shardings=shardings)
    return loop._replace(fn=fn, types=(leaves, batches))


def test_a_topology_that_the_compiler_does_not_know_is_an_error(topology):
    if not topology.startswith("v5e"):
        pytest.skip("GPUs may be connected in any way")
    with pytest.raises(PlanError, match="`topology` is 'v5e:3x5', but the compiler"):
        plan(make_trainer(), "v5e:3x5")
