"""A worker that behaves as its arguments say, for tests of the parent process.

Arguments: the seconds of one step, and what it does at a run (`run`, `hang`, `die`,
`error`, `skip`). A run takes these seconds by a clock of its own, so that figures are
exact on a busy machine.
"""

import sys
import time

from benchmarks import worker
from benchmarks.contestants import Contestant
from benchmarks.protocol import Options, write_message
from benchmarks.tasks import Task


class Clock:
    """A clock that only runs move."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


class Fake:
    def setup(self, task: Task, options: Options) -> None:
        del task, options

    def run(self, num_steps: int) -> float:
        if behavior == "hang":
            time.sleep(100_000)
        if behavior == "die":
            sys.stderr.write("Something broke.\n")
            sys.exit(3)
        if behavior in ("error", "skip"):
            event = {
                "event": "error",
                "message": "No luck.",
                "skip": behavior[0] == "s",
            }
            write_message(sys.stdout, event)
        clock.seconds += seconds_per_step * num_steps
        return 0.5


clock = Clock()
vars(worker)["time"] = clock
seconds_per_step, behavior = float(sys.argv[1]), sys.argv[2]
fake: Contestant = Fake()
ready = {
    "event": "ready",
    "versions": {"python": "3"},
    "setup_seconds": 0.1,
    "facts": {},
}
write_message(sys.stdout, ready)
worker.serve(fake, sys.stdin, sys.stdout)
