"""The evaluation most programs need: compiled steps over all of the data.

After Orbit's `StandardEvaluator`: the user writes one step, and what to make of its
results.
"""

import abc
from typing import Any

from armillary._checks import check_num_steps
from armillary._logging import logger
from armillary._traceback import hides_frames
from armillary.trainer._contract import AbstractEvaluator
from armillary.trainer._loop import find_loop
from armillary.trainer._options import StandardEvaluatorOptions
from armillary.trainer._runner import Run, Runner, make_run
from armillary.typing import Output, PyTree


class StandardEvaluator(Runner, AbstractEvaluator):
    """Runs `eval_step` over an evaluation set.

    In outline::

        state = eval_begin()
        for _ in range(num_steps):
            outputs = eval_step(iterator)
            if state is not None:
                state = eval_reduce(state, outputs)
        return eval_end() if state is None else eval_end(state)

    Every example counts exactly once, whatever the batch size and the number of
    replicas. What replicas cannot share equally runs through smaller steps, in which
    the replicas without data change nothing: so `eval_step` may run a few times more
    than there are batches. In such a step reduce with `ReplicaContext.all_reduce`,
    which leaves those replicas out, and not with `jax.lax.psum`.

    Args:
        eval_dataset: As `train_dataset` of `StandardTrainer`.
        options: How to run; see `StandardEvaluatorOptions`.
    """

    def __init__(
        self, eval_dataset: PyTree, options: StandardEvaluatorOptions | None = None
    ) -> None:
        kind = StandardEvaluatorOptions
        self._eval_run = make_run("eval_dataset", eval_dataset, options, kind)

    @property
    def eval_dataset(self) -> PyTree:
        """The dataset, or nest of datasets. Assigning another one starts on it."""
        return self._get_eval().datasets

    @eval_dataset.setter
    def eval_dataset(self, eval_dataset: PyTree) -> None:
        self._get_eval().datasets = eval_dataset

    def _get_eval(self) -> Run:
        return self._get_run("_eval_run", "eval_dataset")

    def eval_begin(self) -> Any:
        """Returns the state to reduce step outputs into; override as needed.

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
            state: What `eval_begin` or the last `eval_reduce` returned.
            step_outputs: What `eval_step` returned, with arrays in place of tracers.

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
    def evaluate(self, num_steps: int) -> Output:
        """Runs `num_steps` batches through `eval_step`, or all there are.

        Args:
            num_steps: Batches to evaluate, at least 1; -1 for all that the data holds.

        Returns:
            What `eval_end` returned.

        Raises:
            ValueError: If `num_steps` is neither positive nor -1, or -1 where the
                dataset repeats its data for ever, or the dataset belongs to another
                strategy.
        """
        check_num_steps("num_steps", num_steps)
        run = self._get_eval()
        with self._in_strategy() as strategy:
            state = self.eval_begin()
            modes, last = (True, state is not None), run.loop
            method = self._get_method(run, strategy, "eval_step", *modes)
            loop = find_loop(run, method)
            if num_steps == -1 and all(data.is_endless for data in loop.datasets):
                raise ValueError(
                    "`num_steps` is -1, for all of the data, but `eval_dataset` "
                    "repeats its data for ever. Make it without `repeat=True`, or "
                    "give a number of steps."
                )
            recreate = run.options.recreate_iterator_for_each_eval
            # What an error or Ctrl-C left over of a pass is not all of the data.
            if loop is last and (recreate or loop.is_cut_off or not loop.has_data()):
                loop.reopen()
            for step_outputs in loop.iterate(num_steps):
                if state is not None:
                    state = self.eval_reduce(state, step_outputs)
            # An iterator that is made anew has lost nothing to the last evaluation.
            if loop.num_iterated < num_steps and not recreate:
                logger.warning(
                    "`evaluate(%d)` ran %d steps, because the data ended: the last "
                    "evaluation had taken what came before, or there is no more. The "
                    "next one begins anew. Use `evaluate(-1)` for all of the data, or "
                    "leave out `recreate_iterator_for_each_eval=False` to begin anew "
                    "each time.",
                    num_steps,
                    loop.num_iterated,
                )
            output = self.eval_end() if state is None else self.eval_end(state)
            return loop.detach(output)
