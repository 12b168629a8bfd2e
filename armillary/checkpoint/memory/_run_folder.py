"""The folder of a run in memory: its name, its owner and its size."""

import contextlib
import hashlib
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from armillary.errors import CheckpointError

DEFAULT_DIRECTORY = "/dev/shm"
"""The folder in memory that Linux offers to all users."""
# A new random text at each start of the machine, which empties its memory.
_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")


def name_folder(memory_directory: Path, directory: str) -> Path:
    """Returns the folder for the snapshots of one directory of checkpoints."""
    digest = hashlib.sha256(directory.encode()).hexdigest()[:16]
    return memory_directory / f"armillary-{os.getuid()}-{digest}"


def make_private(folder: Path) -> None:
    """Makes a folder that only this user can read.

    Raises:
        CheckpointError: If other users have made it, or can write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise CheckpointError(
            f"`{folder}` belongs to another user, or other users can open it, so they "
            "could change the snapshots in it. Remove it, or use a folder of your own "
            "(`memory_directory=`)."
        )


def remove_snapshots(folder: Path, is_removed: Callable[[int], bool]) -> None:
    """Removes the snapshots whose number is to be removed, of all processes."""
    for snapshot in folder.glob("process_*/snapshot_*"):
        _, _, number = snapshot.name.partition("_")
        if number.isdecimal() and is_removed(int(number)):
            # Another process of this machine may remove it at the same time.
            shutil.rmtree(snapshot, ignore_errors=True)


def remove_all(folder: Path) -> None:
    """Removes the folder of a run."""
    # Other processes of this machine may remove it at the same time.
    shutil.rmtree(folder, ignore_errors=True)


def find_machine() -> str:
    """Returns a name of this machine, which no other machine has."""
    with contextlib.suppress(OSError):
        return _BOOT_FILE.read_text().strip()
    return socket.gethostname()  # Several machines may be called `localhost`.


def count_bytes(folder: Path) -> int:
    """Returns the bytes of all shares in a folder."""
    total = 0
    for file in folder.rglob("*.bin"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total
