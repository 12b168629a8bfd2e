"""Measures the processor time of the host for each loop, with 400 parameters.

    python -m benchmarks.host_work

Each loop of the `Controller` is one program here. The benchmark counts the processor
time of the thread that runs the loops, from the start of one program to the start of
the next. Waiting for the device does not count, and neither do other programs. The time
has three parts: Armillary's own work, the user's hooks (a Flax metric is reset and
computed), and JAX's work to start a program.

The thread sleeps while the device runs. Afterwards, its processor is slowed down and
its caches are empty, so the same Python takes three to four times as long. So the
handling of state is timed once more without programs in between. It is the part of
Armillary's work that grows with the number of arrays: looking for changes of the user's
objects, laying out the arrays, and writing them back.

The optimizer is SGD without momentum, so there are about as many arrays as parameters.
With `--optimizer adam`, there are three times as many.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
from rich.console import Console

from benchmarks.contestants.controller import ControllerContestant, Trainer
from benchmarks.programs import watch_programs
from benchmarks.protocol import SIZES, Options
from benchmarks.report import add_measurement, make_parser
from benchmarks.tasks import make_task

_TASK = "many-leaves"
_CHUNK_STEPS = 20
_WARM_UP_LOOPS = 20


class _Shares:
    """Processor seconds of this thread since the last start of a program, by who."""

    def __init__(self) -> None:
        self.loops: list[dict[str, float]] = []
        self._now = {"yours": 0.0, "start": 0.0}
        self._begin: float | None = None

    def timed(self, who: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call`, whose time is counted for `who`."""

        def timed_call(*arguments: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self._now[who] += time.thread_time() - begin

        return timed_call

    def end_loop(self) -> None:
        """Ends a loop, with the start of its program."""
        now = time.thread_time()
        if self._begin is not None:
            rest = now - self._begin - sum(self._now.values())
            self.loops.append({**self._now, "armillary": rest})
        self._now = dict.fromkeys(self._now, 0.0)
        self._begin = now

    def median_us(self, who: str) -> float:
        """Returns the median over all loops, in microseconds."""
        return 1e6 * statistics.median(loop[who] for loop in self.loops)

    def quartiles_us(self, who: str) -> list[float]:
        """Returns the first and the third quartile, in microseconds."""
        low, _, high = statistics.quantiles([loop[who] for loop in self.loops], n=4)
        return [1e6 * low, 1e6 * high]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser("host_work", "Measures the host's work per loop.")
    parser.add_argument("--loops", type=int, default=300)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    given = parser.parse_args(arguments)
    measurement = measure(given.loops, given.size, given.optimizer)
    low, high = measurement["armillary_quartiles_us"]
    Console().print(
        f"{measurement['parameters']} parameters, {measurement['arrays']} arrays of "
        f"state ({given.optimizer}). Handling the state, on a warm processor: "
        f"{measurement['handling_us']:.0f} us. In running loops, median of "
        f"{measurement['loops']}: Armillary {measurement['armillary_us']:.0f} us "
        f"(quartiles {low:.0f} to {high:.0f}), the metric's reset and compute "
        f"{measurement['yours_us']:.0f} us, JAX's start of a program "
        f"{measurement['start_us']:.0f} us.",
        soft_wrap=True,
    )
    add_measurement(given.json, "host_work", measurement)


def measure(
    num_loops: int, size: str = "full", optimizer: str = "sgd"
) -> dict[str, Any]:
    """Returns the figures, in microseconds of processor time.

    Args:
        num_loops: Loops to take the median over.
        size: Size of the task.
        optimizer: As in `Task`.
    """
    contestant = ControllerContestant()
    task = dataclasses.replace(make_task(_TASK, size), optimizer=optimizer)
    contestant.setup(task, Options(steps_per_loop=_CHUNK_STEPS))
    # Between two programs there is Python, as with hooks that need it.
    contestant.trainer._train_setup.options = dataclasses.replace(
        contestant.trainer._train_setup.options, compile_hooks=False
    )
    contestant.run(_WARM_UP_LOOPS * _CHUNK_STEPS)
    shares = _Shares()

    def start(program: Any, call: Any, arguments: tuple[Any, ...]) -> Any:
        del program
        result = shares.timed("start", call)(*arguments)
        shares.end_loop()
        return result

    begin = shares.timed("yours", Trainer.train_loop_begin)
    end = shares.timed("yours", Trainer.train_loop_end)
    with (
        watch_programs(start),
        mock.patch.multiple(Trainer, train_loop_begin=begin, train_loop_end=end),
    ):
        contestant.run((num_loops + 1) * _CHUNK_STEPS)
    handling, num_arrays = _time_handling(contestant, num_loops)
    return {
        "handling_us": 1e6 * statistics.median(handling),
        "arrays": num_arrays,
        "armillary_us": shares.median_us("armillary"),
        "armillary_quartiles_us": shares.quartiles_us("armillary"),
        "yours_us": shares.median_us("yours"),
        "start_us": shares.median_us("start"),
        "loops": len(shares.loops),
        "steps_per_loop": _CHUNK_STEPS,
        "parameters": contestant.num_parameters,
        "optimizer": optimizer,
    }


def _time_handling(
    contestant: ControllerContestant, num_times: int
) -> tuple[list[float], int]:
    """Returns seconds of handling the state, and the number of its arrays."""
    loop = contestant.trainer._train_setup.loop
    assert loop is not None
    programs = loop._programs
    flat = programs.find_state()
    program = next(iter(programs.current.values()))
    arrays = flat.arrays
    # A program gives new arrays each time.
    outputs = itertools.cycle(
        [[arrays[i].copy() for i in program.changed] for _ in range(2)]
    )
    jax.block_until_ready(arrays)
    seconds = []
    for output in itertools.islice(outputs, num_times):
        begin = time.thread_time()
        programs.find_state()
        flat.take(program.changed)
        flat.give(output, ())
        flat.write_back()
        seconds.append(time.thread_time() - begin)
    return seconds, len(arrays)


if __name__ == "__main__":
    main()
