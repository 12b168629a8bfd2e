"""The command line of `armillary checkpoint`.

It shows what is inside a checkpoint, or inside a directory of them, without any device.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from armillary._checks import counted
from armillary._format import add_json, make_table, print_json, print_out
from armillary._process import ExitCode
from armillary.checkpoint._disk import find_damage, read_checksums
from armillary.checkpoint._folder import (
    Saved,
    as_absolute,
    find_superseded,
    list_directory,
    read_saved,
)
from armillary.checkpoint._store import LeafSpec, read_arrays, read_description


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `armillary checkpoint`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print what is inside",
        description="Print what is inside a checkpoint, or a directory of them.",
        allow_abbrev=False,
    )
    path_help = "a checkpoint, or the directory of a `CheckpointManager`"
    show.add_argument("path", metavar="PATH", help=path_help)
    add_json(show)


def prepare_checkpoint(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    """Reads the checkpoint and returns what prints it."""
    # A program that trains on this machine has the other devices for itself.
    jax.config.update("jax_platforms", "cpu")
    contents = _describe(as_absolute("path", namespace.path))
    if namespace.json:
        return lambda: print_json(contents)
    is_directory = "directory" in contents
    return lambda: (_print_directory if is_directory else _print_checkpoint)(contents)


def _describe(path: epath.Path) -> dict[str, Any]:
    one = read_saved(path)
    if one is not None:
        return _describe_one(one)
    saved, broken, unfinished = list_directory(path)
    if not (saved or broken or unfinished):
        is_there = "in which there is none" if path.is_dir() else "which is no folder"
        folders = path.iterdir() if path.is_dir() else ()
        below = sorted(repr(str(each)) for each in folders if list_directory(each)[0])
        raise ValueError(
            f"`path` is {str(path)!r}, {is_there}, but it must be a checkpoint or a "
            "directory of them. Use "
            f"{', '.join(below) or 'the directory of a `CheckpointManager`'}."
        )
    checkpoints, problems = [], {str(each): why for each, why in broken.items()}
    superseded = find_superseded(saved)
    checkpoints, problems = [], {str(each): why for each, why in broken.items()}
    for entry in (each for each in saved if each not in superseded):
        try:
            checkpoints.append(_describe_one(entry, is_short=True))
        except ValueError as error:
            problems[str(entry.path)] = str(error)
    return {
        "directory": str(path),
        "checkpoints": checkpoints,
        "broken": problems,
        "unfinished": [str(folder) for folder in unfinished],
    }


def _describe_one(saved: Saved, *, is_short: bool = False) -> dict[str, Any]:
    path = saved.path
    try:
        # All files must be there; what is in them is not looked at.
        sizes = {name: size for name, (size, _) in read_checksums(path).items()}
        if any((path / name).stat().length != size for name, size in sizes.items()):
            raise ValueError("a file has another size")
        described = {
            "path": str(path),
            "number": saved.number,
            "saved_at": saved.saved_at,
            "bytes_on_disk": sum(sizes.values()),
        }
        if is_short:
            return described
        leaves, states, _ = read_description(path)
        # Numbers alone, such as counts of steps, come with their values.
        numbers = [n for n, spec in leaves.items() if not (spec.shape or spec.is_key)]
        values = read_arrays(path, dict.fromkeys(numbers))
    except Exception as error:
        reason = find_damage(path) or f"{type(error).__name__}: {error}"
        raise ValueError(
            f"`path` is {str(path)!r}, a checkpoint that cannot be read: {reason}. "
            "Show another one."
        ) from error
    shown = {
        name: {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "bytes": math.prod(spec.shape) * _item_bytes(spec),
            **({"value": values[name].item()} if name in values else {}),
        }
        for name, spec in leaves.items()
    }
    return {**described, "leaves": shown, "states": states}


def _item_bytes(spec: LeafSpec) -> int:
    if not spec.is_key:
        return jnp.dtype(spec.dtype).itemsize
    key = jax.random.key(0, impl=spec.dtype.removeprefix("key<").removesuffix(">"))
    return key.dtype.itemsize


def _print_checkpoint(contents: dict[str, Any]) -> ExitCode:
    leaves = contents["leaves"]
    sections: list[list[tuple[str, ...]]] = []
    parts = itertools.groupby(sorted(leaves), key=lambda name: name.split("/")[0])
    for part, group in parts:
        rows = [
            (
                name,
                leaves[name]["dtype"],
                str(tuple(leaves[name]["shape"])),
                f"{leaves[name]['bytes']:,}",
                str(leaves[name].get("value", "")),
            )
            for name in group
        ]
        sections.append(rows)
        if rows[0][0] != part:
            total = sum(leaves[row[0]]["bytes"] for row in rows)
            title = f"{part}: {counted(len(rows), 'array')}"
            sections.append([(title, "", "", f"{total:,}", "")])
    head = ["path", "dtype", "shape", "bytes", "value"]
    states = sorted(contents["states"].items())
    return print_out(
        f"{contents['path']}: step {contents['number']}, {_when(contents)}",
        make_table(head, *sections, numbers=head[3:]),
        *(f"{name}: {json.dumps(state)}" for name, state in states),
    )


def _print_directory(contents: dict[str, Any]) -> ExitCode:
    rows = [
        (
            each["path"].rpartition("/")[2],
            str(each["number"]),
            _when(each),
            f"{each['bytes_on_disk']:,}",
        )
        for each in contents["checkpoints"]
    ]
    head = ["checkpoint", "step", "saved", "bytes"]
    problem = "is not complete: a save was interrupted, or goes on"
    return print_out(
        contents["directory"],
        make_table(head, rows, numbers=["step", "bytes"]),
        *(f"{path}: {reason}" for path, reason in contents["broken"].items()),
        *(f"{path} {problem}" for path in contents["unfinished"]),
    )


def _when(entry: dict[str, Any]) -> str:
    return f"{datetime.fromtimestamp(entry['saved_at'], UTC):%Y-%m-%d %H:%M:%S} UTC"
