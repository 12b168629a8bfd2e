"""Trainer and evaluator around pure functions of any pytree and a batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from armillary._checks import (
    check_callable,
    check_instance,
    check_methods,
    check_takes,
)
from armillary.data.sources._stale import check_state_is_current
from armillary.distribute._global_arrays import as_whole
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._context import get_strategy
from armillary.distribute.replica._leaf_kinds import StateKinds
from armillary.distribute.replica._policy import (
    VariableAggregation,
    create_global_step,
)
from armillary.distribute.replica._pure_state import (
    has_data,
    lend,
    own_state,
)
from armillary.state._lift import refuse_types
from armillary.state._slots import LeafKind, Trait, with_trait
from armillary.state._tree import (
    PURE_STATE,
    Leaf,
    PureStateOwner,
    is_object,
    leaves_of,
)
from armillary.state._weak_types import explained_types, find_weak
from armillary.trainer._hooks import map_output
from armillary.trainer._no_data import check_step_arguments, take_arguments
from armillary.trainer._options import StandardEvaluatorOptions, StandardTrainerOptions
from armillary.trainer._returned_metrics import (
    LoopEnd,
    ReturnedMetrics,
    add_derived,
    add_metrics,
    make_metrics,
    read_totals,
    with_room_for_metrics,
)
from armillary.trainer._returned_pair import take_pair
from armillary.trainer._standard_evaluator import StandardEvaluator
from armillary.trainer._standard_trainer import LoopsOnDevice, StandardTrainer
from armillary.typing import Batch, Output, PyTree


@with_trait(Trait.HOLDS_STATE)
class StepTrainer(StandardTrainer, PureStateOwner):
    """Trains with a pure step: `step(state, batch) -> (state, metrics)`.

    The state is any pytree: parameters and Optax state in a tuple or a dictionary, an
    Equinox module, a `TrainState` of Flax Linen. Like the state of every
    `StandardTrainer`, it is compiled, fused, donated, distributed, saved and resumed::

        def step(state, batch):
            params, opt_state = state
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            grads = armillary.all_reduce("mean", grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

        trainer = armillary.StepTrainer(step, (params, opt_state), dataset)
        checkpoint = armillary.Checkpoint(trainer=trainer)
        armillary.Controller(
            trainer=trainer, global_step=trainer.global_step, steps_per_loop=100, ...
        )

    The step runs once per replica, like a function that is given to `strategy.run`, on
    the replica's share of the batch. A loop's output has a number for each metric that
    the step returns, over all steps and replicas of the loop:

    - For an array, the mean of all its values.
    - For a plain number, the mean over examples: the number counts as the mean over its
      batch. The sum of a batch is not a mean, so return `armillary.metrics.Sum`,
      `Ratio` or `WeightedMean` for sums.
    - For a metric object that is made in the step, such as
      `armillary.metrics.Ratio(losses.sum(), weights.sum())` or an updated
      `nnx.metrics.Accuracy()`, the value of the metric over all examples.

    With `metrics`, the object takes the values that the step returns, by name, and
    computes the output.

    Args:
        step: Takes the state and a batch; returns the state after the step, of the same
            structure, shapes and dtypes, and a dictionary of metrics, perhaps nested,
            or `None`.
        state: The state to begin with. Its arrays are copied, NumPy's as well, and
            integers become arrays. Other leaves, such as functions, are constants.
        train_dataset: As for `StandardTrainer`. Without it, the step makes its own
            data and takes the state alone: `step(state)`.
        strategy: The strategy that runs the step; by default the one in effect.
        metrics: An object that reduces the metrics, such as an `nnx.MultiMetric`.
        kinds: Kinds of leaves that may differ between replicas during a step. A key
            is a regular expression, searched for in the path of a leaf
            (`state/batch_stats/norm/mean`), or the type of a node that holds the leaf.
            A value is `"mean"`, `"sum"`, `"only_first_replica"` or `"none"`, as the
            `aggregation` of a variable (see `VariableAggregation`). If several keys
            find a leaf, the first of them counts. By default the library of a leaf
            decides: Linen's `batch_stats`, the state of an Equinox module and the
            statistics of a Keras model are averaged, and the variables of an
            `nnx.State` keep their kind. Any other leaf must be equal on all replicas.
        loop_end: Takes the metrics of a loop, a dictionary of numbers, and the state
            after it; returns a dictionary of numbers to add to the output, such as
            `{"perplexity": np.exp(metrics["loss"])}`. It runs in Python, once for each
            loop, when the device has run the loop.
        options: As for any `StandardTrainer`.

    `Checkpoint(trainer=trainer)` saves the state, the number of steps and the position
    in the data, if the data has positions.

    Attributes:
        state: The state after the last step. The next loop reuses its memory, so copy
            an array before you keep it (`array.copy()`).
        global_step: The number of steps that were run, a variable of shape `()`.

    Raises:
        TypeError: If an argument is of the wrong type; if `step` does not return a
            pair; or if `step` takes a batch but there is no data, or the other way
            round.
        StateStructureError: If `step` returns a state of another structure, shape or
            dtype than it took.
        ValueError: If `state` has no array, if a module of NNX in it shares a
            variable, or if `kinds` has a kind that does not exist or a key that finds
            no leaf. Also if `step` returns other metrics for batches of another shape,
            or a metric that lives longer than the step.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Any, Mapping[str, Any] | None]],
        state: Any,
        train_dataset: PyTree = None,
        *,
        strategy: Strategy | None = None,
        metrics: Any = None,
        kinds: Mapping[str | type, VariableAggregation | str] | None = None,
        loop_end: LoopEnd | None = None,
        options: StandardTrainerOptions | None = None,
    ) -> None:
        fix = "Use a strategy such as `armillary.MirroredStrategy()`."
        check_instance("strategy", strategy, Strategy | None, fix)
        self.strategy = get_strategy() if strategy is None else strategy
        if loop_end is not None:
            check_takes("loop_end", loop_end, "metrics", "state")
            options = _with_hooks_in_python(options)
        super().__init__(train_dataset, options)
        check_callable("step", step)
        check_step_arguments(
            "armillary.StepTrainer(step, state",
            step,
            "train_dataset",
            has_data=train_dataset is not None,
        )
        if options is not None and options.accumulate_steps > 1:
            raise ValueError(
                f"`accumulate_steps` is {options.accumulate_steps}, but a pure step "
                "makes its gradients itself. To accumulate the gradients of several "
                "batches, use `optax.MultiSteps(optimizer, every_k_schedule=k)`. To "
                "accumulate over parts of one batch, use `jax.lax.scan` in the step "
                "(docs/train/gradient_accumulation.md has an example)."
            )
        if options is not None and options.remat is not None:
            raise ValueError(
                f"`remat` is {options.remat!r:.60}, but a pure step makes its "
                "gradients itself. In the step, or around each layer, write `jax"
                ".checkpoint(loss_fn, policy=jax.checkpoint_policies.dots_saveable)`."
            )
        if not has_data(state):
            raise ValueError(
                f"`state` is {state!r:.80}, which has no array, so no step could "
                "change it. Give parameters and optimizer state, as a pytree."
            )
        self._step = step
        self._loop_end = loop_end
        # A subclass that overrides `train_loop_end` gets numbers by name, in Python.
        is_overridden = type(self).train_loop_end is not StepTrainer.train_loop_end
        is_checked = options is not None and options.on_non_finite is not None
        self._metrics = make_metrics(
            metrics, is_read=is_overridden, is_checked=is_checked
        )
        # ORDER: the kinds come from the user's own state, because a copy of its arrays
        # no longer shows the variables that hold them.
        self._kinds = StateKinds(kinds, state, step)
        self.state = own_state(state)
        self._weak = find_weak(self.state)
        self.global_step = create_global_step()

    if not TYPE_CHECKING:  # as a type checker would take every attribute to exist

        def __getattribute__(self, name: str) -> Any:
            if name == "state":
                check_state_is_current("trainer.state")
            return super().__getattribute__(name)

    def _kind_of_leaf(self, leaf: Leaf) -> LeafKind:
        return self._kinds.find(leaf)

    def _place_of_leaf(self, leaf: Leaf) -> str:
        return self._kinds.place_of(leaf)

    def train_loop_begin(self) -> None:
        self._metrics.reset()

    def train_step(self, iterator: Any) -> None:
        self.strategy.run(self._run, args=take_arguments(iterator))
        self.global_step[...] += 1

    train_step.__name__ = "step"  # for messages: the user wrote `step`

    def train_loop_end(self) -> Output:
        return self._metrics.compute()

    def _run(self, *batches: Batch) -> None:
        """Runs the user's step on one replica, and keeps its state and metrics."""
        with explained_types(self._step, self.state, batches, self._weak):
            result = self._step(lend(self.state), *batches)
        new_state, metrics = take_pair(self.state, result)
        # The metrics come before the state, because a step whose metrics have no room
        # yet runs again. Without data, each step has the same weight.
        add_metrics(self._metrics, metrics, batches)
        self.state = new_state

    def _start(self, num_steps: int, num_loops: int) -> LoopsOnDevice:
        """Starts loops as `StandardTrainer` does, whose outputs get their names."""
        if self.strategy.loop_class is not None:
            raise ValueError(
                "`StepTrainer` replaces its whole state in each step, but under a "
                "`ParameterServerStrategy` workers change single variables. Use a "
                "`StandardTrainer` with Flax NNX, or another strategy."
            )
        leaves = leaves_of(self.state, is_object)
        refuse_types((leaf.path(PURE_STATE), leaf.value) for leaf in leaves)
        start = functools.partial(super()._start, num_steps, num_loops)
        started = with_room_for_metrics(start)
        if isinstance(self._metrics, ReturnedMetrics):
            started.change(functools.partial(read_totals, self._metrics.seen.spec))
        if self._loop_end is not None:
            self._add_derived(self._loop_end, started)
        return started

    def _add_derived(self, loop_end: LoopEnd, started: LoopsOnDevice) -> None:
        """Adds the numbers of `loop_end` to the output of a loop that has just run."""
        [output] = started.outputs()  # one loop, because the hooks are in Python
        try:
            with self._in_strategy():
                output = add_derived(loop_end, output, self.state)
        except Exception:
            started.check()  # A step that was not finite is the earlier error.
            raise
        # The next loop reuses the memory of the state, so the output needs copies.
        own = map_output(_copy, output)
        started.change(lambda _: own)


@with_trait(Trait.HOLDS_STATE)
class StepEvaluator(StandardEvaluator):
    """Evaluates a trainer's state with a pure step: `step(state, batch) -> metrics`.

    The output has a number for each metric that the step returns, over all examples, as
    in `StepTrainer`. Each example counts once, whatever the batch size and the number
    of replicas::

        def evaluate(state, batch):
            logits = apply(state[0], batch["image"])
            return {"accuracy": logits.argmax(-1) == batch["label"]}

        evaluator = armillary.StepEvaluator(evaluate, trainer, test_dataset)

    Args:
        step: Takes the state and a batch; returns a dictionary of metrics.
        trainer: A `StepTrainer`, or anything whose attribute `state` is the state.
        eval_dataset: As for `StandardEvaluator`. Without it, the step takes the state
            alone, and each evaluation needs a number of steps.
        metrics: As in `StepTrainer`.
        loop_end: Takes the metrics of an evaluation and the trainer's state, and
            returns numbers to add, as in `StepTrainer`. It runs in Python, once for
            each evaluation.
        options: As for any `StandardEvaluator`.

    Raises:
        TypeError: If an argument is of the wrong type; if `step` does not return a
            dictionary; or if `step` takes a batch but there is no data, or the other
            way round.
        ValueError: If `step` returns other metrics for batches of another shape, or a
            metric that lives longer than the step.
    """

    def __init__(
        self,
        step: Callable[..., Mapping[str, Any]],
        trainer: Any,
        eval_dataset: PyTree = None,
        *,
        metrics: Any = None,
        loop_end: LoopEnd | None = None,
        options: StandardEvaluatorOptions | None = None,
    ) -> None:
        super().__init__(eval_dataset, options)
        check_callable("step", step)
        check_step_arguments(
            "armillary.StepEvaluator(step, trainer",
            step,
            "eval_dataset",
            has_data=eval_dataset is not None,
        )
        check_methods("trainer", trainer, ["state"], "Give the `StepTrainer`.")
        self.strategy = getattr(trainer, "strategy", None) or get_strategy()
        if loop_end is not None:
            check_takes("loop_end", loop_end, "metrics", "state")
        self._step = step
        self._trainer = trainer
        self._loop_end = loop_end
        self._metrics = make_metrics(metrics, is_read=True)

    def eval_begin(self) -> None:
        self._metrics.reset()

    def eval_step(self, iterator: Any) -> None:
        self.strategy.run(self._run, args=take_arguments(iterator))

    eval_step.__name__ = "step"

    def eval_end(self, *state: Any) -> Output:
        del state
        output = self._metrics.compute()
        if self._loop_end is None:
            return output
        return add_derived(self._loop_end, output, self._trainer.state)

    def _evaluate(self, num_steps: int) -> Output:
        return with_room_for_metrics(functools.partial(super()._evaluate, num_steps))

    def _run(self, *batches: Batch) -> None:
        result = self._step(lend(self._trainer.state), *batches)
        add_metrics(self._metrics, result, batches)


def _with_hooks_in_python(
    options: StandardTrainerOptions | None,
) -> StandardTrainerOptions:
    """Returns options with which each loop ends in Python, where `loop_end` runs."""
    if options is None:
        return StandardTrainerOptions(compile_hooks=False)
    fix = "Write `options=armillary.StandardTrainerOptions(...)`."
    check_instance("options", options, StandardTrainerOptions, fix)
    if options.compile_hooks:
        raise ValueError(
            "`compile_hooks` of `options` is True, but `loop_end` runs in Python after "
            "each loop. Leave `compile_hooks` out."
        )
    return dataclasses.replace(options, compile_hooks=False)


def _copy(leaf: Any) -> Any:
    return as_whole(leaf.copy()) if isinstance(leaf, jax.Array) else leaf
