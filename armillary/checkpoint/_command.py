"""`armillary checkpoint show`: prints the content of a checkpoint or a directory."""

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime

from armillary._format import make_table, print_out
from armillary._process import ExitCode
from armillary.checkpoint._best import read_best
from armillary.checkpoint._content import read_manifest
from armillary.checkpoint._folder import (
    Saved,
    as_absolute,
    find_checkpoints,
    list_directory,
    read_header,
)
from armillary.checkpoint._packed import summarize_state


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print what is inside",
        description="Print what is inside a checkpoint, or a directory of them.",
        allow_abbrev=False,
    )
    path_help = "a checkpoint, or the directory of a `CheckpointManager`"
    show.add_argument("path", metavar="PATH", help=path_help)


def prepare_checkpoint(namespace: argparse.Namespace) -> Callable[[], ExitCode]:
    path = as_absolute("path", namespace.path)
    saved = read_header(path)
    if isinstance(saved, Saved):
        return _show_checkpoint(saved)
    found = find_checkpoints(path)
    _, broken = list_directory(path)
    if not (found or broken):
        raise ValueError(
            f"`path` is {str(path)!r}, which has no checkpoint. It must be a "
            "checkpoint or a directory of checkpoints. Use the directory of a "
            "`CheckpointManager`."
        )
    rows = [(each.path.name, str(each.number), _when(each)) for each in found]
    table = make_table(["checkpoint", "step", "saved"], rows, numbers=["step"])
    best = read_best(path)
    marks = [] if best is None else [str(best)]
    problems = [f"{folder}: {reason}" for folder, reason in broken.items()]
    return lambda: print_out(str(path), table, *marks, *problems)


def _show_checkpoint(saved: Saved) -> Callable[[], ExitCode]:
    try:
        leaves, states, _ = read_manifest(saved.path)
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(
            f"`path` is {str(saved.path)!r}, a checkpoint that cannot be read: "
            f"{type(error).__name__}: {error}. Show another checkpoint."
        ) from error
    best = read_best(saved.path.parent)
    mark = f"; {best}" if best is not None and best.saved == saved else ""
    title = f"{saved.path}: step {saved.number}, {_when(saved)}{mark}"
    headings = ["path", "dtype", "shape"]
    has_left_out = any(spec.digest is not None for spec in leaves.values())
    if has_left_out:
        headings.append("left out, with digest")
    rows: list[list[str]] = []
    for name in sorted(leaves):
        spec = leaves[name]
        row = [name, spec.dtype, str(spec.shape), spec.digest or ""]
        rows.append(row[: len(headings)])
    table = make_table(headings, rows)
    lines: list[str] = []
    for name in sorted(states):
        shown = json.dumps(summarize_state(states[name]))
        lines.append(f"{name}: {shown}")
    return lambda: print_out(title, table, *lines)


def _when(saved: Saved) -> str:
    return f"{datetime.fromtimestamp(saved.saved_at, UTC):%Y-%m-%d %H:%M:%S} UTC"
