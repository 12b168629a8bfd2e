"""Options of distributed data, and the share of the data that a process reads."""

import dataclasses

import pytest

from armillary.data import InputContext, InputOptions
from armillary.errors import BatchSizeError
from tests.mistakes import mistakes


def test_defaults():
    options = InputOptions()
    assert (options.remainder, options.prefetch) == (None, 2)
    assert not options.place_on_device
    context = InputContext()
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.get_per_replica_batch_size(7) == 7


def test_per_replica_batch_size_is_an_equal_share():
    context = InputContext(num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(64) == 16
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.input_pipeline_id = 3


def share(size, num_replicas):
    return InputContext(num_replicas_in_sync=num_replicas).get_per_replica_batch_size(
        size
    )


@mistakes(
    {
        BatchSizeError: {
            r"100, which 8 replicas .* \(100 % 8 = 4\).*multiple of 8": (
                lambda: share(100, 8)
            ),
        },
    }
)
def test_mistakes_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
