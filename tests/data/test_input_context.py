import dataclasses
import re

import pytest

from armillary.data import InputContext
from armillary.errors import BatchSizeError


def test_per_replica_batch_size_is_an_equal_share():
    context = InputContext(num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(64) == 16


def test_defaults_are_one_pipeline_and_one_replica():
    context = InputContext()
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.get_per_replica_batch_size(7) == 7


@pytest.mark.parametrize(
    ("num_replicas", "size", "error", "message"),
    [
        (
            8,
            100,
            BatchSizeError,
            "`global_batch_size` is 100, which 8 replicas cannot share equally "
            "(100 % 8 = 4). Use a multiple of 8, such as `global_batch_size=96` or "
            "`global_batch_size=104`.",
        ),
        (4, 3, BatchSizeError, "such as `global_batch_size=4`."),
        (1, 0, ValueError, "`global_batch_size` is 0"),
    ],
)
def test_a_batch_that_replicas_cannot_share_is_an_error(
    num_replicas, size, error, message
):
    context = InputContext(num_replicas_in_sync=num_replicas)
    with pytest.raises(error, match=re.escape(message)):
        context.get_per_replica_batch_size(size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_input_pipelines": 0}, "`num_input_pipelines` is 0"),
        ({"num_replicas_in_sync": -1}, "`num_replicas_in_sync` is -1"),
        ({"input_pipeline_id": -1}, "`input_pipeline_id` is -1, but it must be an"),
        ({"input_pipeline_id": 1.5}, "`input_pipeline_id` is 1.5"),
        (
            {"num_input_pipelines": 2, "input_pipeline_id": 2},
            "`input_pipeline_id` is 2, but it must be an integer that is not negative "
            "and at most 1",
        ),
    ],
)
def test_bad_counts_are_errors(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        InputContext(**arguments)


def test_context_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        InputContext().input_pipeline_id = 3
