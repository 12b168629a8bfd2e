import pytest

from armillary.data import InputOptions


def test_defaults():
    options = InputOptions()
    assert (options.remainder, options.prefetch) == (None, 2)
    assert not options.place_on_device


def test_remainder_must_be_known():
    with pytest.raises(ValueError, match="`remainder` is 'fill', but it must be one"):
        InputOptions(remainder="fill")


@pytest.mark.parametrize("prefetch", [-1, 1.5, True])
def test_prefetch_must_be_a_count(prefetch):
    with pytest.raises(ValueError, match=f"`prefetch` is {prefetch}.*not negative"):
        InputOptions(prefetch=prefetch)


def test_place_on_device_must_be_yes_or_no():
    with pytest.raises(
        ValueError,
        match="`place_on_device` is 'gpu', but it must be one of True, False",
    ):
        InputOptions(place_on_device="gpu")
