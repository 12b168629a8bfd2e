"""Tests of the servers that keep copies of shares, with real sockets."""

import contextlib
import dataclasses
import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from etils import epath

from armillary.checkpoint.memory import _exchange
from armillary.checkpoint.memory._exchange import Address, ShareServer, connected
from armillary.checkpoint.memory._meeting import Meeting
from armillary.checkpoint.memory._share import (
    Box,
    Place,
    Share,
    Snapshot,
    describe_share,
    reserved,
    with_checksums,
    write_parts,
)
from armillary.cluster._peers import Peers
from tests.patience import wait_until
from tests.peers import run_together

# More than the buffers of a connection hold, so that a sender waits for its receiver.
NUM_ELEMENTS = 5_000_000
SNAPSHOT = Snapshot(
    run="a run",
    token="a token",
    number=1,
    count=3,
    step=10,
    complete=0.0,
    begun=0.0,
    saved_step=None,
)
PLACE = Place(holder=1, number=1, share=1)


@pytest.fixture
def server(tmp_path) -> Iterator[ShareServer]:
    """The server of process 2."""
    server = ShareServer(tmp_path / "keeper", "127.0.0.1", 2)
    yield server
    server.close()


def write_share(folder: Path) -> None:
    """Writes a share of process 1."""
    array = np.arange(NUM_ELEMENTS, dtype=np.float32)
    file = folder / PLACE.data
    parts = write_parts(file, {("weights", Box((0,), array.shape)): array}, ignore)
    share = Share(SNAPSHOT, 1, parts)
    parts = with_checksums(file, parts)
    describe_share(file.parent, dataclasses.replace(share, parts=parts))


def find_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "armillary-memory"}


def is_listening(address: Address) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection((address.host, address.port)).close()
        return True
    return False


def ignore(num_bytes: int) -> None:
    del num_bytes


def be_full(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def full_at_first_write(file: Path, size: int) -> Iterator[Any]:
    with reserved(file, size):
        yield SimpleNamespace(write=be_full)


def test_a_copy_arrives(server, tmp_path):
    write_share(tmp_path / "own")

    sent: list[int] = []

    with connected(server.address) as connection:
        connection.copy(tmp_path / "own", PLACE, sent.append)
        kept = connection.read(PLACE._replace(holder=2), 0, 4 * NUM_ELEMENTS)

    assert kept == (tmp_path / "own" / PLACE.data).read_bytes()
    assert len(sent) > 1
    assert sum(sent) == len(kept)


@pytest.mark.parametrize("moment", ["reserves the memory", "writes"])
def test_a_process_without_room_is_named_to_the_sender(
    server, tmp_path, monkeypatch, moment
):
    write_share(tmp_path / "own")
    if moment == "writes":
        monkeypatch.setattr(_exchange, "reserved", full_at_first_write)
    else:
        monkeypatch.setattr(os, "posix_fallocate", be_full, raising=False)

    with (
        pytest.raises(OSError, match=r"^process 2 at `127\.0\.0\.1`: ") as raised,
        connected(server.address) as connection,
    ):
        connection.copy(tmp_path / "own", PLACE, ignore)

    file = tmp_path / "keeper" / PLACE._replace(holder=2).data
    assert f"`{file}` cannot be written" in str(raised.value)
    assert "No space left on device" in str(raised.value)


def test_a_connection_serves_a_copy_after_one_that_failed(
    server, tmp_path, monkeypatch
):
    write_share(tmp_path / "own")

    with connected(server.address) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", be_full, raising=False)
            with pytest.raises(OSError, match="No space left"):
                connection.copy(tmp_path / "own", PLACE, ignore)
        connection.copy(tmp_path / "own", PLACE, ignore)

    place = PLACE._replace(holder=2)
    assert (tmp_path / "keeper" / place.description).exists()


def test_a_process_that_does_not_answer_is_named(server, tmp_path):
    write_share(tmp_path / "own")
    server.close()

    with (
        pytest.raises(ConnectionError, match=r"process 2 at .* does not answer"),
        connected(server.address) as connection,
    ):
        connection.copy(tmp_path / "own", PLACE, ignore)


def test_a_share_that_the_other_process_lacks_is_named(server):
    with (
        pytest.raises(OSError, match=r"process 2 at .*share_1\.bin"),
        connected(server.address) as connection,
    ):
        connection.read(PLACE, 0, 4)


def test_a_closed_server_has_no_thread_and_no_socket(tmp_path):
    before = find_threads()
    server = ShareServer(tmp_path, "127.0.0.1", 1)
    (thread,) = find_threads() - before
    assert is_listening(server.address)

    server.close()

    assert not thread.is_alive()
    assert not is_listening(server.address)
    server.close()  # Changes nothing.


def test_a_server_ends_with_the_last_reference_to_it(tmp_path):
    before = find_threads()
    server = ShareServer(tmp_path, "127.0.0.1", 1)
    address = server.address
    (thread,) = find_threads() - before

    del server

    wait_until(lambda: not thread.is_alive())
    assert not is_listening(address)


def test_processes_meet_again_after_they_have_closed_their_servers(tmp_path):
    def meet_twice(peers: Peers) -> list[bool]:
        folder = tmp_path / f"memory_{peers.index}"
        meeting = Meeting(epath.Path(tmp_path / "run"), folder, peers)
        found: list[bool] = []
        for _ in range(2):
            meeting.hold()
            address = meeting.find_keeper()
            assert address is not None
            assert address.process == 1 - peers.index
            found.append(meeting.is_open and is_listening(address))
            peers.gather("that both have looked", "")
            meeting.close()
            peers.gather("that both have closed", "")
            found.append(meeting.is_open or is_listening(address))
        return found

    before = find_threads()

    assert run_together(meet_twice) == [[True, False] * 2] * 2
    assert find_threads() == before
