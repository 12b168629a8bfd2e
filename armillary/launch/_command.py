"""The command line of `armillary launch`, and the checks of its arguments."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from io import FileIO
from pathlib import Path

from armillary._checks import (
    ascii_number,
    check_not_negative,
    check_not_negative_int,
    check_positive_int,
)
from armillary._process import ExitCode
from armillary.launch._environment import find_gpus, plan_devices
from armillary.launch._process import ThisMachine
from armillary.launch._supervisor import EVALUATOR, Job, run_job

_MOST_WORKERS = _MOST_DEVICES = 2**16  # No machine has more ports.
_MOST_RESTARTS = 10**9
_EPILOG = """\
All options stand in front of the script; what follows it is passed to it. Exit codes:
0 every process ended with 0, 1 one failed, 2 wrong command line, 75 one asked for a
restart, 76 too many restarts, 77 stopped after saving, 130 SIGINT, 143 SIGTERM.
"""


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `armillary launch`."""
    parser.usage = (
        "armillary launch [--workers N] [OPTIONS] SCRIPT ARGS...\n"
        "       armillary launch [--workers N] [OPTIONS] -m MODULE ARGS..."
    )
    parser.epilog = _EPILOG

    integer, number = ascii_number(int), ascii_number(float)

    def add(
        name: str, kind: Callable[[str], object], default: object, text: str
    ) -> None:
        option, metavar = name.split()
        parser.add_argument(
            option, metavar=metavar, type=kind, default=default, help=text
        )

    add("--workers N", str, "1", "processes; with `--ray`, MIN:MAX for what there is")
    add("--ray HOST:PORT", str, None, "start them in the Ray cluster with this head")
    devices = "GPUs of each worker, or virtual CPU devices (default: a share; one)"
    add("--devices-per-worker K", integer, None, devices)
    parser.add_argument(
        "--evaluator",
        action="store_true",
        help="start one more process, of the task type `evaluator`",
    )
    restarts = "of the job after a failure, and of the evaluator alone (default: 0)"
    add("--max-restarts N", integer, 0, restarts)
    pause = "before a restart, doubled each time up to a minute (default: 1)"
    add("--restart-pause SECONDS", number, 1.0, pause)
    grace = "for workers to end after a failure or a signal (default: 30)"
    add("--grace-period SECONDS", number, 30.0, grace)
    add("--log-dir DIR", Path, None, "also write what each process says to DIR/*.log")
    rest = argparse.REMAINDER
    module, script = "run a module, as `python -m` does", "run a script, as `python`"
    parser.add_argument(
        "-m", dest="module", nargs=rest, metavar="MODULE ARGS", help=module
    )
    parser.add_argument("script", nargs=rest, metavar="SCRIPT ARGS", help=script)


def prepare_launch(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Checks the arguments and returns what runs the job."""
    if sys.platform != "linux":
        raise ValueError(
            f"the platform is {sys.platform!r}, but `armillary launch` works on Linux, "
            "which ends the workers if the launcher dies. Run `python train.py` here, "
            "or launch in a Linux container."
        )
    if os.environ.get("TF_CONFIG", "").strip():
        raise ValueError(
            f"`TF_CONFIG` is {os.environ['TF_CONFIG']!r}, so this process is a worker "
            "of a job already, but `armillary launch` sets it for workers of its own. "
            "Run the script itself (`python train.py`), or `unset TF_CONFIG` first."
        )
    min_workers, max_workers = _read_workers(namespace.workers)
    share = namespace.devices_per_worker
    if share is not None:
        check_positive_int("--devices-per-worker", share, _MOST_DEVICES)
    max_restarts = check_not_negative_int(
        "--max-restarts", namespace.max_restarts, _MOST_RESTARTS
    )
    pause_seconds = check_not_negative("--restart-pause", namespace.restart_pause)
    grace_seconds = check_not_negative("--grace-period", namespace.grace_period)
    arguments = _make_arguments(namespace.module, namespace.script)
    if namespace.ray is not None:
        if namespace.evaluator:
            raise ValueError(
                "`--evaluator` is given with `--ray`, which places workers alone. "
                "Start the evaluator by itself, where it sees the checkpoints: "
                """`TF_CONFIG='{"task": {"type": "evaluator", "index": 0}}' """
                "python train.py`."
            )
        # Only Ray's part needs more than Python.
        from armillary.launch._ray import RayMachines, connect

        machines = RayMachines(
            connect(namespace.ray),
            min_workers=min_workers,
            max_workers=max_workers,
            devices_per_worker=share,
        )
        devices = machines.devices
    else:
        if min_workers != max_workers:
            raise ValueError(
                f"`--workers` is {namespace.workers!r}, but on one machine no machine "
                f"is lost or comes back. Use `--workers={max_workers}`, or a Ray "
                "cluster (`--ray HOST:PORT`)."
            )
        machines = ThisMachine(max_workers)
        devices = plan_devices(
            find_gpus(os.environ),
            num_workers=max_workers,
            devices_per_worker=share,
            has_evaluator=namespace.evaluator,
        )
    labels = [f"worker {index}" for index in range(max_workers)]
    labels += [EVALUATOR] * namespace.evaluator
    job = Job(
        arguments=arguments,
        machines=machines,
        has_evaluator=namespace.evaluator,
        devices=devices,
        max_restarts=max_restarts,
        pause_seconds=pause_seconds,
        grace_seconds=grace_seconds,
        logs=_open_logs(namespace.log_dir, labels),  # if nothing refuses the job
    )
    return lambda: run_job(job)


def _read_workers(text: str) -> tuple[int, int]:
    """Returns the fewest and the most workers."""
    words = text.split(":")
    are_numbers = all(re.fullmatch(r"[+-]?[0-9]{1,18}", word) for word in words)
    if not are_numbers or len(words) > 2:
        raise ValueError(
            f"`--workers` is {text!r}, but it must be a positive integer, or two of "
            "them as MIN:MAX. Use `--workers=2`, or `--workers=2:8` with `--ray`."
        )
    numbers = [check_positive_int("--workers", int(w), _MOST_WORKERS) for w in words]
    if numbers[0] > numbers[-1]:
        raise ValueError(
            f"`--workers` is {text!r}, but MIN must not be larger than MAX. "
            f"Use `--workers={numbers[1]}:{numbers[0]}`."
        )
    return numbers[0], numbers[-1]


def _open_logs(folder: Path | None, labels: list[str]) -> dict[str, FileIO]:
    if folder is None:
        return {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {
            label: (folder / f"{label.replace(' ', '_')}.log").open("ab", buffering=0)
            for label in labels
        }
    except OSError as error:
        raise ValueError(
            f"`--log-dir` is {str(folder)!r}, but log files cannot be created there "
            f"({error.strerror}). Use a folder that you can write to."
        ) from error


def _make_arguments(module: list[str] | None, script: list[str]) -> list[str]:
    """Returns what follows `python`, for a module or a script that exists."""
    if module:
        # The top package only: to find a module inside it is to run the package.
        top = module[0].partition(".")[0]
        is_here = PathFinder.find_spec(top, [os.getcwd()]) is not None
        if not top or not (is_here or find_spec(top)):
            raise ValueError(
                f"the module is {module[0]!r}, but there is no {top!r} in "
                f"{os.getcwd()!r} or among the installed packages. Use the name of a "
                "module, without `.py`."
            )
        return ["-m", *module]
    if script[:1] == ["--"]:
        script = script[1:]
    if not script or module is not None:
        raise ValueError(
            "the script is missing, but it must follow the options. "
            "Use `armillary launch --workers 2 train.py`, or `-m package.module`."
        )
    if not Path(script[0]).is_file():
        raise ValueError(
            f"the script is {script[0]!r}, but there is no such file in "
            f"{os.getcwd()!r}. Use the path of a Python file, or `-m package.module`; "
            "options of the launcher stand in front of it."
        )
    return script
