"""The live line steps aside for whatever is written, and leaves nothing behind."""

import contextlib
import logging
import os
import sys
import threading

import pytest
from rich.text import Text

from armillary import _logging
from armillary.controller._display import LiveLine
from tests.screen import open_screen

say = print


@contextlib.contextmanager
def terminal():
    """Yields the screen of a terminal, and a line on it.

    No fixture: pytest sets the streams between the fixtures and the test.
    """
    with pytest.MonkeyPatch.context() as patch, open_screen() as (screen, follower):
        patch.setenv("COLUMNS", "40")
        patch.setenv("TERM", "xterm-256color")
        _logging.get_console.cache_clear()
        with os.fdopen(os.dup(follower), "w", buffering=1) as stream:
            patch.setattr(sys, "stderr", stream)
            patch.setattr(sys, "stdout", stream)
            line = LiveLine()
            yield screen, line
            line.close()
        _logging.get_console.cache_clear()


def test_what_is_written_stands_above_the_line():
    with terminal() as (screen, line):
        early = (
            logging.StreamHandler()
        )  # holds the stream, whatever `sys.stderr` is later
        line.show(Text("step 1"))
        say("a", "print", file=sys.stdout)
        line.show(Text("step 2"))
        early.emit(logging.makeLogRecord({"msg": "a record"}))
        _logging._ColorHandler().emit(logging.makeLogRecord({"msg": "of the library"}))
        line.show(Text("step 3"))

        assert screen.read() == "a print\na record\nof the library\nstep 3"
        assert screen.column == 0
        assert not screen.unknown


def test_closing_leaves_a_clean_terminal():
    with terminal() as (screen, line):
        write = sys.stderr.write
        line.show(Text("step 1"))
        line.close()

        assert screen.read() == ""
        assert "write" not in vars(sys.stderr)
        assert sys.stderr.write != write
        line.show(Text("step 2"))
        say("after", file=sys.stderr)
        assert screen.read() == "after\n"


def test_a_line_that_is_not_finished_is_left_alone():
    with terminal() as (screen, line):
        line.show(Text("step 1"))
        say("50%", end="", file=sys.stderr)
        line.show(Text("step 2"))
        assert screen.read() == "50%"

        say(" done", file=sys.stderr)
        line.show(Text("step 3"))
        assert screen.read() == "50% done\nstep 3"


def test_a_long_line_is_cut_off_at_the_edge():
    with terminal() as (screen, line):
        line.show(Text("x" * 60))
        line.show(Text("y" * 50))

        assert screen.read() == "y" * 38 + "…"


def test_another_function_over_write_stays():
    with terminal() as (screen, line):
        inner = sys.stderr.write
        seen = []
        vars(sys.stderr)["write"] = lambda text: (seen.append(text), inner(text))[1]
        line.close()

        say("one", file=sys.stderr)
        assert screen.read() == "one\n"
        assert seen == ["one", "\n"]
        del vars(sys.stderr)["write"]


def test_what_somebody_put_there_before_is_put_back():
    with terminal() as _:
        own = sys.stderr.write
        vars(sys.stderr)["write"] = own
        LiveLine().close()

        assert vars(sys.stderr).pop("write") is own


def test_nothing_is_drawn_while_a_shell_has_the_terminal(monkeypatch):
    with terminal() as (screen, line):
        monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
        line.show(Text("step 1"))
        assert screen.read() == ""

        monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp())
        line.show(Text("step 2"))
        assert screen.read() == "step 2"


def test_a_terminal_that_is_gone_is_no_error(monkeypatch):
    with terminal() as (screen, line):

        def fail(text):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(line, "_write", fail)
        line.show(Text("step 1"))
        line.show(Text("step 2"))

        say("past it", file=sys.stderr)
        assert screen.read() == "past it\n"


def test_a_forked_process_needs_no_lock(monkeypatch):
    with terminal() as (screen, line):
        held, may_go = threading.Event(), threading.Event()

        def hold():
            with line._lock:
                held.set()
                may_go.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(10)
        monkeypatch.setattr(line, "_pid", os.getpid() - 1)
        writer = threading.Thread(
            target=say, args=["child"], kwargs={"file": sys.stderr}
        )
        writer.start()
        try:
            assert screen.wait_for("child", seconds=5) == "child\n"
        finally:
            may_go.set()
            thread.join()
            writer.join()
