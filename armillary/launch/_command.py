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
from armillary.launch._child import ThisMachine
from armillary.launch._environment import check_environment, find_gpus, plan_devices
from armillary.launch._supervisor import EVALUATOR, Job, run_job

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_MOST_WORKERS = _MOST_DEVICES = 2**16  # No machine has more ports.
_MOST_RESTARTS = 10**9
_EPILOG = """\
All options stand in front of the script; what follows it is passed to it. Exit codes:
0 every process ended with 0, 1 one failed, 2 wrong command line, 75 one asked for a
restart, 76 too many restarts, 77 stopped after saving, 130 SIGINT, 143 SIGTERM.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `armillary launch`."""
    parser.usage = (
        "armillary launch [--workers N] [OPTIONS] SCRIPT ARGS...\n"
        "       armillary launch [--workers N] [OPTIONS] -m MODULE ARGS..."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "--workers",
        default="1",
        metavar="N",
        help="number of processes (default: 1); with `--ray`, MIN:MAX starts as many "
        "as the cluster has room for",
    )
    parser.add_argument(
        "--ray",
        metavar="HOST:PORT",
        help="start the workers on the machines of the Ray cluster with this head",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=ascii_number(int),
        metavar="K",
        help="virtual CPU devices of each worker; with GPUs, GPUs of each worker "
        "(default: one device, or an equal share of the GPUs)",
    )
    parser.add_argument(
        "--evaluator",
        action="store_true",
        help="start one more process, of the task type `evaluator`, that evaluates the "
        "checkpoints of the workers",
    )
    parser.add_argument(
        "--max-restarts",
        type=ascii_number(int),
        default=0,
        metavar="N",
        help="how often to restart the whole job after a failure, and the evaluator "
        "alone after its own (default: 0)",
    )
    parser.add_argument(
        "--restart-pause",
        type=ascii_number(float),
        default=1.0,
        metavar="SECONDS",
        help="pause before the first restart, doubled before each later one up to a "
        "minute (default: 1)",
    )
    parser.add_argument(
        "--grace-period",
        type=ascii_number(float),
        default=30.0,
        metavar="SECONDS",
        help="time for workers to end by themselves, after a failure of another one or "
        "a signal (default: 30)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="also write what each process says to DIR/worker_<index>.log and "
        "DIR/evaluator.log",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE ARGS",
        help="run a module, as `python -m` does",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ARGS",
        help="run a script, as `python` does",
    )


def prepare(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Checks the arguments and returns what runs the job."""
    if sys.platform != "linux":
        raise ValueError(
            f"the platform is {sys.platform!r}, but `armillary launch` works on Linux, "
            "which ends the workers if the launcher dies. Run `python train.py` here, "
            "or launch in a Linux container."
        )
    min_workers, max_workers = _read_workers(namespace.workers)
    devices_per_worker = namespace.devices_per_worker
    if devices_per_worker is not None:
        check_positive_int("--devices-per-worker", devices_per_worker, _MOST_DEVICES)
    max_restarts = check_not_negative_int(
        "--max-restarts", namespace.max_restarts, _MOST_RESTARTS
    )
    pause_seconds = check_not_negative("--restart-pause", namespace.restart_pause)
    grace_seconds = check_not_negative("--grace-period", namespace.grace_period)
    arguments = _make_arguments(namespace.module, namespace.script)
    check_environment(os.environ)
    if namespace.ray is not None:
        if namespace.evaluator:
            raise ValueError(
                "`--evaluator` is given with `--ray`, which places workers alone. "
                "Leave it out, and start the evaluator by itself where it sees the "
                "checkpoints: "
                """`TF_CONFIG='{"task": {"type": "evaluator", "index": 0}}' """
                "python train.py`."
            )
    elif min_workers != max_workers:
        raise ValueError(
            f"`--workers` is {namespace.workers!r}, but on one machine the number is "
            f"fixed: no machine is lost or comes back. Use `--workers={max_workers}`, "
            "or a Ray cluster (`--ray HOST:PORT`)."
        )
    labels = [f"worker {index}" for index in range(max_workers)]
    if namespace.evaluator:
        labels.append(EVALUATOR)
    if namespace.ray is not None:
        # Only Ray's part needs more than Python.
        from armillary.launch._ray_machines import join_machines

        paths = [] if namespace.module else [os.path.abspath(arguments[0])]
        machines, devices = join_machines(
            namespace.ray,
            min_workers=min_workers,
            max_workers=max_workers,
            devices_per_worker=devices_per_worker,
            paths=paths,
        )
    else:
        machines = ThisMachine(max_workers)
        devices = plan_devices(
            find_gpus(os.environ),
            num_workers=max_workers,
            devices_per_worker=devices_per_worker,
            has_evaluator=namespace.evaluator,
        )
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
    numbers = [int(word) for word in words if _INTEGER.fullmatch(word)]
    if len(numbers) != len(words) or len(words) > 2:
        raise ValueError(
            f"`--workers` is {text!r}, but it must be a positive integer, or two of "
            "them as MIN:MAX. Use `--workers=2`, or `--workers=2:8` with `--ray`."
        )
    for number in numbers:
        check_positive_int("--workers", number, _MOST_WORKERS)
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
    if module:
        _check_module(module[0])
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


def _check_module(name: str) -> None:
    # The top package only: to find a module inside it is to run the package.
    top = name.partition(".")[0]
    is_here = PathFinder.find_spec(top, [os.getcwd()]) is not None
    if not top or not (is_here or find_spec(top)):
        raise ValueError(
            f"the module is {name!r}, but there is no {top!r} in {os.getcwd()!r} or "
            "among the installed packages. Use the name of a module, without `.py`."
        )
