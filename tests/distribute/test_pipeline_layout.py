"""Tests of the parts of a batch that the processes of a mesh hold."""

from functools import cached_property
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import armillary
from armillary.data._layout import find_pipeline
from armillary.distribute.strategies._layouts import MeshLayout, PipelineLayout


def make_mesh(shape=(4, 2)):
    return Mesh(np.array(jax.devices()[:8]).reshape(shape), ("data", "tensor"))


def make_layout(parts, index=0):
    """Returns the layout of processes that hold some parts of a batch of 4 parts."""

    class Layout(PipelineLayout):
        @cached_property
        def _parts_of_processes(self):
            return parts

    peers = SimpleNamespace(index=index, count=len(parts), is_alone=False)
    return Layout(make_mesh(), peers, ("data",))


def test_a_process_places_the_rows_of_all_its_parts():
    layout = PipelineLayout(make_mesh(), axes=("data",))
    assert layout.pipelines == ((0,),)
    batch = {"x": np.arange(24, dtype=np.float32).reshape(8, 3)}
    chunk = {"x": np.arange(48, dtype=np.float32).reshape(2, 8, 3)}
    plain = layout.of_strategy()
    assert type(plain) is MeshLayout
    for arrays, leading_axes in ((batch, 0), (chunk, 1)):
        placed = layout.place(arrays, leading_axes)["x"]
        expected = plain.place(arrays, leading_axes)["x"]
        assert placed.sharding == expected.sharding
        for own, other in zip(
            placed.addressable_shards, expected.addressable_shards, strict=True
        ):
            np.testing.assert_array_equal(own.data, other.data)


PIPELINES = {
    "each alone": ({0: (0,), 1: (1,), 2: (2,), 3: (3,)}, ((0,), (1,), (2,), (3,))),
    "in pairs": ({0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, ((0, 1), (2, 3))),
    "not in order": ({0: (1, 3), 1: (0, 2)}, ((1,), (0,))),
    "all together": ({0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}, ((0, 1),)),
}


@pytest.mark.parametrize("case", PIPELINES)
def test_processes_with_the_same_parts_are_one_pipeline(case):
    parts, expected = PIPELINES[case]
    for index in parts:
        layout = make_layout(parts, index)
        assert layout.pipelines == expected
        assert index in expected[find_pipeline(layout)]


@pytest.mark.parametrize(
    "parts",
    [
        {0: (0, 1), 1: (1, 2), 2: (2, 3), 3: (0, 3)},
        {0: (0,), 1: (1, 2, 3)},
        {0: (0, 1, 2, 3), 1: (0,)},
    ],
)
def test_parts_that_overlap_or_differ_in_number_are_refused(parts):
    message = (
        r"(?s)`input_context`.*the mesh \{'data': 4, 'tensor': 2\}.*\n  process 0: 0"
        r".*Use a mesh .*strategy\.distribute_dataset\(dataset\)"
    )
    with pytest.raises(ValueError, match=message):
        make_layout(parts)


def test_one_process_has_one_pipeline():
    strategy = armillary.ShardedStrategy({"data": 4, "tensor": 2})
    context = strategy.input_context
    assert (context.num_input_pipelines, context.num_replicas_in_sync) == (1, 1)
    assert strategy.layout.of_pipelines() is strategy.layout
