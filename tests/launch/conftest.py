"""Starts launchers in tests, and checks that no process is left afterwards."""

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import patience, wait_until

TOKEN = "ARMILLARY_TEST_TOKEN"
DEADLINE = patience(180.0)


def is_running(pid: int) -> bool:
    """Returns whether a process lives; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


class Launcher:
    """`armillary launch` on a script in a temporary folder, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = uuid.uuid4().hex
        self._process: subprocess.Popen[str] | None = None
        self._stderr = ""  # As far as `wait_for_line` has read it.

    def start(self, script: str, options="", *, args=(), stdout=None, **environment):
        """Starts the launcher; a script finds `role`, `index` and `mark` there."""
        prelude = """
            import json, os, signal, sys, time
            role, index = json.loads(os.environ["TF_CONFIG"])["task"].values()
            restarts = int(os.environ["ARMILLARY_RESTART_COUNT"])
            def mark(name, text=""):
                new = f".{name}.{os.getpid()}"  # Several workers may write one name.
                with open(new, "w") as file:
                    file.write(str(text))
                os.rename(new, name)
            name = index if role == "worker" else role
            mark(f"pid_{name}_{restarts}", os.getpid())
            def wait_for_mark(name):
                while not os.path.exists(name):
                    time.sleep(0.01)
            def wait_for_end_of(name, restarts=0):
                wait_for_mark(f"pid_{name}_{restarts}")
                pid = open(f"pid_{name}_{restarts}").read()
                while os.path.exists(f"/proc/{pid}"):
                    time.sleep(0.01)
            def wait_for_end_of_training(restarts=0):
                for index in range(os.environ["TF_CONFIG"].count("127.0.0.1:")):
                    wait_for_end_of(index, restarts)
                time.sleep(0.5)
        """
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(prelude) + textwrap.dedent(script))
        if "--max-restarts" not in options:
            options += " --max-restarts 0"
        words = [*options.split(), path.name, *args]
        self._stderr = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "armillary", "launch", *words],
            cwd=self.folder,
            env={**os.environ, TOKEN: self.token, **environment},
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    def finish(self) -> tuple[int, str, str]:
        """Returns exit code, stdout and stderr of the launcher when it has ended."""
        stdout, stderr = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, stdout or "", self._stderr + stderr

    def run(self, script: str, options="", **others):
        return self.start(script, options, **others).finish()

    def wait_for_mark(self, name: str) -> str:
        path = self.folder / name
        wait_until(path.exists, f"the mark {name}")
        return path.read_text()

    def wait_for_line(self, text: str) -> None:
        """Reads stderr up to a line that has `text`."""
        assert self.process.stderr is not None
        line = ""
        while text not in line:
            line = self.process.stderr.readline()
            assert line, f"The launcher ended:\n{self._stderr}"
            self._stderr += line

    def mark(self, name: str) -> None:
        """Makes a mark that the script waits for."""
        (self.folder / name).touch()

    def find_running(self) -> list[int]:
        """Returns all living processes whose environment has the token."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = path.read_bytes()
            except OSError:  # It ended, or is another user's.
                continue
            if f"{TOKEN}={self.token}".encode() in environment:
                found.append(int(path.parent.name))
        return [pid for pid in found if is_running(pid)]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    if sys.platform != "linux":
        pytest.skip("`armillary launch` works on Linux.")
    # A shell in the background and `nohup` ignore them, and a launcher would too.
    signals = (signal.SIGINT, signal.SIGHUP)
    ignored = [n for n in signals if signal.getsignal(n) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    launcher = Launcher(tmp_path)
    yield launcher
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    left = launcher.find_running()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if launcher._process is not None:
        launcher.process.communicate(timeout=DEADLINE)
    assert not left, "The launcher or a process of it outlived the test."
