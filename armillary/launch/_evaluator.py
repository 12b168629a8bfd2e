"""The evaluator of a job: it runs beside the workers, and is restarted alone.

It reads checkpoints and takes part in nothing else, so the workers go on when it fails,
and it goes on when they are restarted. When all of them have ended well it is told, and
gets all the time that it needs to evaluate their last checkpoint.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable

from armillary._exit_code import ExitCode
from armillary._training_end import VARIABLE, describe_pipe
from armillary.launch._ending import Ending, describe_failure, name_signal
from armillary.launch._output import Output
from armillary.launch._restart_policy import RestartPolicy
from armillary.launch._signals import STOP_SIGNALS, SignalInbox, as_passed_on
from armillary.launch._stop import TERMINATE_SECONDS, Stop, find_stop_code
from armillary.launch._worker import Worker

LABEL = "evaluator"


class Evaluator:
    """Looks after the process of the evaluator whenever the launcher waits.

    So the launcher waits by the `wait` of this class instead of that of `inbox`.

    Args:
        start: Starts the process. It gets the number of restarts so far, the variables
            to add to its environment, and the descriptor to pass to it.
        inbox: Where signals arrive.
        output: Shows what it says.
        policy: Counts its restarts, which cost the workers none of theirs.
        grace_period: Seconds to end by itself after a signal, when all workers have
            ended.
    """

    def __init__(
        self,
        start: Callable[[int, dict[str, str], int], Worker],
        inbox: SignalInbox,
        output: Output,
        *,
        policy: RestartPolicy,
        grace_period: float,
    ) -> None:
        self._start_process = start
        self._inbox = inbox
        self._output = output
        self._policy = policy
        self._grace_period = grace_period
        self._reader, self._writer = os.pipe()
        self._worker: Worker | None = None
        self._tail: deque[str] = deque()
        # When to start the process; None while it runs, and when it is not to run.
        self._due: float | None = time.monotonic()
        self._code: ExitCode | None = None
        self._is_stopping = False
        self._has_training_ended = False

    def wait(self, timeout: float | None) -> list[int]:
        """Waits for signals as `SignalInbox.wait` does, and passes them on."""
        limits = [limit for limit in (timeout, self._look()) if limit is not None]
        return self._receive(min(limits, default=None))

    def finish(self) -> ExitCode:
        """Waits for the end of the process, after all workers have ended well.

        Returns:
            The exit code of the job.
        """
        self._has_training_ended = True
        os.close(self._writer)
        due = self._look()
        if self._code is None:
            self._output.say("all workers have ended; waits for the evaluator.")
        while self._code is None:
            for number in self._receive(due):
                if number in STOP_SIGNALS:
                    self.end(self._grace_period)
                    causes = [] if self._code is None else [self._code]
                    return find_stop_code(number, causes)
            due = self._look()
        return self._code

    def end(self, seconds: float = TERMINATE_SECONDS) -> None:
        """Ends the process: by SIGTERM, if it got no signal yet, and then by SIGKILL.

        Args:
            seconds: Time between the two. A second signal to the launcher ends it.
        """
        stop = Stop(signal.SIGTERM, seconds)
        has_signal, self._is_stopping, self._due = self._is_stopping, True, None
        self._look()
        if self._worker is not None and not has_signal:
            self._worker.send_signal(signal.SIGTERM)
        while self._worker is not None:
            stop.ask_again(self._inbox.wait(max(0.0, stop.due - time.monotonic())))
            self._look()
            if self._worker is not None and time.monotonic() >= stop.due:
                self._output.say("SIGKILL: sent to the evaluator, which still ran.")
                self._kill()

    def close(self) -> None:
        """Leaves no process and no open file behind."""
        self._kill()
        os.close(self._reader)
        if not self._has_training_ended:
            os.close(self._writer)

    def _look(self) -> float | None:
        """Starts the process if it is to run; returns the seconds until then."""
        ending = None if self._worker is None else self._worker.poll()
        if ending is not None:
            self._note_end(ending)
        if self._due is None:
            return None
        remaining = self._due - time.monotonic()
        if remaining > 0:
            return remaining
        self._start()
        return None

    def _start(self) -> None:
        self._due = None
        self._output.say("starts the evaluator.")
        variables = {VARIABLE: describe_pipe(self._reader)}
        try:
            worker = self._start_process(
                self._policy.num_restarts, variables, self._reader
            )
        except OSError as error:
            self._output.say(f"cannot start the evaluator: {error}.")
            self._code = ExitCode.FAILED
            return
        self._worker = worker
        self._tail = self._output.add(LABEL, worker.stdout, worker.stderr)

    def _note_end(self, ending: Ending) -> None:
        self._worker = None
        self._output.drain(labels=[LABEL])
        if self._is_stopping:
            self._code = ending.cause
            return
        self._code = self._policy.find_exit_code(ending.cause)
        rest = "" if self._has_training_ended else " The workers go on."
        if self._code is ExitCode.OK:
            if rest:
                self._output.say(f"evaluator: {ending.describe()}.{rest}")
            return
        self._output.say(describe_failure(LABEL, ending, self._tail))
        if self._code is None:
            seconds = self._policy.begin_restart()
            self._due = time.monotonic() + seconds
            self._output.say(
                f"restart {self._policy.num_restarts} of {self._policy.max_restarts} "
                f"of the evaluator alone in {seconds:g} s.{rest}"
            )
        else:
            self._output.say(f"the evaluator is not started again.{rest}")

    def _receive(self, timeout: float | None) -> list[int]:
        numbers = self._inbox.wait(timeout)
        for number in numbers:
            if number not in STOP_SIGNALS:
                self._send(number)
            elif not self._is_stopping:
                self._is_stopping, self._due = True, None
                self._send(number)
        return numbers

    def _send(self, number: int) -> None:
        if self._worker is not None:
            self._output.say(f"{name_signal(number)}: passed on to the evaluator.")
            self._worker.send_signal(as_passed_on(number))

    def _kill(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
            self._output.drain(labels=[LABEL])
