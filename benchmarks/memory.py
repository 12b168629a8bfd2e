"""Compares the device memory of Armillary's loop with a hand-written scan.

    python -m benchmarks.memory

The compiler says what a program needs: its arguments, outputs and temporaries, less
what outputs take over from arguments. Next to that, Armillary keeps one chunk of
batches that is read ahead, as the hand-written loop does.
"""

from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.contestants.controller import ControllerContestant
from benchmarks.contestants.reference import ReferenceScan
from benchmarks.programs import lower_program, watch_programs
from benchmarks.protocol import SIZES, Options
from benchmarks.report import add_measurement, make_parser
from benchmarks.tasks import TASKS, Task, make_task

_STEPS_PER_LOOP = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser("memory", "Compares device memory.")
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=["mlp", "many-leaves", "bert"]
    )
    parser.add_argument("--size", choices=SIZES, default="full")
    given = parser.parse_args(arguments)
    table = Table(title="Device memory of the compiled loop, in MB")
    for title in ("task", "hand-written scan", "armillary", "chunk read ahead"):
        table.add_column(title, justify="left" if title == "task" else "right")
    measurement = {}
    for name in given.tasks:
        found = measurement[name] = measure(make_task(name, given.size))
        cells = (found["reference_bytes"], found["armillary_bytes"])
        sizes = [*cells, found["chunk_bytes"]]
        table.add_row(name, *(f"{size / 1e6:,.2f}" for size in sizes))
    Console().print(table)
    add_measurement(given.json, "memory", measurement)


def measure(task: Task) -> dict[str, Any]:
    """Returns bytes of both programs, and of one chunk of batches.

    Args:
        task: The task to train.
    """
    options = Options(steps_per_loop=_STEPS_PER_LOOP)
    reference = ReferenceScan()
    reference.setup(task, options)
    chunk = next(reference.inputs)
    lowered = reference.program.lower(reference.state, reference.zero, chunk, None)
    hand_written = _count_bytes(lowered.compile())
    seen: list[jax.stages.Lowered] = []

    def lower(program: Any, call: Any, arguments: tuple[Any, ...]) -> Any:
        if not seen:
            seen.append(lower_program(program, call, arguments))
        return call(*arguments)

    contestant = ControllerContestant()
    contestant.setup(task, options)
    with watch_programs(lower):
        contestant.run(_STEPS_PER_LOOP)
    ours = _count_bytes(seen[0].compile())
    return {
        "reference_bytes": hand_written["total"],
        "armillary_bytes": ours["total"],
        "chunk_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(chunk)),
        "reference": hand_written,
        "armillary": ours,
        "steps_per_chunk": _STEPS_PER_LOOP,
    }


def _count_bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    analysis: Any = compiled.memory_analysis()
    parts = {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "aliases": analysis.alias_size_in_bytes,
    }
    kept = sum(parts.values()) - 2 * parts["aliases"]
    return {**parts, "total": kept}


if __name__ == "__main__":
    main()
