"""The watchdog: a second process that ends this one if its interpreter is stuck.

C code that keeps the interpreter's lock stops every thread of Python, the lifeline too.
So the lifeline sends its limit through a pipe every second, and the watchdog measures
the time since the last limit. A timer in this process could not do that. Its clock
continues while a scheduler, a container or a virtual machine suspends the process, so
it would end a job that was only paused.

The watchdog runs this file as a program, without Armillary. It is not a child of the
process it watches, so that a program which waits for all its children does not wait for
it.
"""

import contextlib
import faulthandler
import math
import os
import select
import signal
import sys
import threading
import time

_TICK_SECONDS = 1.0
_LATE_SECONDS = 3.0
"""A longer tick means that the watchdog was suspended, and probably the job too."""
_DUMP_SECONDS = 2.0
# Signals of this kind have no other meaning; macOS has none, and shows no stacks.
_DUMP_SIGNAL = getattr(signal, "SIGRTMAX", 1) - 1


class Watchdog:
    """The end of the pipe in the watched process."""

    def __init__(self) -> None:
        self._pipe: int | None = None
        self._starting: int | None = None
        self._has_failed = False
        self._lock = threading.Lock()

    def set_limit(self, limit_seconds: float, who: str) -> None:
        """Ends this process after some seconds, unless this is called again.

        Args:
            limit_seconds: The seconds, without any in which the process is suspended;
                infinite for no limit.
            who: The name of the process in the message, such as `"process 0 of 2"`.
        """
        with self._lock:
            self._reap()
            is_wanted = self._pipe is None and limit_seconds < math.inf
            if is_wanted and _is_python() and not self._has_failed:
                self._start()
            if self._pipe is None:
                return
            # Nothing is done about a watchdog that was killed or cannot keep up.
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._pipe, f"{limit_seconds} {who}\n".encode())

    def release_in_child(self) -> None:
        """Leaves the watchdog to the parent, in a process that was forked."""
        if self._pipe is not None:
            os.close(self._pipe)
        self.__init__()

    def _start(self) -> None:
        """Starts the watchdog, a second process, with a pipe to it."""
        if _DUMP_SIGNAL:
            faulthandler.register(_DUMP_SIGNAL, file=2, all_threads=True)
        read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        script = os.path.abspath(__file__)
        command = [sys.executable, "-I", "-S", script, str(os.getpid())]
        # The watchdog has no standard output, so that a reader of this process's output
        # does not wait for the watchdog too.
        actions = [
            (os.POSIX_SPAWN_DUP2, read, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        ]
        try:
            self._starting = os.posix_spawn(
                sys.executable, command, os.environ, file_actions=actions
            )
        except OSError as error:
            self._give_up(error)
        finally:
            os.close(read)

    def _give_up(self, error: OSError) -> None:
        """Continues without a watchdog, which a program needs only if it is stuck."""
        # The import is here, because the watchdog runs this file without Armillary.
        from armillary._logging import logger

        assert self._pipe is not None
        os.close(self._pipe)
        self._pipe = None
        self._has_failed = True
        logger.warning(
            "no watchdog can be started, because %s cannot be run (%s): if the "
            "interpreter of this process stops, nothing ends the process.",
            sys.executable,
            error.strerror,
        )

    def _reap(self) -> None:
        """Forgets the process that has started the watchdog, once it has ended."""
        if self._starting is None:
            return
        try:
            ended, _ = os.waitpid(self._starting, os.WNOHANG)
        except ChildProcessError:  # The program waits for all its children.
            ended = self._starting
        if ended:
            self._starting = None


def _is_python() -> bool:
    # In a program that embeds Python, `sys.executable` may be that program.
    return "py" in os.path.basename(sys.executable or "")


class Idle:
    """The time for which a process could have run but has sent nothing."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.limit_seconds = math.inf
        self.who = "a process"

    def restart(self, lines: str) -> None:
        """Counts from now on; the last line has the limit, and the process's name."""
        limit, _, self.who = lines.splitlines()[-1].partition(" ")
        self.limit_seconds = float(limit)
        self.seconds = 0.0

    def tick(self, seconds: float, *, is_stopped: bool) -> bool:
        """Counts some more seconds; returns whether the limit is reached."""
        was_suspended = seconds > _LATE_SECONDS
        if not was_suspended and not is_stopped:
            self.seconds += seconds
        return self.seconds >= self.limit_seconds


def read_process_state(pid: int) -> tuple[str, str]:
    """Returns the state of a process, such as `"S"`, and when it was started.

    Raises:
        ProcessLookupError: If it has ended.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], fields[19]
    except FileNotFoundError:
        pass
    if os.path.isdir("/proc/self"):
        raise ProcessLookupError(pid)
    # Only macOS needs this import, and it takes most of the time of the start.
    import subprocess

    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if not found.stdout.strip():
        raise ProcessLookupError(pid)
    state, _, start = found.stdout.strip().partition(" ")
    return state, start.strip()


def _watch(pid: int) -> None:
    """Returns when the process has ended, or after its end is forced."""
    idle = Idle()
    _, started = read_process_state(pid)
    last = time.monotonic()
    while True:
        is_ready, _, _ = select.select([0], [], [], _TICK_SECONDS)
        if is_ready and not _receive_limit(idle):
            return
        state, start = read_process_state(pid)
        if start != started:
            return  # Another process has the number now.
        now = time.monotonic()
        seconds = now - last
        last = now
        if not idle.tick(seconds, is_stopped=state[0] in "Tt"):
            continue
        _show_stacks(pid, idle)
        is_ready, _, _ = select.select([0], [], [], _DUMP_SECONDS)
        # The signal may have ended the wait in which the process was.
        has_recovered = is_ready and _receive_limit(idle)
        if not has_recovered:
            os.kill(pid, signal.SIGKILL)
            return
        last = time.monotonic()


def _receive_limit(idle: Idle) -> bool:
    """Reads new limits; returns whether the process is still there."""
    text = os.read(0, 1 << 16).decode()
    if text:
        # Lines are complete, because each is written in one piece.
        idle.restart(text)
    return bool(text)


def _show_stacks(pid: int, idle: Idle) -> None:
    """Prints the reason, and makes the process print the stacks of its threads."""
    text = (
        f"ERROR: {idle.who}: Timeout: it has run no Python for {idle.seconds:.0f} "
        "seconds, so it is about to be killed. C code that keeps the interpreter's "
        "lock is one reason. The stacks of its threads:\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    if _DUMP_SIGNAL:
        os.kill(pid, _DUMP_SIGNAL)


def main() -> None:
    """Watches the process whose number is the first argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # It ends with the other process.
    if os.fork():
        os._exit(0)
    with contextlib.suppress(ProcessLookupError):
        _watch(int(sys.argv[1]))


if __name__ == "__main__":
    main()
