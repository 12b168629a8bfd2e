"""The command line of `armillary checkpoint`.

What is inside a checkpoint, and inside a directory of them, without any device.
"""

import argparse
import contextlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from etils import epath

from armillary._checks import counted, printable
from armillary._process import ExitCode
from armillary.checkpoint._checksums import find_damage, read_checksums
from armillary.checkpoint._folder import (
    Header,
    find_superseded,
    list_directory,
    read_header,
)
from armillary.checkpoint._leaf import LeafSpec
from armillary.checkpoint._store import read_arrays, read_description

if TYPE_CHECKING:
    from rich.console import Console


def describe(path: epath.Path) -> dict[str, Any]:
    """Returns what is inside a checkpoint or a directory of them, for `as_json`.

    Numbers alone, such as counts of steps, come with their values.
    """
    header = read_header(path)
    if header is not None:
        return _describe_checkpoint(path, header)
    listing = list_directory(path)
    if not (listing.saved or listing.broken or listing.unfinished):
        raise ValueError(_describe_nothing(path))
    superseded = find_superseded(listing.saved)
    checkpoints, broken = [], dict(listing.broken)
    for entry in listing.saved:
        try:
            if entry not in superseded:
                checkpoints.append(_describe_entry(entry.path, entry.header))
        except ValueError as error:
            broken[entry.path] = str(error)
    return {
        "directory": str(path),
        "checkpoints": checkpoints,
        "broken": {str(folder): reason for folder, reason in broken.items()},
        "unfinished": [str(folder) for folder in listing.unfinished],
    }


def _describe_checkpoint(path: epath.Path, header: Header) -> dict[str, Any]:
    with _reading(path):
        leaves, states = read_description(path)
    numbers = {
        name: None
        for name, spec in leaves.items()
        if spec.shape == () and not spec.dtype.startswith("key<")
    }
    described_header = _describe_header(path, header)
    with _reading(path):
        values = read_arrays(path, numbers)
    described = {
        name: {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "bytes": _count_bytes(spec),
            **({"value": values[name].item()} if name in values else {}),
        }
        for name, spec in leaves.items()
    }
    return {**described_header, "leaves": described, "states": states}


def _describe_entry(path: epath.Path, header: Header) -> dict[str, Any]:
    with _reading(path):
        _, states = read_description(path)
    best = {
        name: state["best_value"]
        for name, state in states.items()
        if isinstance(state, dict) and state.get("best_value") is not None
    }
    return {**_describe_header(path, header), "best_values": best}


def _describe_header(path: epath.Path, header: Header) -> dict[str, Any]:
    return {
        "path": str(path),
        "number": header.number,
        "saved_at": header.saved_at,
        "bytes_on_disk": _count_bytes_on_disk(path),
    }


def _count_bytes_on_disk(path: epath.Path) -> int:
    # All files must be there; what is in them is not looked at.
    with _reading(path):
        sizes = {name: size for name, (size, _) in read_checksums(path).items()}
        if any((path / name).stat().length != size for name, size in sizes.items()):
            raise ValueError("a file has another size")
    return sum(sizes.values())


@contextlib.contextmanager
def _reading(path: epath.Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = find_damage(path) or f"{type(error).__name__}: {error}"
        raise ValueError(
            f"`path` is {str(path)!r}, a checkpoint that cannot be read: {reason}. "
            "Show another one; `manager.restore_or_initialize()` takes the newest good "
            "one."
        ) from error


def _count_bytes(spec: LeafSpec) -> int:
    count = math.prod(spec.shape)
    if not spec.dtype.startswith("key<"):
        return count * jnp.dtype(spec.dtype).itemsize
    implementation = spec.dtype.removeprefix("key<").removesuffix(">")
    data = jax.eval_shape(
        lambda: jax.random.key_data(jax.random.key(0, impl=implementation))
    )
    return count * data.size * data.dtype.itemsize


def _describe_nothing(path: epath.Path) -> str:
    if not path.is_dir():
        reason = "a file" if path.exists() else "which does not exist"
        return (
            f"`path` is {str(path)!r}, {reason}, but it must be a checkpoint or a "
            "directory of them. Use that of a `CheckpointManager`."
        )
    below = [str(folder) for folder in path.iterdir() if list_directory(folder).saved]
    advice = (
        f"Use one of {', '.join(map(repr, sorted(below)))}."
        if below
        else "Use the directory of a `CheckpointManager`, or one of its folders "
        "`checkpoint_<number>`."
    )
    return f"`path` is {str(path)!r}, in which there is no checkpoint. {advice}"


# In a file or a pipe, no path is cut.
_FILE_WIDTH = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `armillary checkpoint`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print what is inside",
        description="Print what is inside a checkpoint, or a directory of them.",
        allow_abbrev=False,
    )
    show.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint, or the directory of a `CheckpointManager`",
    )
    show.add_argument(
        "--json", action="store_true", help="print JSON instead of tables"
    )


def prepare(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Reads the checkpoint and returns what prints it."""
    import jax

    from armillary.checkpoint._folder import as_absolute

    # A program that trains on this machine has the other devices for itself.
    jax.config.update("jax_platforms", "cpu")
    contents = describe(as_absolute("path", namespace.path))
    show = _print_json if namespace.json else _print_tables
    return lambda: show(contents)


def _print_json(contents: dict[str, Any]) -> ExitCode:
    from armillary._records import as_json

    sys.stdout.write(json.dumps(as_json(contents), indent=2) + "\n")
    return ExitCode.OK


def _print_tables(contents: dict[str, Any]) -> ExitCode:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    (_print_directory if "directory" in contents else _print_one)(console, contents)
    return ExitCode.OK


def _print_one(console: "Console", contents: dict[str, Any]) -> None:
    from rich.table import Column, Table

    leaves = contents["leaves"]
    table = Table(Column("path", overflow="fold"), "dtype", "shape")
    table.add_column("bytes", justify="right")
    table.add_column("value", justify="right")
    parts = itertools.groupby(sorted(leaves), key=lambda name: name.split("/")[0])
    for part, group in parts:
        names = list(group)
        total = sum(leaves[name]["bytes"] for name in names)
        for name in names:
            leaf = leaves[name]
            shape = str(tuple(leaf["shape"]))
            size, value = f"{leaf['bytes']:,}", str(leaf.get("value", ""))
            row = (name, leaf["dtype"], shape, size, value)
            table.add_row(*map(printable, row))
        if names != [part]:
            table.add_section()
            title = printable(f"{part}: {counted(len(names), 'array')}")
            table.add_row(title, "", "", f"{total:,}")
        table.add_section()
    path = printable(contents["path"])
    console.print(f"{path}: step {contents['number']}, {_when(contents)}")
    console.print(table)
    for name, state in sorted(contents["states"].items()):
        console.print(f"{printable(name)}: {json.dumps(state)}")


def _print_directory(console: "Console", contents: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("checkpoint")
    table.add_column("step", justify="right")
    table.add_column("saved")
    table.add_column("bytes", justify="right")
    table.add_column("best")
    for entry in contents["checkpoints"]:
        best = (f"{name} {value:.6g}" for name, value in entry["best_values"].items())
        table.add_row(
            printable(entry["path"].rpartition("/")[2]),
            str(entry["number"]),
            _when(entry),
            f"{entry['bytes_on_disk']:,}",
            printable(", ".join(best)),
        )
    console.print(printable(contents["directory"]))
    console.print(table)
    for path, reason in contents["broken"].items():
        console.print(printable(f"{path}: {reason}"))
    for path in contents["unfinished"]:
        problem = "is not complete: a save was interrupted, or goes on"
        console.print(f"{printable(path)} {problem}")


def _when(entry: dict[str, Any]) -> str:
    return f"{datetime.fromtimestamp(entry['saved_at'], UTC):%Y-%m-%d %H:%M:%S} UTC"
