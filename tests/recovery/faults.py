"""A training program with faults that `plan.json` in its folder describes.

The test writes the plan: a fault for each attempt of the workers and of the evaluator.
Slow imports come late, because some faults happen before them.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.patience import patience

PHASES = ("import", "join", "restore", "step", "save", "evaluate", "grace", "end")
RUN = Path("run")
HANG_SECONDS, JOIN_SECONDS = patience(10.0), patience(30.0)
_FULL_DISK_BYTES = 4096


def hold_gil() -> None:
    """Waits for ever for a lock of C that it holds itself."""
    lock, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    for _ in range(2):
        library.pthread_mutex_lock(lock)


def fill_disk() -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_DISK_BYTES, hard))


def send(number: int, times: int = 1, pid: int | None = None) -> Callable[[], None]:
    def act() -> None:
        for _ in range(times):
            os.kill(pid or os.getpid(), number)

    return act


FAULTS: dict[str, Callable[[], Any]] = {
    "kill": send(signal.SIGKILL),
    "segv": faulthandler._sigsegv,  # pyright: ignore[reportAttributeAccessIssue]
    "abort": os.abort,
    "stop": send(signal.SIGSTOP),
    "GIL": hold_gil,
    "exception": RuntimeError,
    "exit 0": lambda: os._exit(0),
    "full disk": fill_disk,
    "SIGTERM twice": send(signal.SIGTERM, times=2),
    # With the launcher, which is its parent, the whole job ends at once.
    "power cut": send(signal.SIGKILL, pid=os.getppid()),
}


class Bomb:
    """The fault of one process in one attempt, if there is one; saved and restored."""

    def __init__(self, name: str, attempt: int) -> None:
        plan = json.loads(Path("plan.json").read_text())
        all_faults = plan["evaluator" if name == "evaluator" else "workers"]
        faults = all_faults[attempt:]
        mine = faults and faults[0]["target"] == name
        self.num_steps, self.name = plan["num_steps"], name
        self.is_sharded = plan["is_sharded"]
        self.memory: Path | None = None
        if plan["has_memory"]:
            self.memory = Path("memory", name)
            before = all_faults[:attempt][-1:]
            if plan["loses_memory"] and before and before[0]["target"] == name:
                # The process was lost with the memory of its machine.
                shutil.rmtree(self.memory, ignore_errors=True)
            self.memory.mkdir(parents=True, exist_ok=True)
        self._fault: dict[str, Any] | None = faults[0] if mine else None
        self._lock = threading.Lock()

    def at(self, phase: str) -> None:
        """Lets the fault happen if it belongs to this phase, and is due."""
        with self._lock:
            fault = self._fault
            if fault is None or phase not in (fault["phase"], "step"):
                return
            # One whose phase does not come happens in a later step all the same.
            fault["countdown" if phase == fault["phase"] else "patience"] -= 1
            if fault["countdown"] >= 0 and fault["patience"] > 0:
                return
            self._fault = None
        word = "".join(chr(ord("a") + int(digit)) for digit in str(fault["number"]))
        Path(f"fault_{fault['number']}").write_text(str(time.time()))
        # The launcher gives up if a job says the same again and again.
        print(f"fault {word}", file=sys.stderr, flush=True)  # noqa: T201
        if fault["kind"] == "exception":
            raise RuntimeError(word)
        if fault["kind"] in ("full disk", "SIGTERM twice"):
            FAULTS[fault["kind"]]()
        else:
            # Somewhere in what follows. The program does not end before.
            threading.Timer(fault["delay"], FAULTS[fault["kind"]]).start()

    def after_loop(self) -> None:
        """Is called between two loops."""
        log(f"step {self.name}")
        fault = self._fault
        if fault is not None and fault["phase"] == "grace" and fault["patience"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        self.at("step")

    def get_state(self) -> dict[str, int]:
        if self.name != "0":
            self.at_save()
        return {"nothing": 0}

    def set_state(self, state: dict[str, int]) -> None:
        self.at("restore")

    def at_save(self) -> None:
        self.at("save")
        if self._fault is not None and self._fault["patience"] < 3:
            self.at("grace")


def log(text: str, seen: set[str] = set()) -> None:  # noqa: B006
    """Notes when something happened for the first time in this process."""
    if text not in seen:
        seen.add(text)
        with open("log", "a") as file:
            file.write(f"{time.time()} {text}\n")


def make_sharded(options: Any) -> Any:
    """Returns a strategy that divides the wide arrays between all processes."""
    from jax.sharding import PartitionSpec

    import armillary

    return armillary.ShardedStrategy(
        rules={"kernel": PartitionSpec("fsdp")}, communication_options=options
    )


def run(name: str, attempt: int) -> None:
    """Trains, or evaluates what the workers save; writes how it ended."""
    bomb = Bomb(name, attempt)
    bomb.at("import")
    import armillary
    from tests.checkpoint import soak_program as program

    fsync = os.fsync

    def sync_and_mark(descriptor: int) -> None:
        bomb.at_save()
        fsync(descriptor)
        mode = os.fstat(descriptor).st_mode
        with contextlib.suppress(PermissionError):
            os.fchmod(descriptor, stat.S_IMODE(mode) | stat.S_IXUSR)

    bomb.at("join")
    is_evaluator = name == "evaluator"
    if is_evaluator:
        strategy: Any = armillary.MirroredStrategy()
    else:
        options = armillary.cluster.CommunicationOptions(timeout_seconds=JOIN_SECONDS)
        if bomb.is_sharded:
            strategy = make_sharded(options)
        else:
            strategy = armillary.MultiWorkerMirroredStrategy(
                communication_options=options
            )
        # A power cut strikes here, because saves of process 0 end in these calls.
        os.fsync = sync_and_mark
    trainer = program.Trainer(strategy, bomb.num_steps)
    memory: dict[str, Any] = {}
    if bomb.memory is not None:
        # So short that a snapshot begins once the last one is complete.
        memory = {"memory_interval_seconds": 1e-6, "memory_directory": bomb.memory}
    manager = program.make_manager(trainer, RUN, memory, bomb=bomb)
    restore = manager.restore_or_initialize

    def restore_and_note() -> str | None:
        path = restore()
        with Path("restored").open("a") as file:
            file.write(f"{path}\n")
        return path

    vars(manager)["restore_or_initialize"] = restore_and_note
    evaluator = program.Evaluator(trainer)
    final: Any
    if is_evaluator:
        controller = armillary.Controller(
            evaluator=evaluator,
            global_step=trainer.optimizer.step,
            strategy=strategy,
            checkpoint_manager=manager,
            eval_actions=[lambda _: (log("step evaluator"), bomb.at("evaluate"))],
            hang_timeout_seconds=HANG_SECONDS,
        )
        output = controller.evaluate_continuously(until_step=bomb.num_steps) or {}
        final = {key: float(value) for key, value in output.items()}
    else:
        with armillary.actions.SaveCheckpointIfPreempted(manager) as save_if_preempted:
            controller = program.make_controller(
                trainer,
                manager,
                evaluator=evaluator,
                train_actions=[lambda _: bomb.after_loop(), save_if_preempted],
                eval_actions=[lambda _: bomb.at("evaluate")],
                hang_timeout_seconds=HANG_SECONDS,
            )
            controller.train_and_evaluate(bomb.num_steps, eval_interval=16)
        final = program.describe(trainer)
    Path(f"final_{name}").write_text(json.dumps(final))
    bomb.at("end")
