"""Tests of how parts of a checkpoint are selected, and of the diff in errors."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.checkpoint._selection import Selection, match
from armillary.errors import CheckpointMismatchError

KERNEL, BIAS = "float32 (3, 3)", "float32 (3,)"
WHOLE = Selection()


def run(saved, program, selection=WHOLE):
    return match("/run/checkpoint_5", selection, saved=saved, program=program)


def test_the_diff_names_every_kind_of_difference_in_order_of_paths():
    saved = {
        "eval_dataset": "saved state",
        "model/a": KERNEL,
        "model/b": KERNEL,
        "model/c": "int8 ()",
        "model/same": KERNEL,
    }
    program = {
        "train_dataset": "saved state",
        "model/b": "float32 (4, 3)",
        "model/c": KERNEL,
        "model/d": "key<rbg> ()",
        "model/same": KERNEL,
    }
    with pytest.raises(CheckpointMismatchError) as info:
        run(saved, program)
    assert (
        "\n  - eval_dataset: saved state  only in the checkpoint\n"
        "  - model/a: float32 (3, 3)  only in the checkpoint\n"
        "  ~ model/b: float32 (3, 3) in the checkpoint, float32 (4, 3) in the program\n"
        "  ~ model/c: int8 () in the checkpoint, float32 (3, 3) in the program\n"
        "  + model/d: key<rbg> ()  only in the program\n"
        "  + train_dataset: saved state  only in the program\n"
    ) in str(info.value)


ADAM = {
    "model/kernel": KERNEL,
    "optimizer/opt_state/0/count": "int32 ()",
    "optimizer/opt_state/0/mu/kernel": KERNEL,
    "optimizer/opt_state/0/nu/kernel": KERNEL,
    "optimizer/step": "uint32 ()",
}


@pytest.mark.parametrize(
    ("program", "part"),
    [
        ({"optimizer/opt_state/0/trace/kernel": KERNEL}, "optimizer/opt_state"),
        ({**ADAM, "ema/kernel": KERNEL}, "ema"),
        ({**ADAM, "model/kernel": BIAS}, "model"),
        ({**ADAM, "optimizer/opt_state/0/mu/kernel": BIAS}, "optimizer/opt_state/0/mu"),
    ],
    ids=["another optimizer", "averages", "a shape", "one moment"],
)
def test_an_error_names_the_largest_parts_that_would_have_to_differ(program, part):
    kept = {name: ADAM[name] for name in ("model/kernel", "optimizer/step")}
    program = kept | program
    with pytest.raises(CheckpointMismatchError, match=f"`may_differ='{part}'`"):
        run(ADAM, program)
    # The line in the message works.
    taken, differences = run(ADAM, program, Selection(may_differ=(part,)))
    assert differences
    assert not any(name.startswith(part) for name in taken)
    assert "optimizer/step" in taken


NAMES = st.sampled_from(["a", "b", "ab"])
PART = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
PARTS = st.lists(PART, max_size=3).map(tuple)
PATHS = st.lists(st.sampled_from(["a", "b", "ab"]), min_size=3, max_size=3)
LEAVES = st.dictionaries(PATHS.map("/".join), st.sampled_from([KERNEL, BIAS]))


def is_named(path, parts):
    """A second definition of what is inside a part, by regular expressions."""
    return any(re.match(f"{part}(/|$)", path) for part in parts)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(saved=LEAVES, program=LEAVES, only=PARTS, skip=PARTS, may_differ=PARTS)
def test_the_restored_parts_are_the_parts_of_the_arguments(
    saved, program, only, skip, may_differ
):
    selection = Selection(only or None, skip, may_differ)

    def is_wanted(path):
        return (not only or is_named(path, only)) and not is_named(path, skip)

    differing = {
        path
        for path in saved.keys() | program.keys()
        if is_wanted(path) and saved.get(path) != program.get(path)
    }
    left = [part for part in may_differ if any(is_named(p, [part]) for p in differing)]
    expected = {
        path
        for path in saved.keys() & program.keys() - differing
        if is_wanted(path) and not is_named(path, left)
    }
    try:
        taken, differences = run(saved, program, selection)
    except CheckpointMismatchError as error:
        is_slip = "is neither in it" in str(error)
        is_bad = any(not is_named(path, may_differ) for path in differing)
        assert is_slip or is_bad or not expected
    else:
        assert taken == sorted(expected)
        assert len(differences) == len(differing)
        assert all(is_named(path, may_differ) for path in differing)
