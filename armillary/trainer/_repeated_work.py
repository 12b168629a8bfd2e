"""Warns if devices cannot share a batch equally, so that some repeat others' work."""

import functools
from collections.abc import Sequence

import jax

from armillary._logging import logger
from armillary._process import get_process
from armillary.data._layout import BatchLayout
from armillary.typing import PyTree


def warn_of_repeated_work(layout: BatchLayout, types: Sequence[PyTree]) -> None:
    """Warns, once for each size, if a batch has fewer parts than a layout allows.

    Args:
        layout: The layout of the batches.
        types: The types of the first batches.
    """
    if layout.stacked:
        return  # Each replica gets rows of its own.
    for leaf in jax.tree.leaves(types):
        if leaf.shape:
            num_rows = leaf.shape[0]
            _warn(num_rows, layout.count_parts(num_rows), layout.num_shares)


@functools.cache
def _warn(num_rows: int, num_parts: int, num_shares: int) -> None:
    if num_parts == num_shares or not get_process().is_chief:
        return
    has = "are not divided" if num_parts == 1 else f"have {num_parts} parts"
    logger.warning(
        f"Batches of {num_rows} examples {has}, but {num_shares} devices or groups of "
        "devices could share them, so some repeat the work of others. Use a batch "
        f"size that {num_shares} divides."
    )
