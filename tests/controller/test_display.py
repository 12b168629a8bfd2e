"""Signs of life: one line in a terminal, and few log lines elsewhere."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from armillary import _logging, _process
from armillary._format import format_seconds
from armillary.controller import _display
from armillary.controller._controller import Controller
from armillary.controller._display import Display, LiveLine
from armillary.goodput import Category
from armillary.goodput._stopwatch import Stopwatch
from armillary.trainer._contract import AbstractTrainer
from tests.screen import open_screen


@pytest.fixture
def quick(monkeypatch):
    """Lets a tenth of a second be long."""
    monkeypatch.setattr(_display, "_LONG_SECONDS", 0.1)
    monkeypatch.setattr(_display, "_LOOK_SECONDS", 0.01)


@pytest.fixture
def display():
    return Display(SimpleNamespace(goodput=Stopwatch()), True)


def test_the_line_of_a_run(display, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    display._reset("train", 0, 1000)
    said = display._describe(Category.COMPILING, 12.7)
    assert said == "step 0/1000 (0%) | compiling for 12 s"

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
    said = [
        display._describe(Category.EVALUATING, 0.5),
        # A moment between steps does not flicker.
        display._describe(Category.OTHER, 0.1),
        display._describe(Category.OTHER, 2.0),
    ]
    doing = ["evaluating", "stepping", "actions, summaries, logging for 2 s"]
    assert said == [f"step 3 | 20.0 steps/sec | {each}" for each in doing]


@pytest.mark.parametrize(
    ("scalars", "shown"),
    [
        ({"loss": 1.0, "a_loss": 2.0}, "loss 1.0"),
        ({"accuracy": 0.5, "train/loss": 2.0}, "train/loss 2.0"),
        ({"accuracy": 0.5, "other": 1.0}, "accuracy 0.5"),
        ({"loss": float("nan")}, "loss nan"),
    ],
)
def test_the_loss_is_what_is_called_so(display, scalars, shown):
    display.note(1, 1.0, scalars)

    assert display._describe(Category.STEPPING, 0.0).endswith(f"| {shown}")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.91, "0.91 s"),
        (59.9, "59.9 s"),
        (60, "1 min"),
        (65, "1 min 5 s"),
        (3600, "1 h"),
        (7530, "2 h 5 min"),
    ],
)
def test_durations(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("term", "is_terminal", "level", "expected"),
    [
        ("xterm", True, "INFO", True),
        ("xterm", False, "INFO", False),
        ("dumb", True, "INFO", False),
        ("xterm", True, "WARNING", False),
    ],
)
def test_the_line_is_for_terminals_that_can_show_it(
    term, is_terminal, level, expected, monkeypatch, caplog
):
    caplog.set_level(level, "armillary")
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)

    assert _display.has_terminal() is expected


class Tee:
    """What programs put in the place of a stream."""

    def write(self, text):
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return True


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("make", [Tee, lambda: None])
def test_any_object_may_stand_for_a_stream(monkeypatch, name, make):
    monkeypatch.setattr(sys, name, make())
    train()


def stay(stopwatch, category, seconds):
    with stopwatch.phase(category):
        time.sleep(seconds)


def test_a_phase_that_takes_long_is_logged_at_doubling_times(quick, caplog, display):
    caplog.set_level("INFO", "armillary")
    stopwatch = display._run.goodput
    with display.on("train", 40, 100):
        stay(stopwatch, Category.DATA, 0.05)
        # It is another phase each time, however often.
        for _ in range(4):
            stay(stopwatch, Category.DATA, 0.05)
        assert caplog.messages == []
        stay(stopwatch, Category.DATA, 0.6)

    # After 0.1, 0.2 and 0.4 seconds.
    line = "train | step:     40 | waiting for data for 0 s ..."
    assert caplog.messages == [line] * 3


def test_compiling_is_a_phase_of_its_own(quick, caplog, display):
    caplog.set_level("INFO", "armillary")

    def slow(x):
        time.sleep(0.15)
        return jnp.sin(x)

    with display.on("train", 0), display._run.goodput.phase(Category.STEPPING):
        time.sleep(0.05)
        jax.jit(slow)(1.0)
        time.sleep(0.15)

    doing = [message.split(" | ")[2].split(" for ")[0] for message in caplog.messages]
    assert list(dict.fromkeys(doing)) == ["compiling", "stepping"]


def test_what_takes_long_is_named_when_it_takes_longer_than_before(display, caplog):
    caplog.set_level("INFO", "armillary")
    for _ in range(3):
        for seconds in (29, 30, 31, 61, 100, 130):
            display._say_if_long(Category.SAVING, seconds)
    display._say_if_long(Category.EVALUATING, 35)

    assert caplog.messages == [
        "train | step:     -1 | saving for 30 s ...",
        "train | step:     -1 | saving for 1 min ...",
        "train | step:     -1 | saving for 2 min ...",
        " eval | step:     -1 | evaluating for 30 s ...",
    ]


class Sleeping(AbstractTrainer):
    step = 0

    def train(self, num_steps):
        time.sleep(0.3)
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
    quick, caplog, monkeypatch, capsys, progress, index
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


def test_what_is_written_stands_above_the_line():
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
        assert screen.column == 0
        assert not screen.unknown


def test_closing_leaves_a_clean_terminal():
    with terminal() as (screen, line):
        line.show("step 1")
        line.close()

        assert screen.read() == ""
        line.show("step 2")
        say("after", file=sys.stderr)
        assert screen.read() == "after\n"


def test_a_line_that_is_not_finished_is_left_alone():
    with terminal() as (screen, line):
        line.show("step 1")
        say("50%", end="", file=sys.stderr, flush=True)
        line.show("step 2")
        assert screen.read() == "50%"

        say(" done", file=sys.stderr)
        line.show("step 3")
        assert screen.read() == "50% done\nstep 3"


def test_a_long_line_is_cut_off_at_the_edge():
    with terminal() as (screen, line):
        line.show("x" * 60)
        line.show("y" * 50)

        assert screen.read() == "y" * 39


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
import sys, time
import jax, jax.numpy as jnp
from armillary.controller._controller import Controller
from armillary.trainer._contract import AbstractTrainer

class Trainer(AbstractTrainer):
    step = 0
    def train(self, num_steps):
        if self.step == 0:
            jax.jit(self.slow)(1.0)
        print("a line of the program")
        time.sleep(1.5)
        self.step += num_steps
        if self.step == 2:
            raise ValueError("in the step")
        return {"loss": 1 / self.step}
    def slow(self, x):
        time.sleep(1.5)
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


@pytest.mark.each_case
@pytest.mark.slow
def test_a_run_in_a_terminal_that_an_exception_ends():
    with open_screen() as (screen, follower), start(follower) as process:
        seen = [
            screen.wait_for(text)
            for text in (
                "step 0/9 (0%) | compiling for 1 s",
                "step 0/9 (0%) | stepping",
                "| stepping for 1 s | loss 1.0",
            )
        ]
        assert process.wait(60) != 0
        lines = screen.read().splitlines()

    assert seen[2].splitlines()[-1].startswith("step 1/9 (11%) | ETA ")
    assert lines[1] == "train | step:      0 | training until step 9..."
    assert [line[:21] for line in lines[2:5]] == [
        "a line of the program",
        "train | step:      1 ",
        "a line of the program",
    ]
    assert lines[5].startswith("Traceback")
    assert lines[-1] == "ValueError: in the step"
    assert not screen.unknown
    assert screen.column == 0


@pytest.mark.slow
@pytest.mark.each_case
def test_the_terminal_is_clean_after_ctrl_c():
    with open_screen() as (screen, follower), start(follower) as process:
        screen.wait_for("step 0/9 (0%) | stepping")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
        text = screen.read()

    assert "0%" not in text
    assert "KeyboardInterrupt" in text
    assert "\na line of the program\nTraceback" in text
    assert screen.column == 0
