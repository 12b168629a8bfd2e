"""Restores arrays in parts, where memory has no room for old and new arrays at once.

Otherwise everything is read before anything is changed, so an error changes nothing.
Here the arrays of a part take the place of the old ones before the next part is read.
An error in between cannot be undone. So it deletes the new arrays, and no step and no
save can use a mixture of two states.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from armillary._checks import counted
from armillary._logging import logger
from armillary.checkpoint._content import LeafSpec, group_by_bytes
from armillary.checkpoint._put import put_arrays

if TYPE_CHECKING:
    from armillary.checkpoint._checkpoint import Checkpoint

NUM_PARTS = 8
"""The memory that a restore needs more is about the state divided by this number."""


def restore_in_parts(
    checkpoint: "Checkpoint",
    leaves: dict[str, Any],
    parts: Sequence[Sequence[str]],
    read: Callable[[Sequence[str]], Mapping[str, Any]],
    finish: Callable[[], dict[str, str]],
) -> dict[str, str]:
    """Reads and replaces one part of the arrays after the other.

    Args:
        checkpoint: The objects.
        leaves: Their arrays, by path. It must be the only other place that holds them.
        parts: The paths in parts, the same in all processes.
        read: Reads some arrays.
        finish: Sets the states of objects, after all arrays.

    Returns:
        The result of `finish`.
    """
    logger.info(
        "memory has no room for old and new arrays, so the restore has %d parts.",
        len(parts),
    )
    replaced: list[str] = []
    try:
        for part in parts:
            new = read(part)
            put_arrays(checkpoint, new)
            leaves.update(new)
            replaced += part
        return finish()
    except BaseException as error:
        _delete(checkpoint, replaced)
        if replaced:
            error.add_note(
                "Memory had no room for old and new values at once, so the restore "
                f"had replaced {counted(len(replaced), 'array')} of the program, "
                "which it then deleted. Restore a checkpoint without an error, or "
                "start the program again."
            )
        raise


def divide(names: Iterable[str], specs: Mapping[str, LeafSpec]) -> list[list[str]]:
    """Returns names of arrays in about `NUM_PARTS` parts of the same size.

    Whole arrays are counted, so the parts are the same in all processes.
    """
    sizes = {name: specs[name].own_bytes(None) for name in names}
    return group_by_bytes(sizes, sum(sizes.values()) / NUM_PARTS)


def _delete(checkpoint: "Checkpoint", paths: Iterable[str]) -> None:
    leaves = checkpoint.read_leaves()
    for path in paths:
        if isinstance(leaves[path], jax.Array):
            leaves[path].delete()
