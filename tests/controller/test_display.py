"""Signs of life: one line in a terminal, and few log lines elsewhere."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from armillary import _process
from armillary._format import format_seconds
from armillary.controller import _display
from armillary.controller._controller import Controller
from armillary.controller._display import Display
from armillary.goodput import Category
from armillary.goodput._journal import Recorder
from armillary.trainer._contract import AbstractTrainer
from tests.screen import open_screen


@pytest.fixture
def quick(monkeypatch):
    """Lets a tenth of a second be long."""
    monkeypatch.setattr(_display, "_LONG_SECONDS", 0.1)
    monkeypatch.setattr(_display, "_LOOK_SECONDS", 0.01)


@pytest.fixture
def display():
    return Display(Recorder(None), None)


def describe(display, category, seconds):
    return display._describe(category, seconds).plain


def test_the_line_before_the_first_step(display):
    display._step, display._target = 0, 2000

    text = describe(display, Category.COMPILING, 12.7)

    assert text == "step 0/2000 (0%) | compiling for 12 s"


def test_the_line_of_a_run_that_goes_on(display, monkeypatch):
    display._target = 1000
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    display.note(400, 20.0, {"accuracy": 0.5, "loss": 0.123456789})
    assert describe(display, Category.STEPPING, 0.1) == (
        "step 400/1000 (40%) | ETA 30 s | 20.0 steps/sec | stepping | loss 0.12346"
    )

    # Evaluations and saves take as long as steps here.
    monkeypatch.setattr(time, "perf_counter", lambda: 110.0)
    display.note(500, 20.0, {"accuracy": 0.5, "loss": 0.1})
    monkeypatch.setattr(time, "perf_counter", lambda: 112.0)
    assert describe(display, Category.DATA, 2.0) == (
        "step 500/1000 (50%) | ETA 48 s | 20.0 steps/sec | waiting for data for 2 s | "
        "loss 0.1"
    )


def test_the_line_of_a_run_without_an_end(display):
    display.note(400, 20.0, {})

    assert describe(display, Category.EVALUATING, 0.5) == (
        "step 400 | 20.0 steps/sec | evaluating"
    )


def test_a_moment_between_steps_does_not_flicker(display):
    display._step = 3
    assert describe(display, Category.OTHER, 0.1) == "step 3 | stepping"
    assert describe(display, Category.OTHER, 2.0) == (
        "step 3 | actions, summaries, logging for 2 s"
    )


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

    assert describe(display, Category.STEPPING, 0.0).endswith(f"| {shown}")


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
    ("environment", "is_terminal", "level", "expected"),
    [
        ({"TERM": "xterm"}, True, "INFO", True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, "INFO", True),
        ({"TERM": "xterm"}, False, "INFO", False),
        ({"TERM": "dumb"}, True, "INFO", False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, "INFO", False),
        ({"TERM": "xterm"}, True, "WARNING", False),
    ],
)
def test_the_line_is_for_terminals_that_can_show_it(
    environment, is_terminal, level, expected, monkeypatch, caplog
):
    caplog.set_level(level, "armillary")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)

    assert _display._has_terminal() is expected


class Tee:
    """What programs put in the place of a stream."""

    def write(self, text):
        return len(text)

    def flush(self):
        pass


class Slotted(Tee):
    __slots__ = ()


@pytest.mark.parametrize("progress", [None, True])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("make", [Tee, Slotted, lambda: None])
def test_any_object_may_stand_for_a_stream(monkeypatch, progress, name, make):
    monkeypatch.setattr(sys, name, make())
    train(progress=progress)


def stay(recorder, category, seconds):
    with recorder.phase(category):
        time.sleep(seconds)


def test_a_phase_that_takes_long_is_logged_at_doubling_times(quick, caplog):
    caplog.set_level("INFO", "armillary")
    recorder = Recorder(None)
    with Display(recorder, None).on("train", 40, 100):
        stay(recorder, Category.DATA, 0.05)
        assert caplog.messages == []
        stay(recorder, Category.DATA, 0.6)

    # After 0.1, 0.2 and 0.4 seconds.
    line = "train | step:     40 | waiting for data for 0 s ..."
    assert caplog.messages == [line] * 3


def test_the_line_names_the_time_that_has_passed(display, caplog):
    caplog.set_level("INFO", "armillary")
    for seconds in (29, 30, 31, 61, 100, 130):
        display._say_if_long(Category.SAVING, 5.0, seconds)
    display._say_if_long(Category.SAVING, 7.0, 35)
    display._say_if_long(Category.EVALUATING, 9.0, 35)

    assert caplog.messages == [
        "train | step:     -1 | saving for 30 s ...",
        "train | step:     -1 | saving for 1 min ...",
        "train | step:     -1 | saving for 2 min ...",
        "train | step:     -1 | saving for 30 s ...",
        " eval | step:     -1 | evaluating for 30 s ...",
    ]


def test_loops_that_always_take_long_are_named_once(display, caplog):
    caplog.set_level("INFO", "armillary")
    for began in range(0, 1000, 100):
        for seconds in range(50):
            display._say_if_long(Category.STEPPING, began, seconds)
            display._say_if_long(Category.EVALUATING, began + 50, seconds)

    assert len(caplog.messages) == 2


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


def test_a_slow_loop_is_logged(quick, caplog):
    caplog.set_level("INFO", "armillary")
    train()

    assert find_signs(caplog)[0] == "train | step:      0 | stepping for 0 s ..."


def test_progress_may_be_off(quick, caplog, monkeypatch):
    caplog.set_level("INFO", "armillary")
    monkeypatch.setattr(Display, "_look", None)  # There is no thread to call it.
    train(progress=False)

    assert find_signs(caplog) == []


def test_the_chief_alone_shows_something(quick, caplog, monkeypatch, capsys):
    monkeypatch.setattr(_process, "_current", _process.Process(1, 2))
    train(progress=True)

    assert capsys.readouterr().err == ""


def test_progress_may_be_on_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(_display, "_REFRESH_SECONDS", 0.05)
    train(progress=True)

    shown = capsys.readouterr().err.split("\r")
    assert any(text.startswith("step 0/2 (0%) | stepping") for text in shown)
    assert shown[-1] == "\x1b[K"
    assert "armillary-display" not in [each.name for each in threading.enumerate()]


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
        if self.step == {fails_at}:
            raise ValueError("in the step")
        return {{"loss": 1 / self.step}}
    def slow(self, x):
        time.sleep(1.5)
        return jnp.sin(x)

jax.devices()
trainer = Trainer()
controller = Controller(
    trainer=trainer, global_step=lambda: trainer.step, steps_per_loop=1)
controller.train({steps})
print("done")
"""


@contextlib.contextmanager
def start(follower, **values):
    program = textwrap.dedent(PROGRAM).format(**{"fails_at": -1, "steps": 2, **values})
    names = ("NO_COLOR", "COLUMNS")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    with subprocess.Popen(
        [sys.executable, "-c", program],
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
def test_a_run_in_a_terminal():
    with open_screen() as (screen, follower), start(follower) as process:
        seen = [
            screen.wait_for(text)
            for text in (
                "step 0/2 (0%) | compiling for 1 s",
                "step 0/2 (0%) | stepping",
                "| stepping for 1 s | loss 1.0",
            )
        ]
        assert process.wait(60) == 0
        text = screen.read()

    assert seen[2].splitlines()[-1].startswith("step 1/2 (50%) | ETA ")
    lines = text.splitlines()
    assert lines[1] == "train | step:      0 | training until step 2..."
    assert [line[:21] for line in lines[2:]] == [
        "a line of the program",
        "train | step:      1 ",
        "a line of the program",
        "train | step:      2 ",
        "done",
    ]
    assert not screen.unknown


@pytest.mark.slow
@pytest.mark.each_case
@pytest.mark.parametrize("ending", ["ctrl-c", "exception"])
def test_the_terminal_is_clean_after_an_early_end(ending):
    fails_at = 1 if ending == "exception" else -1
    with (
        open_screen() as (screen, follower),
        start(follower, fails_at=fails_at) as process,
    ):
        screen.wait_for("step 0/2 (0%) | stepping")
        if ending == "ctrl-c":
            process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
        text = screen.read()

    assert "0%" not in text
    error = "KeyboardInterrupt" if ending == "ctrl-c" else "ValueError: in the step"
    assert error in text
    assert "\na line of the program\nTraceback" in text
    assert screen.column == 0
