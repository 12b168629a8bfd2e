"""Prediction over a whole dataset, with each example used once."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from armillary._checks import check_callable, check_instance
from armillary._traceback import hides_frames
from armillary.data._dataset import DistributedDataset, open_feed
from armillary.data.feed._feed import Feed
from armillary.data.feed._piece import Piece, get_mask
from armillary.data.feed._reader import place_pieces
from armillary.distribute._global_arrays import as_whole
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._function import CompiledFunction
from armillary.distribute.replica._context import get_strategy
from armillary.trainer._datasets import distribute
from armillary.trainer._step_checks import check_evaluation
from armillary.typing import Batch, PyTree

_PROGRAMS = "armillary_predict"


@hides_frames
def predict(
    fn: Callable[[Batch], PyTree], dataset: Any, *, strategy: Strategy | None = None
) -> Iterator[PyTree]:
    """Yields the outputs of a function for each batch of a dataset, in order.

    Each example is used exactly once, for any batch size and number of replicas and
    processes, and for any `remainder` of the dataset. Only the batches in progress are
    kept in memory. `docs/train/prediction.md` has an example.

    It reads the data from the beginning, and does not change the position of `dataset`.
    In a shuffled dataset, it uses the order of the first pass. In a job of several
    processes, all processes must iterate over it, and each process gets all outputs.

    Args:
        fn: Takes a batch, or a replica's share of a batch, and returns a pytree of
            arrays that have the examples on their first axis. It may be a model that
            takes batches. It is compiled once for each shape of batch, and the programs
            are kept with the function for the next call.
        dataset: A distributed dataset, or anything `armillary.data.as_source` takes,
            with global batches.
        strategy: The strategy that runs `fn`; by default the one in effect.

    Returns:
        An iterator with one pytree of NumPy arrays for each batch of the dataset.

    Raises:
        TypeError: If `fn` is not callable, or `dataset` is an iterator over one.
        StateStructureError: If `fn` changes parameters or batch statistics of a model.
            A model in training mode does.
        ValueError: If the data repeats itself forever, gives each replica batches of
            its own, or belongs to another strategy. Also if an output of `fn` is not an
            array with one row for each example.
    """
    check_callable("fn", fn)
    strategy = get_strategy() if strategy is None else strategy
    fix = "Leave it out for the one in effect."
    check_instance("strategy", strategy, Strategy, fix)
    data = _at_beginning(dataset, strategy)
    return _predict(fn, data, strategy)


def _at_beginning(dataset: Any, strategy: Strategy) -> DistributedDataset:
    """Returns a dataset of the same data, from the beginning, with all examples."""
    data = distribute(dataset, strategy)
    if data.per_replica_batches:
        raise ValueError(
            "`dataset` gives batches of its own to each replica, so there is no one "
            "order of its examples. Use `strategy.distribute_dataset(dataset)`."
        )
    if data.is_endless:
        raise ValueError(
            "`dataset` repeats its data forever, but `predict` uses each example once. "
            "Make it without `repeat=True`."
        )
    remainder = "pad" if data.options.remainder == "pad" else None
    options = dataclasses.replace(data.options, remainder=remainder)
    return DistributedDataset(data.source, data.layout, options=options)


@hides_frames
def _predict(
    fn: Callable[[Batch], PyTree], dataset: DistributedDataset, strategy: Strategy
) -> Iterator[PyTree]:
    """Yields the outputs of each batch, with one piece in progress on the device."""
    step = _compile(fn, strategy, has_mask=dataset.options.remainder == "pad")
    feed: Feed[Piece] = open_feed([dataset], in_pieces=True)
    feed.start(place_pieces, dataset.prefetch)

    def start() -> Iterator[tuple[Piece, PyTree]]:
        while (piece := feed.next_chunk()) is not None:
            # Not around `yield`, because the caller's code would run in this scope.
            with strategy.scope():
                arrays = step(dataset.layout.wrap(piece.arrays, piece.active))
            feed.read_on()
            feed.commit(1)
            yield piece, arrays

    started = start()
    pieces: list[PyTree] = []
    try:
        following = next(started, None)
        while following is not None:
            piece, arrays = following
            # The device gets the next piece before the host waits for this piece.
            following = next(started, None)
            pieces.append(_fetch(arrays, strategy))
            if piece.is_last:
                yield jax.tree.map(_concatenate, *pieces)
                pieces = []
    except Exception:
        feed.close()
        raise
    # Not in a `finally`: if the caller does not take all outputs, it might run only
    # while Python exits. The feed is closed with this iterator anyway.
    feed.close()


def _compile(
    fn: Callable[[Batch], PyTree], strategy: Strategy, *, has_mask: bool
) -> CompiledFunction:
    """Returns the compiled step, which is kept with `fn` if `fn` is a function."""
    is_function = isinstance(fn, types.FunctionType)
    kept = vars(fn).setdefault(_PROGRAMS, {}) if is_function else {}
    # The `id` is in the key because `functools.wraps` copies attributes of a function.
    key = id(fn), strategy, has_mask
    name = getattr(fn, "__name__", type(fn).__name__)

    def in_replica(batch: Batch) -> tuple[PyTree, Any]:
        outputs = fn(batch)
        num_rows = len(jax.tree.leaves(batch)[0])
        _check_rows(name, outputs, num_rows)
        mask = get_mask(batch) if has_mask else None
        return outputs, mask

    def body(batch: PyTree) -> PyTree:
        outputs = strategy.run(in_replica, args=(batch,))
        return strategy.gather(outputs, axis=0)

    if key not in kept:
        check = functools.partial(check_evaluation, name)
        kept[key] = CompiledFunction(fn, strategy, body, check=check)
    return kept[key]


def _check_rows(fn_name: str, outputs: PyTree, num_rows: int) -> None:
    """Raises unless there are outputs, and each has a row for each example."""
    leaves = jax.tree_util.tree_leaves_with_path(outputs) or [((), outputs)]
    for path, leaf in leaves:
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        if is_array and leaf.shape[:1] == (num_rows,):
            continue
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        which = f"`{key}` in the" if key else "The"
        shown = f"has shape {leaf.shape}" if is_array else f"is {leaf!r:.80}"
        raise ValueError(
            f"{which} output of `{fn_name}` {shown}, but it must be an array whose "
            f"first axis has the {num_rows} examples that it was given. Return a value "
            "for each example. For one value of all examples, write a "
            "`StandardEvaluator`."
        )


def _fetch(arrays: PyTree, strategy: Strategy) -> PyTree:
    """Returns outputs as NumPy arrays, without the rows of padding."""
    with strategy.scope():
        outputs, mask = jax.tree.map(_fetch_leaf, arrays)
    if mask is None:
        return outputs
    return jax.tree.map(lambda leaf: leaf[mask], outputs)


def _fetch_leaf(leaf: jax.Array) -> np.ndarray:
    return np.asarray(as_whole(leaf))


def _concatenate(*leaves: np.ndarray) -> np.ndarray:
    return np.concatenate(leaves)
