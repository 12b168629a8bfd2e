"""Runs steps without a compiler, to find mistakes.

On one device, a step runs line by line: a debugger stops in the step, and `print` shows
values.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from armillary.data.feed._chunks import check_pieces
from armillary.data.feed._feed import Feed
from armillary.data.feed._gather import Gather
from armillary.data.feed._piece import Piece
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._step_iterator import (
    MoreBatches,
    StepIterator,
    check_taken,
)
from armillary.distribute.program._trace import explained
from armillary.distribute.replica._context import lifted
from armillary.state._lift import State
from armillary.trainer._needs_room import NeedsRoom
from armillary.trainer._step_method import StepMethod
from armillary.typing import PyTree


def run_eagerly(
    method: StepMethod, feed: Feed[Any], structure: Any
) -> Iterator[tuple[PyTree, bool]]:
    """Yields the result of each step, and whether it ended its batch.

    It ends with the data. If the data ends in the middle of a step, that step does not
    count, but its writes are not undone.
    """
    while None not in feed.heads():
        state = State([(method.owner, "")])
        flat = FlatState(state, method.strategy)
        _move_to_devices(state, flat)

        taken: list[list[Any]] = []
        iterators: list[StepIterator] = []
        for number, reader in enumerate(feed.readers):
            batches: list[Any] = []
            taken.append(batches)
            placed = _place(reader.data.gather, feed.take(number), batches)
            iterators.append(StepIterator(number, placed))

        try:
            with (
                method.strategy.jax_settings(),
                lifted(state, method.strategy, flat.homes.in_step),
                explained(method.fn, state, method.owner_name),
            ):
                result = method(jax.tree.unflatten(structure, iterators))
        except MoreBatches:
            feed.note_ends(with_rest=True)
            return
        except NeedsRoom as need:
            need.make_room()
            feed.give_back(taken)
            continue  # The step runs again.
        except Exception:
            feed.give_back(taken)
            raise
        finally:
            state.write(flat.homes.return_to_host(state.read()))

        check_taken(method.name, list(map(len, taken)))
        check_pieces(taken)
        # The step may have left arrays on other devices.
        FlatState(state, method.strategy).settle(())
        feed.commit_taken()
        is_end = all(batches[-1].is_last for batches in taken)
        yield result, is_end


def _move_to_devices(state: State, flat: FlatState) -> None:
    """Moves the arrays of a state to the devices on which a step computes."""
    every_index = tuple(range(len(state.paths)))
    donated, others = flat.take(every_index)
    arrays = flat.join(every_index, donated, others)
    state.write(flat.homes.bring(arrays))


def _place(
    gather: Gather, batches: Iterable[Piece], taken: list[Any]
) -> Iterator[PyTree]:
    """Yields batches on their devices, and adds them to `taken`."""
    for batch in batches:
        taken.append(batch)
        yield gather.layout.wrap(gather.place(batch), batch.active)
