"""Evaluation over a whole dataset, with each example used once."""

import abc
from collections.abc import Sequence
from typing import Any, Self

from armillary._checks import check_num_steps
from armillary._logging import logger
from armillary._stack import with_room
from armillary._traceback import hides_frames
from armillary.trainer._claims import claimed
from armillary.trainer._contract import AbstractEvaluator
from armillary.trainer._loop import Loop, find_loop
from armillary.trainer._method_names import check_hooks
from armillary.trainer._options import StandardEvaluatorOptions
from armillary.trainer._runner import Runner
from armillary.trainer._setup import Setup, make_setup
from armillary.typing import Output, PyTree


class StandardEvaluator(Runner, AbstractEvaluator):
    """Runs `eval_step` over an evaluation set.

    In outline::

        state = eval_begin()
        for _ in range(num_steps):
            outputs = eval_step(iterator)
            if state is not None or eval_reduce is overridden:
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
        self._eval_setup = make_setup("eval_dataset", eval_dataset, options, kind)

    @property
    def eval_dataset(self) -> PyTree:
        """The dataset, or nest of datasets. You may assign a new one."""
        return self._get_eval().datasets

    @eval_dataset.setter
    def eval_dataset(self, eval_dataset: PyTree) -> None:
        self._get_eval().datasets = eval_dataset

    def _get_eval(self) -> Setup:
        return self._get_setup("_eval_setup", "eval_dataset")

    def eval_begin(self) -> Any:
        """Returns the initial state for `eval_reduce`; override as needed.

        With `None`, the default, outputs of steps are dropped, unless `eval_reduce` is
        overridden. Then it gets `None` as its first state, as in Orbit.
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
        """Runs one evaluation under the strategy in effect."""
        setup = self._get_eval()
        with claimed(self, "evaluates"), self._in_strategy() as strategy:
            state = self.eval_begin()
            last = setup.loop
            is_reduced = type(self).eval_reduce is not StandardEvaluator.eval_reduce
            keeps = is_reduced or state is not None
            method = self._get_method(setup, strategy, "eval_step", keep_results=keeps)
            loop = find_loop(setup, method)
            check_ends("num_steps", num_steps, loop.datasets)
            if loop is last and _begins_anew(loop, setup.options):
                loop.reopen()

            for step_outputs in loop.iterate(num_steps):
                if keeps:
                    state = self.eval_reduce(state, step_outputs)
            if num_steps == -1 and not setup.has_warned:
                _warn_of_left_batches(setup, loop)

            output = self.eval_end() if state is None else self.eval_end(state)
            return loop.detach(output)


def _warn_of_left_batches(setup: Setup, loop: Loop) -> None:
    """Warns, once, if an evaluation of all the data has left out batches."""
    left = loop.find_left()
    if left:
        setup.has_warned = True
        logger.warning(
            "An evaluation ended when a dataset had no further batch, and "
            "left out batches of dataset %s. To evaluate all batches of "
            "several datasets, give the `Controller` a dictionary of "
            "evaluators.",
            ", ".join(map(str, left)),
        )


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
    if all(getattr(dataset, "is_endless", False) for dataset in datasets):
        raise ValueError(
            f"`{name}` is -1, for all of the data, but `eval_dataset` repeats its "
            "data forever. Make it without `repeat=True`, or give a number of steps."
        )


def _begins_anew(loop: Loop, options: StandardEvaluatorOptions) -> bool:
    """Returns whether the next evaluation begins at the first batch."""
    if options.recreate_iterator_for_each_eval or loop.feed.is_closed:
        return True
    return not loop.has_data()
