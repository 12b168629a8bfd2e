"""Runs steps without a compiler, to find mistakes.

On one device, a step runs line by line: a debugger stops in the step, and `print` shows
values.
"""

from collections.abc import Iterator
from typing import Any

import jax

from armillary.data.feed._chunks import check_pieces
from armillary.data.feed._feed import Feed
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._step_iterator import (
    MoreBatches,
    StepIterator,
    check_taken,
)
from armillary.distribute.program._trace import explained
from armillary.distribute.replica._context import lifted
from armillary.state._lift import State
from armillary.trainer._step_method import StepMethod
from armillary.typing import PyTree


def run_eagerly(
    method: StepMethod, feed: Feed[Any], structure: Any
) -> Iterator[tuple[PyTree, bool]]:
    """Yields the result of each step, and whether it ended its batch.

    It ends with the data. If the data ends in the middle of a step, that step does not
    count, but its writes are not undone.
    """
    while all(reader.peek() is not None for reader in feed.readers):
        state = State([(method.owner, "")])
        flat = FlatState(state, method.strategy)
        every = tuple(range(len(state.paths)))
        state.write(flat.bring(flat.join(every, *flat.take(every))))
        taken: list[list[Any]] = [[] for _ in feed.readers]
        pairs = zip(feed.readers, taken, strict=True)
        iterators = [StepIterator(i, _place(*pair)) for i, pair in enumerate(pairs)]
        try:
            with (
                method.strategy.jax_settings(),
                lifted(state, method.strategy, flat.all_shardings),
                explained(method.fn, state, method.owner_name),
            ):
                result = method(jax.tree.unflatten(structure, iterators))
        except MoreBatches:
            feed.note_ends(with_rest=True)
            return
        finally:
            state.write(flat.at_home(state.read()))
        check_taken(method.name, list(map(len, taken)))
        check_pieces(taken)
        FlatState(state, method.strategy).settle(())
        feed.commit_taken()
        yield result, all(batches[-1].is_last for batches in taken)


def _place(reader: Any, taken: list[Any]) -> Iterator[PyTree]:
    """Yields the batches of a reader on their devices, and adds them to `taken`."""
    for batch in reader:
        taken.append(batch)
        gather = reader.data.gather
        yield gather.layout.wrap(gather.place(batch), batch.active)
