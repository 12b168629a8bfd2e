"""Tests that the Ray cluster of one machine is closed to other machines."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
]


def test_all_servers_listen_on_loopback(coordinator):
    import ray

    coordinator.schedule(lambda: 1).get()
    session = ray._private.worker._global_node.get_session_dir_path()
    processes = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    own = {line.split()[0] for line in processes if session in line}
    assert len(own) > 2
    addresses = [address for pid in own for address in find_listeners(pid)]
    assert addresses
    assert {address for address in addresses if not is_loopback(address)} == set()


def find_listeners(pid):
    """Returns the addresses that a process listens at, as the kernel writes them."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        for fields in map(str.split, lines):
            if fields[3] == "0A" and fields[9] in sockets:
                yield fields[1].partition(":")[0]


def is_loopback(address):
    # 127.0.0.1, also as an address of IPv6.
    return address.endswith("0100007F")
