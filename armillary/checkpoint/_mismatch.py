"""The difference between a checkpoint and a program, as a short diff."""

from collections.abc import Collection, Mapping

from armillary._checks import list_lines
from armillary.checkpoint._leaf import LeafSpec
from armillary.errors import CheckpointMismatchError

_POSITION = "saved state"


def check_match(
    path: str,
    *,
    saved: Mapping[str, LeafSpec],
    program: Mapping[str, LeafSpec],
    saved_states: Collection[str],
    program_states: Collection[str],
) -> None:
    """Raises if a checkpoint and a program do not hold the same leaves and states.

    Args:
        path: The checkpoint, for the message.
        saved: The leaves of the checkpoint.
        program: The leaves of the program.
        saved_states: Names of the objects whose `get_state` was saved.
        program_states: Names of the objects of the program that have `set_state`.

    Raises:
        CheckpointMismatchError: If they differ. All differences are in the message.
    """
    differences = [
        *_compare_leaves(saved, program),
        *_compare_states(saved_states, program_states),
    ]
    if not differences:
        return
    lines = [line for _, line in sorted(differences)]
    raise CheckpointMismatchError(
        f"`path` is {path!r}, and {len(lines)} of its leaves differ from the program, "
        f"which must hold the same ones:\n{list_lines(lines)}\n"
        "Build the objects as they were when this was saved, restore another "
        "checkpoint (`manager.restore(path)`), or use another `directory` to start "
        "afresh. Nothing was restored."
    )


def _compare_leaves(
    saved: Mapping[str, LeafSpec], program: Mapping[str, LeafSpec]
) -> list[tuple[str, str]]:
    differences = []
    for path in saved.keys() | program.keys():
        if path not in program:
            line = f"- {path}: {saved[path]}  only in the checkpoint"
        elif path not in saved:
            line = f"+ {path}: {program[path]}  only in the program"
        elif not saved[path].matches(program[path]):
            line = (
                f"~ {path}: {saved[path]} in the checkpoint, {program[path]} in the "
                "program"
            )
        else:
            continue
        differences.append((path, line))
    return differences


def _compare_states(
    saved: Collection[str], program: Collection[str]
) -> list[tuple[str, str]]:
    only_saved = set(saved) - set(program)
    only_program = set(program) - set(saved)
    return [
        *((n, f"- {n}: {_POSITION}  only in the checkpoint") for n in only_saved),
        *((n, f"+ {n}: {_POSITION}  only in the program") for n in only_program),
    ]
