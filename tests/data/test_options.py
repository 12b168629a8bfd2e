import pytest

from armillary.data import InputOptions


def test_defaults():
    options = InputOptions()
    assert (options.remainder, options.prefetch) == (None, 2)
    assert not options.place_on_device


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"remainder": "fill"}, "`remainder` is 'fill', but it must be one"),
        ({"prefetch": -1}, "`prefetch` is -1.*not negative"),
        ({"prefetch": 1.5}, "`prefetch` is 1.5.*not negative"),
        ({"prefetch": True}, "`prefetch` is True.*not negative"),
        (
            {"place_on_device": "gpu"},
            "`place_on_device` is 'gpu', but it must be one of True, False",
        ),
    ],
)
def test_wrong_options_are_errors(option, message):
    with pytest.raises(ValueError, match=message):
        InputOptions(**option)
