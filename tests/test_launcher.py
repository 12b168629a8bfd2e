"""Tests of the messages from a process to its launcher."""

import json
import os

import pytest

from armillary import _launcher
from armillary._launcher import VARIABLE, notify_launcher


@pytest.fixture
def receive(monkeypatch):
    """Returns what reads the messages that a process has sent so far."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    inode = os.fstat(writer).st_ino
    monkeypatch.setenv(VARIABLE, f"{os.getpid()} {writer} {inode}")
    monkeypatch.setattr(_launcher, "_sent", set())

    def read():
        try:
            text = os.read(reader, 10_000).decode()
        except BlockingIOError:
            return []
        return [json.loads(line) for line in text.splitlines()]

    yield read
    os.close(reader)
    os.close(writer)


def test_equal_messages_are_sent_once(receive):
    for _ in range(3):
        notify_launcher("trained")
        notify_launcher("saved", 5, "run/checkpoint_5")

    assert receive() == [["trained"], ["saved", 5, "run/checkpoint_5"]]


def test_the_first_loop_after_each_restore_is_sent(receive):
    """Otherwise, a later crash would be blamed on the checkpoint."""
    for _ in range(2):
        notify_launcher("restored", "run/checkpoint_5")
        notify_launcher("trained")
        notify_launcher("trained")

    assert receive() == 2 * [["restored", "run/checkpoint_5"], ["trained"]]


def test_a_child_process_sends_nothing(receive, monkeypatch):
    monkeypatch.setenv(VARIABLE, os.environ[VARIABLE].replace(str(os.getpid()), "1"))
    notify_launcher("trained")

    assert receive() == []
