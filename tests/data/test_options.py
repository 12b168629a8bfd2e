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
        ValueError: {
            "`remainder` is 'fill', but it must be one": lambda: InputOptions(
                remainder="fill"
            ),
            "`prefetch` is -1.*not negative": lambda: InputOptions(prefetch=-1),
            "`prefetch` is 1.5.*not negative": lambda: InputOptions(prefetch=1.5),
            "`prefetch` is True.*not negative": lambda: InputOptions(prefetch=True),
            "`place_on_device` is 'gpu', but it must be one of True, False": (
                lambda: InputOptions(place_on_device="gpu")
            ),
            "`num_input_pipelines` is 0": lambda: InputContext(0),
            "`num_replicas_in_sync` is -1": lambda: InputContext(
                num_replicas_in_sync=-1
            ),
            "`input_pipeline_id` is -1, but it must be an": lambda: InputContext(1, -1),
            "`input_pipeline_id` is 1.5": lambda: InputContext(1, 1.5),
            "`input_pipeline_id` is 2, .* and at most 1": lambda: InputContext(2, 2),
            "`input_pipeline_id` is 1, .* and at most 0": lambda: InputContext(1, 1),
            "`global_batch_size` is 0": lambda: share(0, 1),
        },
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
