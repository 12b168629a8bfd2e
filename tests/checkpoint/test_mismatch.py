"""Tests of the diff between a checkpoint and a program."""

import pytest

from armillary.checkpoint._leaf import LeafSpec
from armillary.checkpoint._mismatch import check_match
from armillary.errors import CheckpointError, CheckpointMismatchError

KERNEL = LeafSpec("float32", (3, 3))


def check(
    saved: dict[str, LeafSpec],
    program: dict[str, LeafSpec],
    saved_states: list[str] | None = None,
    program_states: list[str] | None = None,
) -> None:
    check_match(
        "/run/checkpoint_5",
        saved=saved,
        program=program,
        saved_states=saved_states or [],
        program_states=program_states or [],
    )


def test_equal_leaves_pass() -> None:
    check({"a": KERNEL}, {"a": KERNEL}, ["data"], ["data"])


def test_the_diff_names_every_kind_of_difference_in_order_of_paths() -> None:
    with pytest.raises(CheckpointMismatchError, match="and 6 of its leaves") as info:
        check(
            {
                "model/a": KERNEL,
                "model/b": KERNEL,
                "model/c": LeafSpec("int8", ()),
                "model/same": KERNEL,
            },
            {
                "model/b": LeafSpec("float32", (4, 3)),
                "model/c": KERNEL,
                "model/d": LeafSpec("key<rbg>", ()),
                "model/same": KERNEL,
            },
            ["eval_dataset"],
            ["train_dataset"],
        )

    assert str(info.value) == (
        "`path` is '/run/checkpoint_5', and 6 of its leaves differ from the program, "
        "which must hold the same ones:\n"
        "  - eval_dataset: saved state  only in the checkpoint\n"
        "  - model/a: float32 (3, 3)  only in the checkpoint\n"
        "  ~ model/b: float32 (3, 3) in the checkpoint, float32 (4, 3) in the program\n"
        "  ~ model/c: int8 () in the checkpoint, float32 (3, 3) in the program\n"
        "  + model/d: key<rbg> ()  only in the program\n"
        "  + train_dataset: saved state  only in the program\n"
        "Build the objects as they were when this was saved, restore another "
        "checkpoint (`manager.restore(path)`), or use another `directory` to start "
        "afresh. Nothing was restored."
    )


def test_a_long_diff_ends_with_a_count() -> None:
    with pytest.raises(CheckpointError, match=r"\n  \.\.\. and 5 more\n") as info:
        check({f"a{i:02}": KERNEL for i in range(25)}, {})

    assert str(info.value).count("only in the checkpoint") == 20
