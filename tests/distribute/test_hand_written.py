"""Tests that a sharded step sends and holds no more than one written by hand."""

import re
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import armillary
from armillary.plan._compile_worker import compile_exported
from armillary.plan._compiler import export_loop
from armillary.plan._traffic import find_traffic
from armillary.testing import find_collectives
from armillary.trainer._described import described
from benchmarks.contestants import sharded

NUM_DEVICES = 8
SIZES = sharded.Sizes(width=64, depth=4, batch_size=64)
STACKS = {(4, 64, 256), (4, 256, 64)}


@pytest.fixture(scope="module")
def by_hand():
    """The hand-written step, and the text of its program."""
    mesh = jax.make_mesh((NUM_DEVICES,), (sharded.AXIS,), axis_types=(AxisType.Auto,))
    step = sharded.HandWritten(SIZES, mesh)
    rows = sharded.make_rows(SIZES)[: SIZES.batch_size]
    batch = jax.device_put(rows, step.batch_sharding)
    return step, step.program.lower(step.state, batch).compile().as_text()


def make_trainer(rules=None):
    strategy = armillary.ShardedStrategy({"fsdp": NUM_DEVICES}, rules)
    return sharded.make_trainer(SIZES, strategy)


def sum_up(collectives):
    """Returns the runs and the bytes of each kind of collective."""
    runs = Counter()
    num_bytes = Counter()
    for each in collectives:
        runs[each.kind] += each.times
        num_bytes[each.kind] += each.times * each.num_bytes
    return runs, num_bytes


def test_a_step_sends_no_more_than_one_written_by_hand(by_hand):
    _, text = by_hand
    traffic = find_traffic(text, 0, NUM_DEVICES)
    expected_runs, expected_bytes = sum_up(traffic.collectives)

    runs, num_bytes = sum_up(find_collectives(make_trainer()))

    # Forward, and again in the backward pass: two kernels in each of four layers.
    assert expected_runs["all-gather"] >= 2 * 2 * SIZES.depth
    assert runs["all-gather"] >= 2 * 2 * SIZES.depth
    assert sum(num_bytes.values()) <= sum(expected_bytes.values())
    assert sum(runs.values()) <= sum(expected_runs.values())
    for kind in runs:
        assert runs[kind] <= expected_runs[kind], (kind, runs, expected_runs)
        assert num_bytes[kind] <= expected_bytes[kind], (kind, num_bytes)


def compile_text(trainer):
    with described(trainer, NUM_DEVICES, "cpu") as loop:
        program = export_loop(loop, "cpu")
    mesh = trainer.strategy.mesh
    compiled = compile_exported(program, mesh, "cpu", loop.compiler_options)
    return compiled.as_text()


def find_shapes(text):
    """Returns the shapes of all arrays of a program with several axes."""
    return {
        tuple(map(int, found.split(",")))
        for found in re.findall(r"[a-z]+\d+\[(\d+(?:,\d+)+)\]", text)
    }


def test_no_array_of_the_program_is_a_whole_stack_of_parameters(by_hand):
    shapes = find_shapes(compile_text(make_trainer()))
    # One layer at a time, and the parts of a device.
    assert (64, 256) in shapes
    assert (4, 64, 32) in shapes
    assert not STACKS & shapes
    _, text = by_hand
    assert not STACKS & find_shapes(text)


def test_only_what_a_rule_leaves_whole_is_whole_in_the_program():
    rules = {"up": jax.sharding.PartitionSpec()}
    shapes = find_shapes(compile_text(make_trainer(rules)))
    assert STACKS & shapes == {(4, 64, 256)}


def test_both_have_the_same_losses(by_hand):
    step, _ = by_hand
    rows = sharded.make_rows(SIZES).reshape(sharded.NUM_BATCHES, -1, SIZES.width)
    trainer = make_trainer()
    for batch in rows[:3]:
        x = jax.device_put(batch, step.batch_sharding)
        step.state, loss = step.program(step.state, x)
        found = trainer.train(1)["loss"]
        np.testing.assert_allclose(float(found), float(loss), rtol=1e-2)
