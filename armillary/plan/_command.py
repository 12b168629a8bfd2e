"""The command line of `armillary plan`."""

import argparse
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from armillary._process import ExitCode
from armillary.errors import PlanError


def add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    function = "a function without arguments that makes the controller or the trainer"
    add("factory", metavar="FILE:FUNCTION", help=function)
    devices = 'such as "v5e:16x16", "h100:8x8", or, with --abstract, their number'
    add("--topology", required=True, metavar="DEVICES", help=devices)
    each = "examples of each replica"
    add("--per-replica-batch", type=int, metavar="N", help=each)
    add("--find-batch", action="store_true", help="look for the largest that fits")
    add("--abstract", action="store_true", help="compile nothing")
    add("--json", type=Path, metavar="FILE", help="write the plan there too")


def prepare_plan(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    path, _, name = namespace.factory.rpartition(":")
    if not path or not name.isidentifier():
        raise ValueError(
            f"FILE:FUNCTION is {namespace.factory!r}, which names no function of a "
            "file. Write it as in `armillary plan train.py:make_controller`."
        )
    if not Path(path).is_file():
        raise ValueError(f"FILE is {path!r}, and there is no such file.")
    return lambda: _run(Path(path), name, namespace)


def _run(path: Path, name: str, namespace: argparse.Namespace) -> ExitCode:
    from armillary.plan._plan import plan
    from armillary.trainer._standard_trainer import StandardTrainer

    # The devices of this machine are not used.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(path.parent.resolve()))
    names = runpy.run_path(str(path), run_name="__armillary_plan__")
    if not callable(names.get(name)):
        known = sorted(key for key, value in names.items() if callable(value))
        raise SystemExit(
            f"armillary plan: {path} has no function {name!r}. It has "
            f"{', '.join(known)}."
        )
    made = names[name]()
    trainer = getattr(made, "trainer", made)
    try:
        if not isinstance(trainer, StandardTrainer):
            raise TypeError(
                f"`{name}` returned an object of type {type(made).__name__}, but it "
                "must return only the `Controller`, or only the `StandardTrainer`."
            )
        result = plan(
            trainer,
            namespace.topology,
            steps_per_loop=getattr(made, "steps_per_loop", None),
            per_replica_batch=namespace.per_replica_batch,
            find_batch=namespace.find_batch,
            abstract=namespace.abstract,
        )
    except (PlanError, TypeError, ValueError) as error:
        sys.stderr.write(f"armillary plan: {error}\n")
        return ExitCode.USAGE
    sys.stdout.write(f"{result}\n")
    if namespace.json is not None:
        namespace.json.write_text(result.as_json() + "\n")
    return ExitCode.OK
