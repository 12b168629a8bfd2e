"""The same steps without a compiler, for finding a mistake.

Every operation runs when Python reaches it: a debugger stops in the step, `print` shows
values (on several replicas: one line, with the values of all). Slow, and equal to the
compiled loop up to rounding only.
"""

from collections.abc import Iterator
from typing import Any

import jax

from armillary.data.feed._feed import Feed
from armillary.data.feed._reader import BatchReader
from armillary.data.feed._split import Piece
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import check_taken, explained
from armillary.distribute.replica._context import lifted
from armillary.state._lift import State, as_array
from armillary.trainer._guard import LoopGuard
from armillary.trainer._step_checks import StepMethod
from armillary.typing import PyTree


class EagerIterator:
    """Hands a reader's batches to an eager step."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader
        self.taken: Piece | None = None

    def __iter__(self) -> "EagerIterator":
        return self

    def __next__(self) -> PyTree:
        """Returns the next batch, placed on its devices."""
        self.taken = next(self._reader)
        gather = self._reader.gather
        return gather.layout.wrap(gather.place(self.taken), self.taken.num_active)

    get_next = __next__


def run_eagerly(
    method: StepMethod, feed: Feed[Any], structure: Any, guard: LoopGuard
) -> Iterator[tuple[PyTree, bool]]:
    """Yields what each step returned, and whether it ended its batch, until data ends.

    It also ends when `guard` finds a step that ends training. A step for which the data
    ends in the middle is not counted, but what it did before stays done.
    """
    readers, step_fn = feed.readers, method.fn
    while all(reader.peek() is not None for reader in readers):
        if guard.health is not None and guard.health.is_halted:
            return
        state = State([(method.owner, "")])
        flat = FlatState(state, method.strategy)
        every = tuple(range(len(state.paths)))
        before = flat.join(every, *flat.take(every))
        state.write(before)
        iterators = [EagerIterator(reader) for reader in readers]
        with (
            lifted(state),
            explained(step_fn, state, method.owner_name),
        ):
            try:
                result = method(jax.tree.unflatten(structure, iterators))
            except StopIteration:
                return
        taken = [iterator.taken for iterator in iterators if iterator.taken is not None]
        check_taken(step_fn.__name__, [int(bool(i.taken)) for i in iterators])
        _undo_if_bad(guard, state, before)
        FlatState(state, method.strategy).settle(())
        feed.commit_taken()
        guard.add([feed.positions])
        yield result, all(batch.is_last for batch in taken)


def _undo_if_bad(guard: LoopGuard, state: State, before: list[jax.Array]) -> None:
    after = [as_array(leaf) for leaf in state.read()]
    changed = [i for i, old in enumerate(before) if after[i] is not old]
    step_guard = guard.for_step(state, after, changed)
    if step_guard is None or guard.health is None:
        return
    old, new = [before[i] for i in changed], [after[i] for i in changed]
    kept, guard.health = step_guard.look_closely(old, new, guard.health)
    for i, array in zip(changed, kept, strict=True):
        after[i] = array
    state.write(after, set(changed))
