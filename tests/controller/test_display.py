"""Tests of the live line in a terminal, and of the log lines for slow phases."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from armillary import AbstractTrainer, Controller, _logging, _process
from armillary._format import format_seconds
from armillary.controller import _display, _live_line
from armillary.controller._display import Display
from armillary.controller._live_line import LiveLine
from armillary.goodput import Category, _stopwatch
from armillary.goodput._stopwatch import Stopwatch
from tests.goodput.conftest import FakeClock
from tests.patience import patience, wait_until
from tests.screen import open_screen


class Clock(FakeClock):
    """Counts how often the thread of the display has looked at it."""

    num_looks = 0

    def __call__(self):
        if threading.current_thread().name == "armillary-display":
            self.num_looks += 1
        return self.now

    def be_seen(self):
        """Waits until the display has seen what is now."""
        # It reads the clock twice when a phase begins, and once after that.
        enough = self.num_looks + 4
        wait_until(lambda: self.num_looks >= enough)

    def spend(self, seconds):
        """Lets time pass, in a phase that the display has seen from its start."""
        self.be_seen()
        self.now += seconds
        self.be_seen()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_display, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(_stopwatch, "_now", clock)
    monkeypatch.setattr(_display, "_LOOK_SECONDS", 0.01)
    return clock


@pytest.fixture
def display():
    return Display(SimpleNamespace(goodput=Stopwatch()), True)


def test_the_line_of_a_run(display, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    display._reset("train", 0, 1000)
    description = display._describe(Category.COMPILING, 12.7)
    assert description == "step 0/1000 (0%) | compiling for 12 s"

    display.note(400, 20.0, {"accuracy": 0.5, "loss": 0.123456789})
    assert display._describe(Category.STEPPING, 0.1) == (
        "step 400/1000 (40%) | ETA 30 s | 20.0 steps/sec | stepping | loss 0.12346"
    )

    # Evaluations and saves take as long as steps here.
    now = 110.0
    display.note(500, 20.0, {"accuracy": 0.5, "loss": 0.1})
    now = 112.0
    assert display._describe(Category.DATA, 2.0) == (
        "step 500/1000 (50%) | ETA 48 s | 20.0 steps/sec | waiting for data for 2 s | "
        "loss 0.1"
    )


def test_the_line_of_a_run_without_an_end(display):
    display.note(3, 20.0, {})
    description = display._describe(Category.EVALUATING, 0.5)
    assert description == "step 3 | 20.0 steps/sec | evaluating"


def test_durations():
    durations = list(map(format_seconds, (0.91, 59.9, 60, 65, 3600, 7530)))
    assert durations == ["0.91 s", "59.9 s", "1 min", "1 min 5 s", "1 h", "2 h 5 min"]


def test_the_line_is_for_terminals_that_can_show_it(monkeypatch, caplog):
    def has_terminal(term="xterm", is_terminal=True, level="INFO"):
        caplog.set_level(level, "armillary")
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
        return _live_line.has_terminal()

    assert has_terminal()
    others = {"is_terminal": False}, {"term": "dumb"}, {"level": "WARNING"}
    assert not any(has_terminal(**other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("stream", [SimpleNamespace(isatty=lambda: True), None])
def test_any_object_may_stand_for_a_stream(monkeypatch, name, stream):
    if stream is not None:
        stream.write, stream.flush = len, lambda: None
    monkeypatch.setattr(sys, name, stream)
    train()


def test_a_phase_that_takes_long_is_logged_at_doubling_times(clock, caplog, display):
    caplog.set_level("INFO", "armillary")

    def stay(category, seconds):
        with display._run.goodput.phase(category):
            clock.spend(seconds)

    with display.on("train", 40, 100):
        # It is another phase each time, however often.
        for _ in range(4):
            stay(Category.DATA, 25.0)
        assert caplog.messages == []
        stay(Category.DATA, 200.0)

    line = "train | step:     40 | waiting for data for {} ..."
    times = ("30 s", "1 min", "2 min")
    assert caplog.messages == [line.format(each) for each in times]


def test_compiling_is_a_phase_of_its_own(clock, caplog, display):
    caplog.set_level("INFO", "armillary")

    def slow(x):
        clock.spend(40.0)
        return jnp.sin(x)

    with display.on("train", 0), display._run.goodput.phase(Category.STEPPING):
        clock.spend(20.0)
        jax.jit(slow)(1.0)
        clock.spend(40.0)

    doing = [message.split(" | ")[2].split(" for ")[0] for message in caplog.messages]
    assert list(dict.fromkeys(doing)) == ["compiling", "stepping"]


class Sleeping(AbstractTrainer):
    step = 0

    def train(self, num_steps):
        time.sleep(patience(0.3))
        self.step += num_steps
        return {"loss": 0.5}


def train(**options):
    trainer = Sleeping()
    Controller(
        trainer=trainer, global_step=lambda: trainer.step, steps_per_loop=1, **options
    ).train(2)


def find_signs(caplog):
    return [message for message in caplog.messages if message.endswith("...")][1:]


@pytest.mark.parametrize(("progress", "index"), [(False, 0), (True, 1)])
def test_progress_may_be_off_and_is_the_chiefs(
    caplog, monkeypatch, capsys, progress, index
):
    monkeypatch.setattr(_process, "_current", _process.Process(index, 1 + index))
    monkeypatch.setattr(Display, "_look", None)  # There is no thread to call it.
    train(progress=progress)

    assert find_signs(caplog) == []
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_the_line(capsys, monkeypatch):
    monkeypatch.setattr(_display, "has_terminal", lambda: True)
    monkeypatch.setattr(_display, "_REFRESH_SECONDS", 0.05)
    train()

    shown = capsys.readouterr().err.split("\r")
    assert any(text.startswith("step 0/2 (0%) | stepping") for text in shown)
    assert shown[-1] == "\x1b[K"
    assert "armillary-display" not in [each.name for each in threading.enumerate()]


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


def test_printed_text_stands_above_the_line():
    with terminal() as (screen, line):
        early = logging.StreamHandler()  # It holds the stream.
        line.show("step 1")
        say("a", "print", file=sys.stdout)
        line.show("step 2")
        early.emit(logging.makeLogRecord({"msg": "a record"}))
        own = logging.makeLogRecord({"msg": "of the library", "levelno": logging.INFO})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_logging, "_is_root_configured", lambda: False)
            _logging._FallbackHandler().emit(own)
        line.show("step 3")

        assert screen.read() == "a print\na record\nof the library\nstep 3"
        say("50%", end="", file=sys.stderr, flush=True)
        line.show("it may write on")
        say(" done", file=sys.stderr)
        line.show("x" * 60)
        line.show("y" * 50)
        above = "a print\na record\nof the library\n50% done\n"
        assert screen.read() == above + "y" * 39
        line.close()
        line.show("step 4")
        say("after", file=sys.stderr)
        assert screen.read() == above + "after\n"
        assert screen.column == 0
        assert not screen.unknown


def test_functions_of_others_stay():
    with terminal() as (screen, line):
        inner, seen = sys.stderr.write, []
        sys.stderr.write = lambda text: (seen.append(text), inner(text))[1]
        own = sys.stderr.write
        LiveLine().close()
        assert sys.stderr.write is own
        line.close()

        say("one", file=sys.stderr)
        assert screen.read() == "one\n"
        assert seen == ["one", "\n"]


def test_a_terminal_that_is_gone_is_no_error(monkeypatch):
    with terminal() as (screen, line):

        def fail(text):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(line, "_write", fail)
        line.show("step 1")
        line.show("step 2")

        say("past it", file=sys.stderr)
        assert screen.read() == "past it\n"


PROGRAM = """
import os, sys, time
import jax, jax.numpy as jnp
from armillary import Controller
from armillary import AbstractTrainer

seconds = 1.5 * float(os.environ["ARMILLARY_TEST_PATIENCE"])

class Trainer(AbstractTrainer):
    step = 0
    def train(self, num_steps):
        if self.step == 0:
            jax.jit(self.slow)(1.0)
        print("a line of the program")
        time.sleep(seconds)
        self.step += num_steps
        return {"loss": 1 / self.step}
    def slow(self, x):
        time.sleep(seconds)
        return jnp.sin(x)

jax.devices()
trainer = Trainer()
controller = Controller(
    trainer=trainer, global_step=lambda: trainer.step, steps_per_loop=1)
controller.train(9)
"""


@contextlib.contextmanager
def start(follower):
    names = ("NO_COLOR", "COLUMNS")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=follower,
        stderr=follower,
        env={**environment, "TERM": "xterm-256color", "COLUMNS": "100"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_run_in_a_terminal_that_ctrl_c_ends():
    with open_screen() as (screen, follower), start(follower) as process:
        seen = [
            screen.wait_until(re.compile(text).search)
            for text in (
                r"step 0/9 \(0%\) \| compiling for \d+ s",
                r"step 0/9 \(0%\) \| stepping",
                r"\| stepping for \d+ s \| loss 1\.0",
            )
        ]
        process.send_signal(signal.SIGINT)
        assert process.wait(patience(120)) != 0
        lines = screen.read().splitlines()

    assert seen[2].splitlines()[-1].startswith("step 1/9 (11%) | ETA ")
    assert lines[1] == "train | step:      0 | training until step 9..."
    assert [line[:21] for line in lines[2:5]] == [
        "a line of the program",
        "train | step:      1 ",
        "a line of the program",
    ]
    assert lines[5].startswith("Traceback")
    assert lines[-1].startswith("KeyboardInterrupt")
    assert not any("%" in line for line in lines)
    assert not screen.unknown
    assert screen.column == 0
