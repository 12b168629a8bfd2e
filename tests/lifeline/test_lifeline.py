"""Tests of the reports between processes, with threads and real sockets."""

import contextlib
import math
import os
import re
import select
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from armillary.lifeline import _lifeline as module
from armillary.lifeline import _tree
from armillary.lifeline._ending import OUTSIDE, Phase, Report
from armillary.lifeline._lifeline import Lifeline
from armillary.lifeline._lines import COMPILER, Line
from armillary.lifeline._transfer import Transfer
from armillary.lifeline._tree import (
    Ends,
    connect,
    find_neighbors,
    listen,
    receive_arrivals,
    wait_for_arrivals,
)
from tests.patience import patience, wait_until
from tests.tiers import slow_after_first

TOKEN = "secret"


class Job:
    """Lifelines of some processes, and why each of them ended."""

    def __init__(self, count: int) -> None:
        listeners = [listen("127.0.0.1") for _ in range(count)]
        ports = [listener.getsockname()[1] for listener in listeners]
        self.port, self.lifelines = ports[0], []
        for index, listener in enumerate(listeners):
            parent, *_ = find_neighbors(index, count)
            connection = None
            if parent is not None:
                connection = connect("127.0.0.1", ports[parent], TOKEN, index)
            ends = Ends(connection, listener, TOKEN)
            self.lifelines.append(Lifeline(index, count, ends))

    @property
    def reasons(self) -> list[str | None]:
        return [each.verdict for each in self.lifelines]

    def wait(self, *indices: int) -> None:
        wait_until(lambda: all(self.reasons[i] is not None for i in indices))


def close(lifeline: Lifeline) -> None:
    """Ends a lifeline, and with it its connections, as the end of a process does."""
    lifeline._call(lifeline._is_done.set)
    if lifeline._thread is not None:
        lifeline._thread.join(patience(120))


@pytest.fixture
def start(monkeypatch) -> Iterator[Callable[[int], Job]]:
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(module, "_CHIEF_SECONDS", 0.3)
    monkeypatch.setattr(_tree, "_GREETING_SECONDS", 0.5)
    monkeypatch.setattr(module, "end_process", lambda reason: None)
    monkeypatch.setattr(module.atexit, "register", lambda function: function)
    jobs = []

    def start(count: int) -> Job:
        job = Job(count)
        jobs.append(job)
        for lifeline in job.lifelines:
            lifeline.start()
        wait_until(lambda: all(map(knows_all, job.lifelines)))
        return job

    yield start
    for job in jobs:
        for lifeline in job.lifelines:
            close(lifeline)


def knows_all(lifeline: Lifeline) -> bool:
    """Returns whether every process that it hears of has reported its place."""
    seen = lifeline._sightings.values()
    return all(each.report.phase != "start" for each in seen)


@pytest.mark.parametrize(("dead", "count"), [(0, 3), (2, 3), (3, 12), (4, 12)])
def test_a_process_that_is_gone_is_named_by_all_others(start, dead, count):
    job = start(count)
    # Its thread ends first: alive, it would see that *its* others are gone.
    close(job.lifelines[dead])
    alive = [index for index in range(count) if index != dead]
    job.wait(*alive)
    for index in alive:
        reason = job.reasons[index] or ""
        assert f"Process {dead} of {count} is gone (outside of loops, " in reason
        assert re.search(r"\.py:\d+ in \w+: ", reason)
        assert job.lifelines[index].wait_for_verdict(0.0) == reason


def test_a_process_that_is_gone_within_a_save_is_named_with_its_bytes(start):
    job = start(2)
    with Transfer(OUTSIDE, "written", 2000).reported():
        for lifeline in job.lifelines:
            lifeline._send_report()
        wait_until(lambda: bool(job.lifelines[0]._sightings[1].report.moved))
        close(job.lifelines[1])
    job.wait(0)
    place = "(outside of loops with 0 B of 2 kB written, "
    assert f"Process 1 of 2 is gone {place}" in (job.reasons[0] or "")


def test_every_process_names_the_cause_to_the_launcher(start, monkeypatch):
    messages = []
    monkeypatch.setattr(
        module, "notify_launcher", lambda *message: messages.append(message)
    )
    job = start(3)
    close(job.lifelines[2])
    wait_until(lambda: len(messages) == 2)
    assert messages == [("caused_by", 2)] * 2


def test_a_stopped_process_is_named_to_the_launcher(start, monkeypatch):
    messages = []
    monkeypatch.setattr(
        module, "notify_launcher", lambda *message: messages.append(message)
    )
    monkeypatch.setattr("armillary.lifeline._ending._SILENT_SECONDS", 0.2)
    job = start(2)
    monkeypatch.setattr(job.lifelines[1], "_beat", lambda now: None)
    with job.lifelines[0].watching(0.5, lambda: Phase("step", 1)):
        wait_until(lambda: ("stopped", 1) in messages)
    assert messages[:2] == [("caused_by", 1), ("stopped", 1)]


def test_watching_continues_after_an_error_of_its_own(start, monkeypatch, capfd):
    job, timers, is_broken = start(2), [], True
    own = [lifeline._thread for lifeline in job.lifelines]
    failures = Counter()

    def fail(*arguments):
        # Not the lifeline of the process that runs the tests.
        thread = threading.current_thread()
        if is_broken and thread in own:
            failures[thread] += 1
            raise OSError("too many open files")
        return False

    def set_timer(seconds):
        timers.append((threading.current_thread(), seconds))

    monkeypatch.setattr(module, "set_timer", set_timer)
    monkeypatch.setattr(module, "is_in", fail)
    # At its third failure, each has long written its line about the first.
    wait_until(lambda: all(failures[thread] >= 3 for thread in own))
    assert {(thread, math.inf) for thread in own} <= set(timers)
    is_broken = False
    job.lifelines[0].watch(7.0, lambda: Phase("step", 1))
    wait_until(lambda: (own[0], 7.0) in timers)
    assert job.reasons == [None] * 2
    text = "The watch over this process has failed: OSError('too many open files')"
    assert capfd.readouterr().err.count(text) == 2  # Once for each.


def test_a_program_may_compile_for_as_long_as_that_takes(start, monkeypatch):
    job = start(1)
    monkeypatch.setattr(
        module, "read_stack", lambda _: [Line(COMPILER[0], 1, "compile")]
    )

    def report():
        return job.lifelines[0]._sightings[0].report

    with job.lifelines[0].watching(0.3, lambda: Phase("step", 1)):
        wait_until(lambda: report().phase == "compiling")
        assert report().limit_seconds is None
        time.sleep(1.0)
    assert job.reasons == [None]


def test_a_process_that_came_to_its_end_is_not_missed(start):
    job = start(3)
    job.lifelines[1].report_end()
    wait_until(lambda: job.lifelines[0].has_ended(1))
    close(job.lifelines[1])
    time.sleep(0.5)
    assert job.reasons == [None] * 3


def test_a_failure_is_reported_when_the_others_have_not_noticed_in_time(
    start, monkeypatch
):
    monkeypatch.setattr(module, "_FAILURE_SECONDS", 0.3)
    job = start(3)
    codes = []
    monkeypatch.setattr(module, "leave", codes.append)
    job.lifelines[2].report_failure(ValueError("no such file"))
    job.wait(0, 1)
    assert job.reasons[1] == "Process 2 of 3 has failed: ValueError: no such file"
    wait_until(lambda: bool(codes))
    assert codes[0] == 1


def test_a_stuck_job_ends_with_the_place_of_every_process(start):
    job = start(2)
    with contextlib.ExitStack() as stack:
        for index, lifeline in enumerate(job.lifelines):
            phase = Phase(["step", "data"][index], 7)
            stack.enter_context(lifeline.watching(0.5, lambda phase=phase: phase))
        job.wait(0, 1)
    for reason in job.reasons:
        assert "No process has made progress for 0.5 seconds:" in reason
        assert "process 0 of 2: step for" in reason
        assert "process 1 of 2: data for" in reason


def test_a_stopped_chief_is_noticed_by_the_others(start, monkeypatch):
    job = start(2)
    # It says nothing, but its connections are open.
    monkeypatch.setattr(job.lifelines[0], "_beat", lambda now: None)
    seen = job.lifelines[1]._sightings[0]
    report = seen.report._replace(limit_seconds=0.3, phase="step")
    job.lifelines[1]._sightings[0] = seen._replace(report=report)
    with job.lifelines[1].watching(0.3, lambda: Phase("step", 1)):
        job.wait(1)
    assert "process 0 of 2: step for" in (job.reasons[1] or "")


@pytest.mark.slow
def test_processes_below_a_stopped_process_are_not_called_stopped(start, monkeypatch):
    job = start(12)
    silent_seconds = patience(1.0)
    limit = patience(6.0)
    monkeypatch.setattr("armillary.lifeline._ending._SILENT_SECONDS", silent_seconds)
    # Process 4 hears of no other process, and would decide without knowing of them.
    monkeypatch.setattr(module, "_CHIEF_SECONDS", patience(60.0))
    # Process 3 says nothing of itself and of process 4, whose connection it is.
    monkeypatch.setattr(job.lifelines[3], "_beat", lambda now: None)
    with contextlib.ExitStack() as stack:
        for lifeline in job.lifelines:
            stack.enter_context(lifeline.watching(limit, lambda: Phase("step", 1)))
        job.wait(*range(12))
    for reason in (job.reasons[0] or "", job.reasons[4] or ""):
        assert re.search(
            r"process 3 of 12: .* has not answered for \d+ s \(stopped", reason
        ), reason
    reason = job.reasons[0] or ""
    assert re.search(r"process 4 of 12: .*\(as process 3 has not", reason), reason


def test_process_0_decides_while_it_answers(start):
    job = start(3)
    # Process 1 decides if it does not hear of process 0 for so long.
    limit = patience(2.0)
    moves = iter(range(10**9))
    phases = [lambda: Phase("step", 1)] * 2 + [lambda: Phase("step", next(moves))]
    with contextlib.ExitStack() as stack:
        for lifeline, find_phase in zip(job.lifelines, phases, strict=True):
            stack.enter_context(lifeline.watching(limit, find_phase))
        # Process 1 knows nothing of process 2, and waits for it nevertheless.
        time.sleep(1.5 * limit)
    assert job.reasons == [None] * 3


def test_a_program_alone_is_watched_too(start):
    job = start(1)
    with job.lifelines[0].watching(0.3, lambda: Phase("action", 1)):
        job.wait(0)
    assert "process 0 of 1: action for" in (job.reasons[0] or "")


def report_of(lifeline: Lifeline) -> Report:
    return lifeline._report(time.monotonic())[0]


@pytest.mark.parametrize(
    ("phase", "limit"), [("action", None), ("data", None), ("stepping", 300.0)]
)
def test_a_program_alone_may_wait_for_itself_without_a_limit(start, phase, limit):
    job = start(1)
    with job.lifelines[0].watching(None, lambda: Phase(phase, 1)):
        report = report_of(job.lifelines[0])
    assert report.limit_seconds == limit


def test_calls_of_two_threads_end_in_any_order(start):
    lifeline = start(1).lifelines[0]
    first = lifeline.watching(30.0, lambda: Phase("step", 1))
    second = lifeline.watching(20.0, lambda: Phase("data", 2))
    first.__enter__()
    second.__enter__()
    assert report_of(lifeline).phase == "data"

    first.__exit__(None, None, None)
    assert report_of(lifeline).limit_seconds == 20.0

    second.__exit__(None, None, None)
    assert report_of(lifeline).limit_seconds is None


def test_a_thread_that_trains_is_the_one_that_is_looked_at(start):
    lifeline, is_there, is_done = (
        start(1).lifelines[0],
        threading.Event(),
        threading.Event(),
    )

    def train_in_a_thread():
        with lifeline.watching(30.0, lambda: Phase("step", 1)):
            is_there.set()
            is_done.wait()

    thread = threading.Thread(target=train_in_a_thread)
    thread.start()
    is_there.wait()
    line = report_of(lifeline).line
    is_done.set()
    thread.join()

    assert "in train_in_a_thread: is_done.wait()" in line


def test_time_while_all_processes_are_suspended_does_not_count(start):
    lifeline = start(2).lifelines[0]
    with lifeline.watching(30.0, lambda: Phase("step", 1)):
        wait_until(lambda: lifeline._sightings[1].report.phase != "start")
        now = time.monotonic()
        lifeline._beat(now)
        lifeline._beat(now + 1000.0)

    assert lifeline.verdict is None
    # The clock of this test continues where it was.
    lifeline._skip(-1000.0)


def test_missing_processes_are_named_to_all_others(monkeypatch):
    monkeypatch.setattr(_tree, "_NEWS_SECONDS", 0.05)
    listener = listen("127.0.0.1")
    address = "127.0.0.1", listener.getsockname()[1]
    with ThreadPoolExecutor() as pool:
        news: list[list[int]] = []
        first = pool.submit(wait_for_arrivals, *address, 1, patience(120), news.append)
        # One that dies while it waits is missing again; a stranger is nobody.
        for greeting in (b"00000003", b"GET / HTTP/1.1"):
            with socket.create_connection(address, patience(120)) as connection:
                connection.sendall(greeting)
        own_news: list[list[int]] = []
        seconds = patience(1.0)
        assert receive_arrivals(listener, 4, seconds, own_news.append) == [2, 3]
        assert first.result() == [2, 3]
        assert news[-1] == own_news[-1] == [2, 3]


def test_a_late_process_continues_where_the_service_of_jax_is():
    with listen("127.0.0.1") as listener, ThreadPoolExecutor() as pool:
        port = listener.getsockname()[1]
        waiting = pool.submit(wait_for_arrivals, "127.0.0.1", port, 1, patience(120))
        listener.accept()[0].close()  # All have met.
        with listener.accept()[0] as connection:
            connection.sendall(b"\x00\x00\x18\x04")
            assert waiting.result() == []


@slow_after_first(
    "greeting",
    [
        b"00000001wrong!",
        b"00000001secre\xff",
        b"one     secret",
        b"",
        b"\xff\n",
        b"x" * 5000,
    ],
)
def test_a_stranger_is_shown_out_and_changes_nothing(start, greeting):
    job = start(2)
    with socket.create_connection(("127.0.0.1", job.port), patience(120)) as stranger:
        stranger.sendall(greeting)
        ready, _, _ = select.select([stranger], [], [], patience(120))
        assert ready
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    time.sleep(0.3)
    assert job.reasons == [None, None]


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, if in use
def test_a_forked_child_does_not_keep_a_dead_process_alive(start, monkeypatch):
    job = start(2)
    dead = job.lifelines[1]
    monkeypatch.setattr(module, "_current", dead)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        # The connection ends if no other process holds its descriptor.
        os.close(dead._tree.ends.connection.detach())
        dead._call(dead._is_done.set)
        job.wait(0)
        assert "Process 1 of 2 is gone" in (job.reasons[0] or "")
    finally:
        os.close(writer)
        os.waitpid(child, 0)


FORKS = """
    import os
    from armillary.lifeline._lifeline import Lifeline, set_lifeline
    from armillary.lifeline._tree import Ends, listen

    def fork(in_child=lambda: None):
        child = os.fork()
        if not child:
            in_child()
            os._exit(0)
        os.waitpid(child, 0)

    endpoint = listen("127.0.0.1")
    set_lifeline(Lifeline(0, 2, Ends(None, endpoint, "token")))
    fork(fork)
    endpoint.close()
    fork()
    print("done")
"""


@pytest.mark.slow
def test_forks_of_children_and_after_the_end_log_nothing():
    # An error right after a fork is only shown, so the output has it.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKS)],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


ENDS = """
    import sys
    from armillary.lifeline._lifeline import Lifeline
    from armillary.lifeline._tree import Ends, connect

    connection = connect("127.0.0.1", int(sys.argv[1]), "secret", 1)
    Lifeline(1, 2, Ends(connection)).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError('no such file')"])
def test_a_program_reports_how_it_ended(end):
    listener = listen("127.0.0.1")
    chief = Lifeline(0, 2, Ends(None, listener, TOKEN))
    chief.start()
    program = [sys.executable, "-c", textwrap.dedent(ENDS) + end]
    port = str(listener.getsockname()[1])
    subprocess.run([*program, port], capture_output=True, timeout=patience(120))
    if "exit" in end:
        wait_until(lambda: chief.has_ended(1))
    else:
        wait_until(lambda: 1 in chief._failures)
        assert chief._failures[1][0] == "ValueError: no such file"
    assert chief.verdict is None
    close(chief)
