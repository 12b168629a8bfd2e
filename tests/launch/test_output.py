"""Tests that output is whole and labeled, and that its errors never end a job."""

import asyncio
import os
import re
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.launch._output import (
    MAX_LINE,
    TAIL_LINES,
    LabeledOutput,
    read_output_lines,
)
from tests.patience import patience, wait_until


class Streams:
    """Pipes in place of a process's stdout and stderr."""

    def __init__(self):
        (out_reader, self.stdout), (err_reader, self.stderr) = os.pipe(), os.pipe()
        self.readers = [os.fdopen(fd, "rb") for fd in (out_reader, err_reader)]

    def end(self):
        os.close(self.stdout)
        os.close(self.stderr)


@pytest.fixture
def streams():
    return Streams()


def run(use, logs=None):
    """Runs the coroutine function `use` with an output, below an event loop."""

    async def use_and_finish():
        output = LabeledOutput(logs)
        await use(output)
        await output.finish()

    asyncio.run(use_and_finish())


def split(*pieces: bytes) -> list[str]:
    reader, writer = os.pipe()
    for piece in pieces:
        os.write(writer, piece)
    os.close(writer)
    return list(read_output_lines(os.fdopen(reader, "rb")))


@given(st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\r", b"\n"))))
def test_lines_equal_the_lines_of_the_text(pieces):
    expected = b"".join(pieces).decode("utf-8", "replace").split("\n")
    if not expected[-1]:
        del expected[-1]
    assert split(*pieces) == expected


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ((b"one\ntwo",), ["one", "two"]),
        ((b"one\r", b"\ntwo\r\n"), ["one", "two"]),
        ((b"10%\r", b"20%", b"\r100%\ndone\n"), ["100%", "done"]),
        ((b"10%\r20%",), ["20%"]),
        ((b"\xff\x00\n", "é".encode()[:1], "é".encode()[1:]), ["\ufffd\x00", "é"]),
        ((b"\xe2\x82",), ["\ufffd"]),
        ((b"\n\n",), ["", ""]),
        # A line without an end is passed on in parts.
        ((b"x" * (MAX_LINE + 1),), ["x" * MAX_LINE, "x"]),
    ],
)
def test_a_line_is_what_a_terminal_shows(pieces, lines):
    assert split(*pieces) == lines


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
        await output.drain(seconds=patience(120))
        output.write("a\nb")
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
    printed = [f"[worker 1] {number}" for number in range(99)]
    assert captured.err.splitlines() == [
        *printed,
        "[launcher] a",
        "[launcher] b",
    ]


def test_log_files_hold_plain_lines_are_appended_to_and_obey_the_umask(capfd, tmp_path):
    path = tmp_path / "worker_0.log"
    for text in (b"first\n", b"second\n"):
        streams = Streams()

        async def use(output, streams=streams, text=text):
            output.add("worker 0", *streams.readers)
            os.write(streams.stderr, text)
            streams.end()

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

    run(use, {"worker 0": (tmp_path / "worker_0.log").open("ab", buffering=0)})
    captured = capfd.readouterr()
    assert captured.out == "[worker 0] one\n[worker 0] two\n"
    assert captured.err.count("[launcher] cannot write") == 1
    full = r"worker_0\.log any more \(.*No space left.*\)\."
    assert re.search(full, captured.err)


def test_a_stream_that_stays_open_does_not_hold_the_launcher(streams, capfd):
    other = Streams()

    async def use(output):
        output.add("worker 0", *streams.readers)
        output.add("evaluator", *other.readers)
        os.write(other.stdout, b"last\n")
        other.end()
        # The end of some processes does not wait for others.
        await output.drain(["evaluator"], seconds=patience(120))
        assert capfd.readouterr().out == "[evaluator] last\n"
        await output.drain(seconds=0.2)  # It ends, though the stream is open.
        os.write(streams.stdout, b"later\n")
        streams.end()

    run(use)
    printed = []

    def read():
        printed.append(capfd.readouterr().out)
        return "".join(printed)

    # Nobody waits for such a stream any more, but what it says is written.
    wait_until(lambda: read() == "[worker 0] later\n", lambda: "".join(printed))


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
            output.add("worker 0", *streams.readers)
            os.write(streams.stderr, b"begin\n")
            for number in range(1000):
                output.write(str(number))
            await output.drain(seconds=0.1)  # It ends, though nobody reads.
            os.write(streams.stderr, b"end\n")
            streams.end()
            await output.drain(seconds=0.1)
            finish = asyncio.create_task(output.finish())
            read = b""
            ends = ["[launcher] 999\n", "[worker 0] end\n"]
            while not all(end in read.decode() for end in ends):
                read += await asyncio.to_thread(os.read, reader, 1 << 20)
            await finish
            lines = read.decode().lstrip("x").splitlines()
            printed = [f"[launcher] {number}" for number in range(1000)]
            assert [line for line in lines if "launcher" in line] == printed
            own = [line for line in lines if "worker" in line]
            assert own == ["[worker 0] begin", "[worker 0] end"]

        run(use)
    os.close(reader)


def test_a_reader_that_went_away_is_no_error(monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)

        async def use(output):
            first, second = Streams(), Streams()
            for streams in (first, second):
                output.add("worker 0", *streams.readers)
                os.write(streams.stdout, b"text\ntext\n")
                os.write(streams.stderr, b"said\n")
                streams.end()

        run(use)
        monkeypatch.setattr("sys.stdout", None)
        run(use)
    assert capfd.readouterr().err == "[worker 0] said\n" * 4
