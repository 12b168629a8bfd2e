"""Lines are whole, whatever the pieces and the bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.launch._output import MAX_LINE, LineSplitter


def split(*pieces: bytes) -> list[str]:
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    return lines + splitter.flush()


@given(st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\r", b"\n"))))
def test_lines_do_not_depend_on_the_pieces(pieces):
    expected = b"".join(pieces).decode("utf-8", "replace").split("\n")
    if not expected[-1]:
        del expected[-1]
    assert split(*pieces) == expected


@given(st.lists(st.text("a\r\n", max_size=5)))
def test_returns_do_not_depend_on_the_pieces(pieces):
    whole = "".join(pieces).encode()
    assert split(*(piece.encode() for piece in pieces)) == split(whole)


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
    ],
)
def test_a_line_is_what_a_terminal_shows(pieces, lines):
    assert split(*pieces) == lines


def test_a_line_without_end_is_passed_on_in_parts():
    splitter = LineSplitter()
    assert splitter.feed(b"x" * (2 * MAX_LINE + 1)) == ["x" * MAX_LINE] * 2
    assert splitter.flush() == ["x"]


def test_a_progress_bar_takes_no_memory():
    splitter = LineSplitter()
    for step in range(MAX_LINE):
        assert splitter.feed(f"\r{step}".encode()) == []
    assert splitter.feed(b"\n") == [str(MAX_LINE - 1)]
