"""The command line of `armillary plan`."""

import argparse
import ast
import contextlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from armillary._planned import planning
from armillary._process import ExitCode
from armillary.errors import PlanError


def add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    function = "a function without arguments that makes the controller or the trainer"
    add("factory", metavar="FILE:FUNCTION", help=function)
    devices = 'such as "v5e:16x16", "h100:8x8", "cpu:64", or, abstract, their number'
    add("--topology", required=True, metavar="DEVICES", help=devices)
    each = "examples of each replica"
    add("--per-replica-batch", type=int, metavar="N", help=each)
    add("--find-batch", action="store_true", help="look for the largest that fits")
    add("--abstract", action="store_true", help="compile nothing")
    compare = "compile again with other options of the trainer, and compare"
    add(
        "--try",
        dest="variants",
        action="append",
        default=[],
        metavar="NAME=VALUE[,...]",
        help=compare,
    )
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
    from armillary.plan._targets import parse_topology

    # The devices of this machine are not used.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        topology = parse_topology(namespace.topology, abstract=namespace.abstract)
        variants = [_read_options(text) for text in namespace.variants]
        with planning(has_stand_ins=_make_stand_ins(topology.num_devices)):
            result = plan(
                lambda: _make_trainer(path, name),
                namespace.topology,
                per_replica_batch=namespace.per_replica_batch,
                find_batch=namespace.find_batch,
                abstract=namespace.abstract,
                variants=variants,
            )
    except (PlanError, TypeError, ValueError) as error:
        sys.stderr.write(f"armillary plan: {error}\n")
        return ExitCode.USAGE
    sys.stdout.write(f"{result}\n")
    if namespace.json is not None:
        namespace.json.write_text(result.as_json() + "\n")
    return ExitCode.OK


def _make_stand_ins(num_devices: int) -> bool:
    """Gives the program as many virtual CPU devices as it will have.

    Returns:
        Whether it has them; not if it began to use its devices before.
    """
    import jax

    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return False
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        return False
    return True


def _make_trainer(path: Path, name: str) -> Any:
    """Returns the result of the function that the user named."""
    from armillary.trainer._standard_trainer import StandardTrainer

    sys.path.insert(0, str(path.parent.resolve()))
    names = runpy.run_path(str(path), run_name="__armillary_plan__")
    if not callable(names.get(name)):
        known = sorted(key for key, value in names.items() if callable(value))
        raise SystemExit(
            f"armillary plan: {path} has no function {name!r}. It has "
            f"{', '.join(known)}."
        )
    made = names[name]()
    if not isinstance(getattr(made, "trainer", made), StandardTrainer):
        raise TypeError(
            f"`{name}` returned an object of type {type(made).__name__}, but it must "
            "return only the `Controller`, or only the `StandardTrainer`."
        )
    return made


def _read_options(text: str) -> dict[str, Any]:
    """Reads options such as `accumulate_steps=4`; raises if the text is not one."""
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, separator, value = part.partition("=")
        if not separator or not name.strip().isidentifier():
            raise ValueError(
                f"NAME=VALUE of `--try` is {text!r}. Write an option of the trainer, "
                "as in `--try accumulate_steps=4`."
            )
        # A value that is no Python literal is a string, such as `skip`.
        options[name.strip()] = value
        with contextlib.suppress(SyntaxError, ValueError):
            options[name.strip()] = ast.literal_eval(value)
    return options
