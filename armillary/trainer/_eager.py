"""The same steps without a compiler, for finding a mistake.

On one device it runs line by line: a debugger stops in the step, `print` shows values.
What `run` of several replicas is given is traced and proved as in a compiled step.
Slow, and equal to the compiled loop up to rounding only.
"""

from collections.abc import Iterator
from typing import Any

import jax

from armillary.data.feed._feed import Feed
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import (
    MoreBatches,
    StepIterator,
    check_taken,
    explained,
)
from armillary.distribute.replica._context import lifted
from armillary.state._lift import State, as_array
from armillary.trainer._guard import LoopGuard
from armillary.trainer._runner import StepMethod
from armillary.typing import PyTree


def run_eagerly(
    method: StepMethod, feed: Feed[Any], structure: Any, guard: LoopGuard
) -> Iterator[tuple[PyTree, bool]]:
    """Yields what each step returned, and whether it ended its batch, until data ends.

    It also ends when `guard` finds a step that ends training. A step for which the data
    ends in the middle is not counted, but what it did before stays done.
    """
    while all(reader.peek() is not None for reader in feed.readers):
        if guard.health is not None and guard.health.is_halted:
            return
        state = State([(method.owner, "")])
        flat = FlatState(state, method.strategy)
        every = tuple(range(len(state.paths)))
        before = flat.join(every, *flat.take(every))
        state.write(before)
        taken: list[list[Any]] = [[] for _ in feed.readers]
        pairs = zip(feed.readers, taken, strict=True)
        iterators = [StepIterator(i, _place(*pair)) for i, pair in enumerate(pairs)]
        try:
            with (
                lifted(state, method.strategy),
                explained(method.fn, state, method.owner_name),
            ):
                result = method(jax.tree.unflatten(structure, iterators))
        except MoreBatches:
            return
        check_taken(method.name, list(map(len, taken)))
        _undo_if_bad(guard, state, before)
        FlatState(state, method.strategy).settle(())
        feed.commit_taken()
        guard.add([feed.positions])
        yield result, all(batches[-1].is_last for batches in taken)


def _place(reader: Any, taken: list[Any]) -> Iterator[PyTree]:
    """Yields the batches of a reader on their devices, and notes which were taken."""
    for batch in reader:
        taken.append(batch)
        gather = reader.gather
        yield gather.layout.wrap(gather.place(batch), batch.num_active)


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
