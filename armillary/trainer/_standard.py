"""The inner loops most programs need: begin, many compiled steps, end.

After Orbit's `StandardTrainer` and `StandardEvaluator`: the user writes one step, the
library runs it many times in one device program.
"""

import abc
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from armillary._checks import (
    answers_old_names,
    check_instance,
    check_num_steps,
    check_one_of,
    check_positive_int,
)
from armillary._logging import logger
from armillary._traceback import hides_frames
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._context import get_strategy, has_strategy
from armillary.state._holders import held_by
from armillary.trainer._contract import AbstractEvaluator, AbstractTrainer, PendingLoops
from armillary.trainer._guard import LoopCheck
from armillary.trainer._hooks import LoopOutputs
from armillary.trainer._loop import Loop, LoopOptions
from armillary.trainer._reads import RecordsReads
from armillary.typing import Output, PyTree

_OLD_OPTIONS = {
    "use_tf_function": "It is called `compile_step` here.",
    "use_tf_while_loop": "It is called `compile_loop` here.",
    "use_tpu_summary_optimization": "Leave it out: summaries are written between "
    "loops, so that nothing is to be optimized.",
}
_TRAINER_ONLY = (
    "An evaluation changes nothing that lasts, so there is nothing to watch. Set it in "
    "the trainer's `StandardTrainerOptions`."
)


@answers_old_names(**_OLD_OPTIONS)
@dataclass(frozen=True, kw_only=True)
class StandardTrainerOptions(LoopOptions):
    """How a `StandardTrainer` runs its steps.

    Args:
        compile_loop: Whether many steps run as one device program. Off, the same
            compiled step runs from a Python loop, with bit-identical results.
        compile_step: Whether the step is compiled at all. Off, every operation runs
            when Python reaches it, for debugging: slow, equal up to rounding.
        steps_per_chunk: Most steps in one device program, and most batches that are
            stacked for it. Results do not depend on it. More save time between
            programs, but delay the first step and need more memory. `None` takes as
            many as `steps_per_loop` of the `Controller`, or as the first call of
            `train` by hand: at most 100, and the steps of several loops up to 20.
        max_chunk_bytes: Most memory of one stack of batches, in bytes. There are two or
            three at a time: one in use and those read ahead.
        compiler_options: Options of XLA, as in `jax.jit(compiler_options=...)`. They go
            before the ones that are chosen by looking at the step: on CPUs, steps with
            convolutions run without YNNPACK. Results are equal up to rounding under
            other options. A name that XLA does not know is an error of JAX.
        on_non_finite: What to do if a step leaves more values that are infinite or not
            a number in an array of its state than there were before. `"raise"` undoes
            the step, runs no further one, and raises `NonFiniteError`; state and data
            are those before the step. `"skip"` undoes the step and goes on; only
            counters and random keys move on, see below. `None` looks at nothing.
        check_replicas_every: Steps after which to compare the copies of the state on
            all replicas, when a loop has ended. If any differ, `ReplicaDivergenceError`
            names arrays and replicas. `None` does not compare.
        compile_hooks: Whether `train_loop_begin` and `train_loop_end` are part of the
            device program, so that it can run many loops. `None` looks at their code:
            they are if all they do is to reset and compute metrics of Flax, and to do
            arithmetic with arrays of the trainer. `True` says that they need no Python
            (they print nothing, and keep no count): they are then traced, once, like
            the step. Loops that are watched (`on_non_finite`, `check_replicas_every`)
            or not compiled leave them in Python.

    A step that is skipped leaves every array as it was, but for random keys and
    integers of 32 or 64 bits outside metrics, batch statistics and the state of Optax:
    the global step counts it.

    Raises:
        ValueError: If a number is below 1, or `on_non_finite` is none of its values.
    """

    on_non_finite: Literal["raise", "skip"] | None = None
    check_replicas_every: int | None = None
    compile_hooks: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of(
            "on_non_finite",
            self.on_non_finite,
            (None, "raise", "skip"),
            'Use `"skip"` to leave bad steps out, or `"raise"` to decide where '
            "`NonFiniteError` is caught, such as to restore a checkpoint.",
        )
        check_one_of("compile_hooks", self.compile_hooks, (None, True, False))
        if self.check_replicas_every is not None:
            check_positive_int("check_replicas_every", self.check_replicas_every)


@answers_old_names(
    **_OLD_OPTIONS, on_non_finite=_TRAINER_ONLY, check_replicas_every=_TRAINER_ONLY
)
@dataclass(frozen=True, kw_only=True)
class StandardEvaluatorOptions(LoopOptions):
    """How a `StandardEvaluator` runs its steps.

    Compilation and chunks are as in `StandardTrainerOptions`; with
    `steps_per_chunk=None`, a complete evaluation counts as a call of 20 steps.

    Args:
        recreate_iterator_for_each_eval: Whether each call of `evaluate` begins a new
            pass over the data. Off, as in Orbit, it continues where the last one
            stopped, and begins anew when the data has ended, or after an error or
            Ctrl-C.

    Raises:
        ValueError: If a number is below 1.
    """

    recreate_iterator_for_each_eval: bool = False


@dataclass
class _Data:
    """Holds datasets apart from the user's attributes: data is not state."""

    datasets: PyTree
    steps_per_loop: int | None = None


class _Runner(RecordsReads):
    """What the two runners share: a loop over a step, under the right strategy."""

    @contextlib.contextmanager
    def _in_strategy(self) -> Iterator[Strategy]:
        """Enters the strategy that is in effect, or the one among the attributes."""
        if has_strategy():
            yield get_strategy()
            return
        own = [value for _, value in held_by(self) if isinstance(value, Strategy)]
        strategy = own[0] if own else get_strategy()
        with strategy.scope() if own else contextlib.nullcontext():
            yield strategy

    def _check_initialized(self, attribute: str, argument: str) -> None:
        """Checks that the constructor of the base class was called.

        Raises:
            TypeError: If it was not.
        """
        if attribute not in vars(self):
            raise TypeError(
                f"`{type(self).__name__}.__init__` did not call that of its base "
                "class, which takes the data. Begin it with "
                f"`super().__init__({argument})`."
            )

    def _get_loop(
        self,
        loop: Loop | None,
        strategy: Strategy,
        datasets: PyTree,
        step_name: str,
        options: LoopOptions,
        *,
        keep_results: bool,
        **others: Any,
    ) -> Loop:
        """Returns `loop`, or a new one if there is none or its use has changed."""
        if loop is not None:
            if loop.serves(datasets, strategy, options, keep_results):
                return loop
            loop.close()
        return Loop(
            self,
            getattr(self, step_name),
            step_name,
            datasets,
            strategy,
            options,
            keep_results=keep_results,
            **others,
        )


class StandardTrainer(_Runner, AbstractTrainer):
    """Runs `train_step` many times for each call of `train`.

    In outline::

        train_loop_begin()                  # Python, once per loop
        for _ in range(num_steps):          # one device program per chunk
            train_step(iterator)
        return train_loop_end()             # Python, once per loop

    Everything the step reads or writes must be reachable from the trainer: assign
    model, optimizer, metrics and other state to `self`. A strategy that is assigned to
    `self` is in effect, if no other is.

    A loop reuses the memory of the state that the last one left. What `train_loop_end`
    returns is safe; copy an array that you take out of a variable between loops
    (`variable[...].copy()`).

    Args:
        train_dataset: A dataset from `make_distributed_dataset`, anything that
            `armillary.data.as_source` takes, or a nest (list, dict, ...) of them.
        options: How to run; see `StandardTrainerOptions`.
    """

    def __init__(
        self, train_dataset: PyTree, options: StandardTrainerOptions | None = None
    ) -> None:
        _check_options(options, StandardTrainerOptions)
        self._train_loop: Loop | None = None
        self._train_data = _Data(train_dataset)
        self._train_options = options or StandardTrainerOptions()

    @property
    def train_dataset(self) -> PyTree:
        """The dataset, or nest of datasets. Assigning another one starts on it."""
        return self._train_data.datasets

    @train_dataset.setter
    def train_dataset(self, train_dataset: PyTree) -> None:
        steps_per_loop = self._train_data.steps_per_loop
        self._train_data = _Data(train_dataset, steps_per_loop)

    def train_loop_begin(self) -> None:
        """Prepares a loop, such as by resetting metrics; override as needed."""

    @abc.abstractmethod
    def train_step(self, iterator: Any) -> None:
        """Runs one step: override.

        It is traced once and compiled, so it must be written with `jax.numpy` and may
        not depend on values in Python. What it returns is dropped.

        Args:
            iterator: An iterator with the structure of `train_dataset`. Each `next` on
                it gives one global batch, for `strategy.run`.
        """

    def train_loop_end(self) -> Output:
        """Returns the loop's output, such as computed metrics; override as needed.

        Values are scalars, or a `Histogram`, an `Image` or a `Text` of
        `armillary.summary`. Arrays with axes reach log lines and actions too; with the
        controller's `summary_dir` they are written as histograms.
        """
        return None

    @hides_frames
    def train(self, num_steps: int) -> Output:
        """Runs `num_steps` steps, or fewer if the data ends before.

        Args:
            num_steps: Steps to run, at least 1.

        Returns:
            What `train_loop_end` returned; `None` if there was no data for any step.
            `data_exhausted` tells whether the data ended.

        Raises:
            TypeError: If the constructor of this class was not called.
            ValueError: If `num_steps` is below 1, or the dataset belongs to another
                strategy.
            StateStructureError: If a step changes the structure of the state.
            CapturedStateError: If a step uses state that the trainer does not reach.
            RetraceError: If batches change their shape.
            NonFiniteError: If a step left values that are not finite, and
                `on_non_finite` is `"raise"`.
            ReplicaDivergenceError: If `check_replicas_every` found copies that differ.
        """
        started = self._start(num_steps, 1)
        started.check()
        return started.outputs()[0]

    def prepare(self, steps_per_loop: int) -> None:
        """Hears how long loops are: chunks have as many steps."""
        if self._has_own_train():
            return
        self._check_initialized("_train_data", "train_dataset")
        self._train_data.steps_per_loop = steps_per_loop

    def start(self, num_steps: int, num_loops: int) -> PendingLoops:
        """Starts loops; see `AbstractTrainer.start`.

        After a step that stops training, no step has an effect: a caller that starts
        other loops before it looks at these loses nothing.
        """
        if self._has_own_train():
            return super().start(num_steps, num_loops)
        return self._start(num_steps, num_loops)

    def _has_own_train(self) -> bool:
        return type(self).train is not StandardTrainer.train or "train" in vars(self)

    def _start(self, num_steps: int, num_loops: int) -> "_StartedLoops":
        check_positive_int("num_steps", num_steps)
        self._check_initialized("_train_data", "train_dataset")
        options = self._train_options
        with self._in_strategy() as strategy:
            loop = self._train_loop = self._get_loop(
                self._train_loop,
                strategy,
                self._train_data.datasets,
                "train_step",
                options,
                exact=False,
                keep_results=False,
                on_non_finite=options.on_non_finite,
                check_replicas_every=options.check_replicas_every,
                compile_hooks=options.compile_hooks,
            )
            loop.prepare(self._train_data.steps_per_loop or num_steps)
            self.data_exhausted = not loop.has_data()
            if self.data_exhausted:
                return _StartedLoops(0, [None])
            if loop.finds_hooks():
                num_run, outputs = loop.run_loops(num_steps, num_loops)
                self.data_exhausted = num_run < num_steps * outputs.num_loops
                return _StartedLoops(num_run, outputs)
            self.train_loop_begin()
            num_run = loop.run(num_steps)
            self.data_exhausted = num_run < num_steps
            check = loop.check()
            try:
                output = loop.detach(self.train_loop_end())
            except BaseException as error:
                loop.fail(error)
                raise
            return _StartedLoops(num_run, [output], check)


class _StartedLoops(PendingLoops):
    """Loops of a `StandardTrainer`."""

    may_overlap = True

    def __init__(
        self,
        num_steps: int,
        outputs: Sequence[Output] | LoopOutputs,
        loop_check: LoopCheck | None = None,
    ) -> None:
        self.num_steps = num_steps
        self._values, self._check = outputs, loop_check

    def outputs(self) -> list[Output]:
        """Returns the output of each loop, with arrays that are on the device."""
        return list(self._values)

    def fetch(self) -> list[Output]:
        if isinstance(self._values, LoopOutputs):
            self._values.fetch()
        if self._check is not None:
            self._check.fetch()
        return self.outputs()

    def check(self, step: int | None = None) -> None:
        if self._check is not None:
            self._check.resolve(step)


class StandardEvaluator(_Runner, AbstractEvaluator):
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
        _check_options(options, StandardEvaluatorOptions)
        self._eval_loop: Loop | None = None
        self._eval_data = _Data(eval_dataset)
        self._eval_options = options or StandardEvaluatorOptions()

    @property
    def eval_dataset(self) -> PyTree:
        """The dataset, or nest of datasets. Assigning another one starts on it."""
        return self._eval_data.datasets

    @eval_dataset.setter
    def eval_dataset(self, eval_dataset: PyTree) -> None:
        self._eval_data = _Data(eval_dataset)

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
        self._check_initialized("_eval_data", "eval_dataset")
        with self._in_strategy() as strategy:
            state = self.eval_begin()
            last = self._eval_loop
            loop = self._eval_loop = self._get_loop(
                last,
                strategy,
                self._eval_data.datasets,
                "eval_step",
                self._eval_options,
                exact=True,
                keep_results=state is not None,
            )
            if num_steps == -1 and all(data.is_endless for data in loop.datasets):
                raise ValueError(
                    "`num_steps` is -1, for all of the data, but `eval_dataset` "
                    "repeats its data for ever. Make it without `repeat=True`, or "
                    "give a number of steps."
                )
            recreate = self._eval_options.recreate_iterator_for_each_eval
            # What an error or Ctrl-C left over of a pass is not all of the data.
            if loop is last and (recreate or loop.is_cut_off or not loop.has_data()):
                loop.reopen()
            for step_outputs in loop.iterate(num_steps):
                if state is not None:
                    state = self.eval_reduce(state, step_outputs)
            if loop.num_iterated < num_steps:
                logger.warning(
                    "`evaluate(%d)` ran %d steps, because the data ended: the last "
                    "evaluation had taken what came before, or there is no more. The "
                    "next one begins anew. Use `evaluate(-1)` for all of the data, or "
                    "`StandardEvaluatorOptions(recreate_iterator_for_each_eval=True)` "
                    "to begin anew each time.",
                    num_steps,
                    loop.num_iterated,
                )
            output = self.eval_end() if state is None else self.eval_end(state)
            return loop.detach(output)


def _check_options(options: Any, kind: type) -> None:
    if options is not None:
        fix = f"Write `options=armillary.{kind.__name__}(...)`."
        check_instance("options", options, kind, fix)
