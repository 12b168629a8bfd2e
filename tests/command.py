"""Runs the command `armillary` in the process of a test."""

from collections.abc import Sequence

from armillary._cli import main


def run_command(words: Sequence[str]) -> int:
    """Returns the exit code of `armillary` with some words."""
    return main(list(words))
