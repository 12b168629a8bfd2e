"""What is written is whole, is labeled, and is never worth ending a job."""

import asyncio
import os
import pty
import re
import stat
import time

import pytest

from armillary.launch._output import TAIL_LINES, Output, StreamSink


class Streams:
    """Pipes in place of a process's stdout and stderr."""

    def __init__(self):
        (out_reader, self.stdout), (err_reader, self.stderr) = os.pipe(), os.pipe()
        self.readers = [os.fdopen(fd, "rb", 0) for fd in (out_reader, err_reader)]

    def end(self):
        os.close(self.stdout)
        os.close(self.stderr)


@pytest.fixture
def streams():
    return Streams()


def run(use, logs=None):
    """Runs the coroutine function `use` with an output, below an event loop."""
    with Output(logs) as output:
        asyncio.run(use(output))


def test_lines_of_processes_and_launcher_are_labeled(capfd):
    async def use(output):
        first, second = Streams(), Streams()
        tails = [
            output.add(f"worker {i}", *s.readers) for i, s in enumerate((first, second))
        ]
        os.write(first.stdout, b"half")
        await asyncio.sleep(0.01)
        os.write(second.stdout, b"one\ntwo\n")
        os.write(second.stderr, "".join(f"{i}\n" for i in range(99)).encode())
        second.end()
        os.write(first.stdout, b" and half\npartial")
        first.end()
        assert await output.drain(seconds=10)
        output.say("a\nb")
        last = [str(number) for number in range(99 - TAIL_LINES, 99)]
        assert [list(tail) for tail in tails] == [[], last]

    run(use)
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == [
        "[worker 0] half and half",
        "[worker 0] partial",
        "[worker 1] one",
        "[worker 1] two",
    ]
    said = [f"[worker 1] {number}" for number in range(99)]
    assert captured.err.splitlines() == [*said, "[launcher] a", "[launcher] b"]


def test_log_files_hold_plain_lines_are_appended_to_and_obey_the_umask(capfd, tmp_path):
    path = tmp_path / "worker_0.log"
    for text in (b"first\n", b"second\n"):
        streams = Streams()

        async def use(output, streams=streams, text=text):
            output.add("worker 0", *streams.readers)
            os.write(streams.stderr, text)
            streams.end()
            await output.drain(seconds=10)

        old = os.umask(0o027)
        try:
            run(use, {"worker 0": path.open("ab", buffering=0)})
        finally:
            os.umask(old)
    assert path.read_text() == "first\nsecond\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_log_file_that_cannot_be_written_ends_alone(streams, capfd, tmp_path):
    (tmp_path / "worker_0.log").symlink_to("/dev/full")

    async def use(output):
        output.add("worker 0", *streams.readers)
        os.write(streams.stdout, b"one\ntwo\n")
        streams.end()
        await output.drain(seconds=10)

    run(use, {"worker 0": (tmp_path / "worker_0.log").open("ab", buffering=0)})
    captured = capfd.readouterr()
    assert captured.out == "[worker 0] one\n[worker 0] two\n"
    assert captured.err.count("[launcher] cannot write") == 1
    assert re.search(
        r"worker_0\.log any more \(.*No space left.*\); the job", captured.err
    )


def test_a_stream_that_stays_open_does_not_hold_the_launcher(streams, capfd):
    async def use(output):
        tail = output.add("worker 0", *streams.readers)
        os.write(streams.stderr, b"partial")
        start = time.monotonic()
        assert await output.drain(seconds=0.2)
        assert 0.2 <= time.monotonic() - start < 5
        assert list(tail) == ["partial"]

    run(use)
    streams.end()
    assert capfd.readouterr().err == "[worker 0] partial\n"


def test_the_end_of_some_processes_does_not_wait_for_others(streams, capfd):
    other, third = Streams(), Streams()

    async def use(output):
        output.add("worker 0", *streams.readers)
        output.add("evaluator", *other.readers)
        os.write(streams.stdout, b"last\n")
        streams.end()
        assert await output.drain(["worker 0"], seconds=10)
        assert capfd.readouterr().out == "[worker 0] last\n"
        # It is still listened to, also after a drain of the others that took too long.
        output.add("worker 0", *third.readers)
        assert await output.drain(["worker 0"], seconds=0.1)
        os.write(other.stdout, b"later\n")
        other.end()
        assert await output.drain(seconds=10)

    run(use)
    third.end()
    assert capfd.readouterr().out == "[evaluator] later\n"


def test_a_paused_reader_holds_nothing_up_and_gets_all(streams, monkeypatch):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stuck:
        os.set_blocking(writer, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
        monkeypatch.setattr("sys.stderr", stuck)

        async def use(output):
            start = time.monotonic()
            output.add("worker 0", *streams.readers)
            os.write(streams.stderr, b"begin\n")
            for number in range(1000):
                output.say(str(number))
            assert not await output.drain(seconds=0.1)
            assert time.monotonic() - start < 10
            os.write(streams.stderr, b"end\n")
            streams.end()
            assert not await output.drain(seconds=0.1)
            finish = asyncio.create_task(output.finish())
            read = b""
            while not read.endswith(b"[worker 0] end\n"):
                read += await asyncio.to_thread(os.read, reader, 1 << 20)
            await finish
            lines = read.decode().lstrip("x").splitlines()
            said = [f"[launcher] {number}" for number in range(1000)]
            assert sorted(lines) == sorted(
                [*said, "[worker 0] begin", "[worker 0] end"]
            )

        run(use)
    os.close(reader)


def test_a_reader_that_went_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        sink = StreamSink(stream)
        sink.write("worker 0", "text")
        sink.write("worker 0", "text")
    StreamSink(None).write("worker 0", "text")


@pytest.mark.parametrize(
    ("environment", "is_colored"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
)
def test_labels_are_colored_on_a_terminal_only(environment, is_colored, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        StreamSink(stream).write("worker 0", "text")
        shown = os.read(leader, 1000).decode()
    os.close(leader)
    assert ("\x1b[" in shown) == is_colored
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == "[worker 0] text\r\n"
