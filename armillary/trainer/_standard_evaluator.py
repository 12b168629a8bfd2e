"""Evaluation and prediction over a whole data set, with each example used once."""

import abc
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import numpy as np

from armillary._checks import check_callable, check_instance, check_num_steps
from armillary._logging import logger
from armillary._stack import with_room
from armillary._traceback import hides_frames
from armillary.data._dataset import DistributedDataset
from armillary.data.feed._feed import Feed
from armillary.data.feed._reader import place_pieces
from armillary.data.feed._split import Piece, get_mask
from armillary.distribute._global_arrays import as_whole
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._function import CompiledFunction
from armillary.distribute.replica._context import get_strategy
from armillary.trainer._claims import claimed
from armillary.trainer._contract import AbstractEvaluator
from armillary.trainer._loop import Loop, find_loop
from armillary.trainer._runner import (
    Run,
    Runner,
    StandardEvaluatorOptions,
    check_hooks,
    distribute,
    make_run,
)
from armillary.trainer._tracer import check_evaluation
from armillary.typing import Batch, Output, PyTree

_PROGRAMS = "armillary_predict"


class StandardEvaluator(Runner, AbstractEvaluator):
    """Runs `eval_step` over an evaluation set.

    In outline::

        state = eval_begin()
        for _ in range(num_steps):
            outputs = eval_step(iterator)
            if state is not None:
                state = eval_reduce(state, outputs)
        return eval_end() if state is None else eval_end(state)

    Every example counts exactly once, for any batch size and number of replicas. If the
    replicas cannot share a batch equally, it runs through smaller steps, in which
    replicas without data change nothing. So `eval_step` may run a few times more often
    than there are batches. In these steps, reduce with `ReplicaContext.all_reduce`,
    which leaves out replicas without data, and not with `jax.lax.psum`.

    Args:
        eval_dataset: As `train_dataset` of `StandardTrainer`. With `None`, each
            evaluation needs a number of steps.
        options: How to run; see `StandardEvaluatorOptions`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        del args, kwargs
        hooks = ("eval_begin", "eval_step", "eval_reduce", "eval_end")
        check_hooks(cls, StandardEvaluator, *hooks)
        return super().__new__(cls)

    def __init__(
        self, eval_dataset: PyTree, options: StandardEvaluatorOptions | None = None
    ) -> None:
        kind = StandardEvaluatorOptions
        self._eval_run = make_run("eval_dataset", eval_dataset, options, kind)

    @property
    def eval_dataset(self) -> PyTree:
        """The dataset, or nest of datasets. You may assign a new one."""
        return self._get_eval().datasets

    @eval_dataset.setter
    def eval_dataset(self, eval_dataset: PyTree) -> None:
        self._get_eval().datasets = eval_dataset

    def _get_eval(self) -> Run:
        return self._get_run("_eval_run", "eval_dataset")

    def eval_begin(self) -> Any:
        """Returns the initial state for `eval_reduce`; override as needed.

        With `None`, the default, outputs of steps are dropped.
        """
        return None

    @abc.abstractmethod
    def eval_step(self, iterator: Any) -> Any:
        """Runs one evaluation step: override. It is traced once and compiled.

        Args:
            iterator: An iterator with the structure of `eval_dataset`.

        Returns:
            The step's outputs, a pytree, for `eval_reduce`.
        """

    def eval_reduce(self, state: Any, step_outputs: Any) -> Any:
        """Returns the state after one step; runs in Python, so the state may grow.

        Args:
            state: The result of `eval_begin` or of the last `eval_reduce`.
            step_outputs: The result of `eval_step`, with arrays in place of tracers.

        Raises:
            NotImplementedError: If `eval_begin` returns a state and this method is not
                overridden.
        """
        del state, step_outputs
        raise NotImplementedError(
            f"`{type(self).__name__}.eval_begin` returned a state, so `eval_reduce` is "
            "needed to add each step's outputs to it. Define "
            "`eval_reduce(self, state, step_outputs)`, or return `None` from "
            "`eval_begin`."
        )

    def eval_end(self, *state: Any) -> Output:
        """Returns the evaluation's output; override as needed.

        Values are as for `train_loop_end`.

        Args:
            *state: The last state, if `eval_begin` returned one.
        """
        del state
        return None

    @hides_frames
    @with_room
    def evaluate(self, num_steps: int) -> Output:
        """Runs `num_steps` batches, or all batches, through `eval_step`.

        Args:
            num_steps: Batches to evaluate, at least 1; -1 for all batches of the data.

        Returns:
            The result of `eval_end`.

        Raises:
            ValueError: If `num_steps` is neither positive nor -1; if it is -1, but the
                data never ends or there is no data; or if the dataset belongs to
                another strategy.
            ThreadError: If another thread runs steps with the same state.
        """
        check_num_steps("num_steps", num_steps)
        return self._evaluate(num_steps)

    def _evaluate(self, num_steps: int) -> Output:
        run = self._get_eval()
        with claimed(self, "evaluates"), self._in_strategy() as strategy:
            state = self.eval_begin()
            last = run.loop
            keeps = state is not None
            method = self._get_method(run, strategy, "eval_step", keep_results=keeps)
            loop = find_loop(run, method)
            check_ends("num_steps", num_steps, loop.datasets)
            if loop is last and _begins_anew(loop, run.options):
                loop.reopen()
            for step_outputs in loop.iterate(num_steps):
                if state is not None:
                    state = self.eval_reduce(state, step_outputs)
            if num_steps == -1 and not run.has_warned and (left := loop.find_left()):
                run.has_warned = True
                logger.warning(
                    "An evaluation ended when a data set had no further batch, and "
                    "left out batches of dataset %s. To evaluate all batches of "
                    "several data sets, give the `Controller` a dictionary of "
                    "evaluators.",
                    ", ".join(map(str, left)),
                )
            output = self.eval_end() if state is None else self.eval_end(state)
            return loop.detach(output)


def check_ends(name: str, num_steps: int, datasets: Sequence[Any]) -> None:
    """Raises if an evaluation of all the data would never end."""
    if num_steps != -1:
        return
    if not datasets:
        raise ValueError(
            f"`{name}` is -1, for all of the data, but `eval_dataset` is None, and "
            "steps that make their own data never end. Give a number of steps: "
            "`controller.evaluate(steps=100)`, or `eval_steps=100` of "
            "`train_and_evaluate`."
        )
    if all(getattr(each, "is_endless", False) for each in datasets):
        raise ValueError(
            f"`{name}` is -1, for all of the data, but `eval_dataset` repeats its "
            "data forever. Make it without `repeat=True`, or give a number of steps."
        )


def _begins_anew(loop: Loop, options: StandardEvaluatorOptions) -> bool:
    """Returns whether the next evaluation begins at the first batch."""
    if options.recreate_iterator_for_each_eval or loop.feed.is_closed:
        return True
    return not loop.has_data()


@hides_frames
def predict(
    fn: Callable[[Batch], PyTree], dataset: Any, *, strategy: Strategy | None = None
) -> Iterator[PyTree]:
    """Yields the outputs of a function for each batch of a data set, in order.

    Each example is used exactly once, for any batch size and number of replicas and
    processes, and for any `remainder` of the data set. Only the batches in progress are
    kept in memory. `docs/prediction.md` has an example.

    It reads the data from the beginning, and does not change the position of `dataset`.
    In a shuffled data set, it uses the order of the first pass. In a job of several
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
        An iterator with one pytree of NumPy arrays for each batch of the data set.

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
    return _predict(fn, _at_beginning(dataset, strategy), strategy)


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
    step = _compile(fn, strategy, has_mask=dataset.options.remainder == "pad")
    feed: Feed[Piece] = Feed([dataset], in_pieces=True)
    feed.start(place_pieces, dataset.prefetch)

    def start() -> Iterator[tuple[Piece, PyTree]]:
        while (piece := feed.next_chunk()) is not None:
            # Not around `yield`, because the caller's code would run in this scope.
            with strategy.scope():
                arrays = step(dataset.layout.wrap(piece.arrays, piece.num_active))
            feed.read_on()
            feed.commit(1)
            yield piece, arrays

    started = start()
    pieces: list[PyTree] = []
    try:
        following = next(started, None)
        while following is not None:
            # The device gets the next piece before the host waits for this piece.
            (piece, arrays), following = following, next(started, None)
            pieces.append(_fetch(arrays, strategy))
            if piece.is_last:
                yield jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
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
        _check_rows(name, outputs, len(jax.tree.leaves(batch)[0]))
        return outputs, get_mask(batch) if has_mask else None

    def body(batch: PyTree) -> PyTree:
        return strategy.gather(strategy.run(in_replica, args=(batch,)), axis=0)

    if key not in kept:
        check = functools.partial(check_evaluation, name)
        kept[key] = CompiledFunction(fn, strategy, body, check=check)
    return kept[key]


def _check_rows(fn_name: str, outputs: PyTree, num_rows: int) -> None:
    """Raises unless there are outputs, and each has a row for each example."""
    leaves = jax.tree_util.tree_leaves_with_path(outputs) or [((), outputs)]
    for path, leaf in leaves:
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        name = f"{f'`{key}` in the' if key else 'The'} output of `{fn_name}`"
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        if not is_array or leaf.shape[:1] != (num_rows,):
            shown = f"has shape {leaf.shape}" if is_array else f"is {leaf!r:.80}"
            raise ValueError(
                f"{name} {shown}, but it must be an array whose first axis has the "
                f"{num_rows} examples that it was given. Return a value for each "
                "example. For one value of all examples, write a `StandardEvaluator`."
            )


def _fetch(arrays: PyTree, strategy: Strategy) -> PyTree:
    """Returns outputs as NumPy arrays, without the rows of padding."""
    with strategy.scope():
        outputs, mask = jax.tree.map(lambda leaf: np.asarray(as_whole(leaf)), arrays)
    return outputs if mask is None else jax.tree.map(lambda leaf: leaf[mask], outputs)
