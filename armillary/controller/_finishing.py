"""What follows a run, also one that fails: its first error is the one to be told."""

import contextlib
from collections.abc import Callable, Iterator

from armillary._logging import logger
from armillary.cluster._join import get_peers


@contextlib.contextmanager
def finishing(
    report: Callable[[], None], *finishes: Callable[[], None]
) -> Iterator[None]:
    """Calls `finishes` after a block; after an error, `report` and all of them."""
    try:
        yield
    except BaseException as error:
        peers = get_peers()
        cause = None if peers is None else peers.explain(error)
        for finish in (report, *finishes):
            try:
                finish()
            except Exception as later_error:
                if str(later_error) == str(error):
                    continue  # It is the same one: what failed says so again.
                # The first error is the cause; the second must not replace it.
                error.add_note(f"Pending writes failed as well: {later_error!r}")
                logger.warning("Pending writes failed as well: %r", later_error)
        if cause is not None:
            raise cause from error
        raise
    for finish in finishes:
        finish()
