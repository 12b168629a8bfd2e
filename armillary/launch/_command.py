"""The command line of `armillary launch`, and the checks of its arguments."""

import argparse
import os
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from armillary._checks import (
    check_not_negative,
    check_not_negative_int,
    check_positive_int,
)
from armillary._process import ExitCode
from armillary.launch._environment import find_gpus, plan_devices
from armillary.launch._group import EVALUATOR, Job
from armillary.launch._machines import Machines
from armillary.launch._supervisor import run_job

_EPILOG = """\
All options go in front of the script; arguments after the script are passed to it. Exit
codes: 0 every process exited with 0, 1 a process failed, 2 wrong command line, 75 a
process asked for a restart, 76 too many restarts, 77 stopped after saving, 130 SIGINT,
143 SIGTERM.
"""


def add_launch(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "armillary launch [--workers N] [OPTIONS] SCRIPT ARGS...\n"
        "       armillary launch [--workers N] [OPTIONS] -m MODULE ARGS..."
    )
    parser.epilog = _EPILOG

    def workers(text: str) -> tuple[int, int]:
        fewest, _, most = text.partition(":")
        return int(fewest), int(most or fewest)

    for option, kind, default, text in (
        ("workers N", workers, (1, 1), "processes, or MIN:MAX: as many as there are"),
        ("ray HOST:PORT", str, None, "start them in the Ray cluster with this head"),
        ("devices-per-worker K", int, None, "GPUs, or virtual CPU devices, of each"),
        ("wait-seconds SECONDS", float, 5.0, "for MAX workers, before fewer go on"),
        ("max-restarts N", int, 10, "failures without a newer checkpoint between"),
        ("pause-seconds SECONDS", float, 1.0, "before a restart; it doubles, to 60"),
        ("grace-seconds SECONDS", float, 30.0, "to end after a failure or a signal"),
        (
            "log-dir DIR",
            Path,
            None,
            "also write each process's output to DIR/*.log",
        ),
    ):
        name, metavar = option.split()
        parser.add_argument(
            f"--{name}", metavar=metavar, type=kind, default=default, help=text
        )
    text = "start one more process, of the task type `evaluator`"
    parser.add_argument("--evaluator", action="store_true", help=text)
    rest = argparse.REMAINDER
    text = "run a module, as `python -m` does"
    parser.add_argument("-m", dest="module", nargs=rest, metavar="MODULE", help=text)
    parser.add_argument("script", nargs=rest, metavar="SCRIPT", help="run a script")


def prepare_launch(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Checks all arguments; returns a function that runs the job."""
    if sys.platform != "linux":
        raise ValueError(
            f"the platform is {sys.platform!r}, but `armillary launch` works on Linux, "
            "which ends the workers if the launcher dies. Run `python train.py` here."
        )
    if os.environ.get("TF_CONFIG", "").strip():
        raise ValueError(
            f"`TF_CONFIG` is {os.environ['TF_CONFIG']!r}, so this process is a worker "
            "of a job already, but `armillary launch` sets it for workers of its own. "
            "Run the script itself (`python train.py`), or `unset TF_CONFIG` first."
        )

    fewest, most = namespace.workers
    check_positive_int("--workers", fewest)
    if fewest > most:
        raise ValueError(
            f"`--workers` is '{fewest}:{most}', but MIN must not be larger than MAX. "
            f"Use `--workers={most}:{fewest}`."
        )
    share = namespace.devices_per_worker
    if share is not None:
        check_positive_int("--devices-per-worker", share)
    restarts = check_not_negative_int("--max-restarts", namespace.max_restarts)
    pause_seconds = check_not_negative("--pause-seconds", namespace.pause_seconds)
    wait_seconds = check_not_negative("--wait-seconds", namespace.wait_seconds)
    grace_seconds = check_not_negative("--grace-seconds", namespace.grace_seconds)
    arguments = _find_arguments(namespace)
    machines = _find_machines(namespace, wait_seconds)

    labels = [f"worker {index}" for index in range(most)]
    if namespace.evaluator:
        labels.append(EVALUATOR)
    job = Job(
        arguments=arguments,
        machines=machines,
        has_evaluator=namespace.evaluator,
        max_restarts=restarts,
        pause_seconds=pause_seconds,
        grace_seconds=grace_seconds,
        # The files are opened last, when all arguments are known to be valid.
        logs=_open_logs(namespace.log_dir, labels),
    )
    return lambda: run_job(job)


def _find_machines(namespace: argparse.Namespace, wait_seconds: float) -> Machines:
    """Returns the machines of the job: this one, or a cluster of Ray."""
    fewest, most = namespace.workers
    share = namespace.devices_per_worker
    if namespace.ray is None:
        num_processes = most + namespace.evaluator
        devices = plan_devices(find_gpus(os.environ), num_processes, share)
        return Machines(most, devices, fewest, wait_seconds)
    if namespace.evaluator:
        raise ValueError(
            "`--evaluator` is given with `--ray`, which places only workers. Start "
            "the evaluator by itself, on a machine that can read the checkpoints: "
            """`TF_CONFIG='{"task": {"type": "evaluator", "index": 0}}' """
            "python train.py`."
        )
    # Only the part for Ray needs other packages.
    from armillary.launch._ray import RayMachines, connect_to_ray

    ray = connect_to_ray(namespace.ray)
    return RayMachines(ray, fewest, most, share, wait_seconds)


def _find_arguments(namespace: argparse.Namespace) -> list[str]:
    """Returns the arguments of Python: the script or module, and its own arguments."""
    if namespace.module:
        return ["-m", *namespace.module]
    words = namespace.script
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ValueError(
            "the script is missing, but it must follow the options. "
            "Use `armillary launch --workers 2 train.py`, or `-m package.module`."
        )
    return words


def _open_logs(folder: Path | None, labels: list[str]) -> dict[str, FileIO]:
    if folder is None:
        return {}
    paths = {label: folder / f"{label.replace(' ', '_')}.log" for label in labels}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {label: path.open("ab", buffering=0) for label, path in paths.items()}
    except OSError as error:
        raise ValueError(
            f"`--log-dir` is {str(folder)!r}, but log files cannot be created there "
            f"({error.strerror}). Use a folder that you can write to."
        ) from error
