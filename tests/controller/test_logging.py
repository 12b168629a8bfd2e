"""Tests of log lines: Orbit's form, and one copy without logging set up."""

import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary import (
    Controller,
    StandardTrainer,
    StandardTrainerOptions,
    create_global_step,
)
from armillary.controller._loops import AwaitedLoops
from armillary.controller._outputs import format_output
from armillary.data import from_arrays
from tests.controller.loops import make_controller
from tests.patience import patience


def test_lines_of_a_run(caplog):
    caplog.set_level("INFO", "armillary")
    outputs = (lambda _: {"loss": jnp.float32(0.123456)}, lambda _: {"accuracy": 0.5})
    controller = make_controller(*outputs, steps_per_loop=100)

    controller.train_and_evaluate(100)
    controller.evaluate(5)

    patterns = [
        r"devices: 8 x cpu",
        r"train \| step:      0 \| training until step 100\.\.\.",
        r"train \| step:    100 \| steps/sec: +\d+\.\d \| output: {'loss': 0\.12346}",
        r" eval \| step:    100 \| running complete evaluation\.\.\.",
        r" eval \| step:    100 \| eval time: +\d+\.\d sec \| output: {.*0\.5}",
        r" eval \| step:    100 \| running up to 5 steps of evaluation\.\.\.",
        r" eval \| step:    100 \| eval time: +\d+\.\d sec "
        r"\| output: {'accuracy': 0\.5}",
    ]
    assert len(caplog.messages) == len(patterns)
    for message, pattern in zip(caplog.messages, patterns, strict=True):
        assert re.fullmatch(pattern, message), message


class Waiting(StandardTrainer):
    """A trainer whose output is looked at while its next loop runs."""

    def __init__(self):
        super().__init__(
            from_arrays({"x": np.arange(4)}, batch_size=1, repeat=True),
            # Fast loops would be one program, and how many of them a matter of time.
            StandardTrainerOptions(compile_hooks=False),
        )
        self.step = create_global_step()

    def train_step(self, iterator):
        next(iterator)
        self.step[...] += 1

    def train_loop_end(self):
        return {"step": self.step[...]}


def test_loops_that_ctrl_c_leaves_behind_are_reported(caplog, monkeypatch):
    caplog.set_level("INFO", "armillary")
    trainer, own = Waiting(), AwaitedLoops.fetch

    def fetch(loop, last_end):
        if loop.reached == 30 and trainer.step[...] == 40:
            monkeypatch.setattr(AwaitedLoops, "fetch", own)
            raise KeyboardInterrupt
        return own(loop, last_end)

    monkeypatch.setattr(AwaitedLoops, "fetch", fetch)
    controller = Controller(
        trainer=trainer, global_step=trainer.step, steps_per_loop=10
    )
    with pytest.raises(KeyboardInterrupt):
        controller.train(60)
    controller.train(60)

    reported = [m for m in caplog.messages if "output" in m]
    assert [re.findall(r"'step': (\d+)", m) for m in reported] == [
        [str(step)] for step in (10, 20, 30, 40, 50, 60)
    ]


def train_with_output(output, **options):
    make_controller(lambda step: output, steps_per_loop=4, **options).train(12)


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ({"loss": jnp.float32("nan")}, "`loss` is nan"),
        ({"a": 1.0, "b": {"c": float("inf")}}, "`b/c` is inf"),
        ({"d": np.float64("nan"), "e": -np.inf}, "`d` is nan, `e` is -inf"),
    ],
)
def test_an_output_that_is_not_finite_is_a_warning_once(output, shown, caplog):
    train_with_output(output)

    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert record.getMessage().startswith(f"At step 4, {shown}. To find the first such")
    assert '`StandardTrainerOptions(on_non_finite="raise")`' in record.getMessage()


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ({}, "{}"),
        ({"b": 0.123456789, "a": 1234.5678}, "{'b': 0.12346, 'a': 1234.6}"),
        ({"one": 1.0, "count": np.int32(7)}, "{'one': 1.0, 'count': 7}"),
        ({"nan": float("nan"), "inf": -np.inf}, "{'nan': nan, 'inf': -inf}"),
        ({"half": jnp.bfloat16(0.5)[()]}, "{'half': 0.5}"),
        ({"done": np.True_, "name": "x"}, "{'done': True, 'name': 'x'}"),
        ({"train": {"loss": np.float32(0.1)}}, "{'train': {'loss': 0.1}}"),
    ],
)
def test_outputs_print_with_few_digits(output, text):
    assert format_output(output) == text
    # A long one has lines of its own.
    long = format_output({"x" * 30: 1.0, "y" * 30: 2.0, "z" * 30: output})
    first, *lines = long.splitlines()
    assert first == "" and all(line.startswith("    ") for line in lines)


PROGRAM = """
import logging
import orbax.checkpoint  # leaves a handler on the root logger
from tests.controller.loops import make_controller

make_controller().train(10)
logging.basicConfig(level="INFO", force=True)
make_controller().train(10)
logging.getLogger("armillary").setLevel("ERROR")
make_controller().train(10)
"""


@pytest.mark.slow
def test_each_line_shows_once_before_and_after_logging_is_configured():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    lines = [line for line in result.stderr.splitlines() if "steps/sec" in line]
    assert [line[:5] for line in lines] == ["train", "INFO:"]


def count(step):
    if step % 3:
        time.sleep(0.05)
    return {"step": step, "value": float("inf") if step == 3 else 1.0}


def train_counting(caplog, steps, **options):
    caplog.set_level("INFO", "armillary")
    history = make_controller(count, **{"steps_per_loop": 1, **options}).train(steps)
    found = [
        re.search(r"steps/sec: +([\d.]+) .*'step': (\d+)", message)
        for message in caplog.messages
    ]
    return [(int(each[2]), float(each[1])) for each in found if each], history


def test_log_interval_thins_lines_out(caplog):
    lines, history = train_counting(caplog, 7, log_interval=3)

    # The last one is logged, wherever it is.
    assert [step for step, _ in lines] == [3, 6, 7]
    # A mean: the step that is logged takes no time itself.
    assert all(speed < 31 for _, speed in lines[:2])
    assert history.steps == list(range(1, 8))
    # Outputs that are not logged are still checked.
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    caplog.clear()
    # Loops need not end on it.
    lines, _ = train_counting(caplog, 12, log_interval=5, steps_per_loop=lambda step: 3)
    assert [step for step, _ in lines] == [6, 12]


def test_a_speed_is_a_mean_over_a_tenth_of_a_second(caplog):
    def train(step):
        time.sleep(0.0 if step % 4 else 0.2)
        return {"step": step}

    caplog.set_level("INFO", "armillary")
    make_controller(train, steps_per_loop=1).train(8)
    found = re.findall(r"steps/sec: +([\d.]+)", "\n".join(caplog.messages))
    # A loop without work alone would have thousands.
    assert max(map(float, found[3:])) < 21


def test_the_first_speed_does_not_count_compilation(caplog):
    compile_seconds = patience(0.5)

    def trace(x):
        time.sleep(compile_seconds)
        return jnp.sin(x)

    def train(step):
        jax.jit(trace)(1.0)
        time.sleep(0.05)
        return {}

    caplog.set_level("INFO", "armillary")
    make_controller(train, steps_per_loop=1).train(1)

    speed = float(re.search(r"steps/sec: +([\d.]+)", caplog.messages[-1])[1])
    assert 1 / compile_seconds < speed < 21  # Less with compilation.
