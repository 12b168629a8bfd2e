"""Tests of the program behind `make busy`."""

import sys

from tests.busy import busy_loops, run_in_turn


def test_loops_run_until_the_end():
    with busy_loops(2) as loops:
        assert [loop.poll() for loop in loops] == [None, None]

    assert all(loop.returncode < 0 for loop in loops)


def test_each_command_has_a_line_with_its_exit_code(capfd):
    commands = [[sys.executable, "-c", f"raise SystemExit({code})"] for code in (0, 3)]

    assert run_in_turn(commands) == [0, 3]

    first, second = capfd.readouterr().out.splitlines()
    assert "exit code 0" in first
    assert "exit code 3" in second
