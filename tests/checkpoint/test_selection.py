"""Tests of how parts of a checkpoint are selected, and of the diff in errors."""

import ast
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


# A run that was saved by `Checkpoint(trainer=trainer)`: the position in the data has
# the path of the trainer.
RUN = {
    "trainer": "saved state",
    "trainer/loss/total": "float32 ()",
    "trainer/model/bias": BIAS,
    "trainer/model/kernel": KERNEL,
    "trainer/optimizer/mu/kernel": KERNEL,
}
MODEL = {path: RUN[path] for path in ("trainer/model/bias", "trainer/model/kernel")}


def advice_in(error):
    """Returns the argument that an error suggests, as a dictionary."""
    argument, value = re.search(r"`(only|may_differ)=(.+?)`", str(error)).groups()
    value = ast.literal_eval(value)
    return {argument: (value,) if isinstance(value, str) else tuple(value)}


def test_the_model_of_a_run_is_read_as_the_error_says():
    only = Selection(only=("trainer",))
    with pytest.raises(CheckpointMismatchError, match="`only='trainer/model'`") as info:
        run(RUN, MODEL, only)
    taken, differences = run(RUN, MODEL, only._replace(**advice_in(info.value)))
    assert (taken, differences) == (sorted(MODEL), ())


def test_a_manager_restores_the_model_of_a_run_as_the_error_says():
    with pytest.raises(CheckpointMismatchError) as info:
        run(RUN, MODEL)
    advice = advice_in(info.value)
    parts = ("trainer", "trainer/loss", "trainer/optimizer")
    assert advice == {"may_differ": parts}
    taken, _ = run(RUN, MODEL, Selection(**advice))
    assert taken == sorted(MODEL)


def test_an_object_that_is_saved_inside_another_one_is_found():
    own = {path.removeprefix("trainer/"): spec for path, spec in MODEL.items()}
    line = "`Checkpoint(trainer={'model': model}).read(path, only='trainer/model')`"
    with pytest.raises(CheckpointMismatchError, match=re.escape(line)):
        run(RUN, own, Selection(only=("model",)))
    with pytest.raises(CheckpointMismatchError, match="no leaf is the same in both"):
        run(RUN, {"net/kernel": KERNEL}, Selection(only=("net",)))


def test_a_state_may_differ_next_to_an_array_below_its_path():
    program = RUN | {"trainer/extra": BIAS}
    with pytest.raises(CheckpointMismatchError, match="nothing of it") as info:
        run(RUN, program, Selection(may_differ=("trainer",)))
    advice = advice_in(info.value)
    assert advice == {"may_differ": ("trainer", "trainer/extra")}
    taken, _ = run(RUN, program, Selection(**advice))
    assert taken == sorted(RUN)


def test_one_difference_is_counted_in_the_singular():
    with pytest.raises(CheckpointMismatchError, match="1 leaf differs"):
        run(RUN, RUN | {"trainer/extra": BIAS})


NAMES = st.sampled_from(["a", "b", "ab"])
PART = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
PARTS = st.lists(PART, max_size=3).map(tuple)
PATHS = st.lists(NAMES, min_size=2, max_size=3)
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
    # A difference counts for the innermost part around it. A state may have the path
    # of a part with arrays, and counts for itself.
    left = set()
    for path in differing:
        around = [part for part in may_differ if is_named(path, [part])]
        left.update(part for part in sorted(around, key=len)[-1:] if part != path)
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


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(saved=LEAVES, program=LEAVES, only=st.none() | PARTS, may_differ=PARTS)
def test_the_advice_of_an_error_restores_what_matches(saved, program, only, may_differ):
    selection = Selection(only or None, may_differ=may_differ)
    try:
        run(saved, program, selection)
        return
    except CheckpointMismatchError as error:
        if "=[" not in str(error) and "='" not in str(error):
            return
        if "is neither in it" in str(error) or "use the saved name" in str(error):
            return
        if ").read(" in str(error):
            return
        advice = advice_in(error)
    wanted = selection._replace(**advice)
    try:
        taken, _ = run(saved, program, wanted)
    except CheckpointMismatchError as error:
        # A part that was too large is named first, and then its smaller parts.
        assert "nothing of it would be restored" in str(error)
        assert may_differ
        taken, _ = run(saved, program, selection._replace(**advice_in(error)))
    assert taken
