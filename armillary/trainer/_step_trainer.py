"""Trainer and evaluator around pure functions of any pytree and a batch."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from armillary._checks import check_callable, check_instance, check_methods
from armillary.data.sources._stale import check_state_is_current
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
    take_back,
)
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.state._slots import LeafKind, describe
from armillary.state._tree import Leaf, PureStateOwner
from armillary.state._weak_types import explained_types, find_weak
from armillary.trainer._means import Means, add_metrics, make_metrics, name_means
from armillary.trainer._no_data import check_step_arguments, take_batches
from armillary.trainer._runner import StandardEvaluatorOptions, StandardTrainerOptions
from armillary.trainer._standard_evaluator import StandardEvaluator
from armillary.trainer._standard_trainer import StandardTrainer, StartedLoops
from armillary.typing import Batch, Output, PyTree


class StepTrainer(StandardTrainer, PureStateOwner):
    """Trains with a pure step: `step(state, batch) -> (state, metrics)`.

    The state is any pytree: parameters and Optax state in a tuple or a dictionary, an
    Equinox module, a `TrainState` of Flax Linen. It is compiled, fused, donated,
    distributed, saved and resumed as that of every `StandardTrainer`::

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

    The step runs once per replica, as what `strategy.run` is given, on the replica's
    share of the batch. A loop's output is the mean of each metric over its steps and
    replicas: over all values of an array, while a number counts as the mean over its
    batch. With `metrics`, these take what the step returns, by name, and are computed.

    Args:
        step: Takes the state and a batch; returns the state after the step, of the same
            structure, shapes and dtypes, and a dictionary of metrics, perhaps nested,
            or `None`.
        state: The state to begin with. Its arrays are copied, NumPy's as well, and
            integers become arrays. Other leaves, such as functions, are constants.
        train_dataset: As for `StandardTrainer`. Without it, the step makes its own
            data and takes the state alone: `step(state)`.
        strategy: Whose replicas run the step; by default the one in effect.
        metrics: What reduces the metrics, such as an `nnx.MultiMetric`.
        kinds: What becomes of leaves that differ between replicas: a mapping from a
            regular expression, searched for in the path of a leaf
            (`state/batch_stats/norm/mean`), or from the type of a node that holds it,
            to `"mean"`, `"sum"`, `"only_first_replica"` or `"none"`. The values are
            the `aggregation` of a variable, see `VariableAggregation`, and the first
            entry that finds a leaf counts. By default the library of a leaf decides:
            Linen's `batch_stats`, the state of an Equinox module and the statistics
            of a Keras model are averaged, the variables of an `nnx.State` keep their
            kind, and any other leaf must be equal on all replicas.
        options: As for any `StandardTrainer`.

    `Checkpoint(trainer=trainer)` saves the state, the number of steps and the position
    in the data, if that has one.

    Attributes:
        state: The state after the last step. The next loop reuses its memory: copy an
            array that you keep (`array.copy()`).
        global_step: How many steps were run, a variable of shape `()`.

    Raises:
        TypeError: If an argument is of the wrong type, or `step` returns no such pair,
            or takes a batch and there is no data, or takes none and there is.
        StateStructureError: If `step` returns another kind of state than it took.
        ValueError: If `state` has no array, there are more than 64 means, or `kinds`
            has a kind that does not exist, or a pattern or type without a leaf.
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
        options: StandardTrainerOptions | None = None,
    ) -> None:
        fix = "Use a strategy such as `armillary.MirroredStrategy()`."
        check_instance("strategy", strategy, Strategy | None, fix)
        self.strategy = get_strategy() if strategy is None else strategy
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
                "makes its gradients itself. Add those of smaller batches up by "
                "`optax.MultiSteps(optimizer, every_k_schedule=k)`, or those of parts "
                "of a batch by `jax.lax.scan` in the step."
            )
        if not has_data(state):
            raise ValueError(
                f"`state` is {state!r:.80}, which has no array, so that no step could "
                "change it. Give parameters and optimizer state, as a pytree."
            )
        self._step, self._metrics = step, make_metrics(metrics)
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
        self.strategy.run(self._run, args=take_batches(iterator))
        self.global_step[...] += 1

    train_step.__name__ = "step"  # for messages: the user wrote `step`

    def train_loop_end(self) -> Output:
        return self._metrics.compute()

    def _run(self, *batches: Batch) -> None:
        with explained_types(self._step, self.state, batches, self._weak):
            result = self._step(lend(self.state), *batches)
        is_tuple = isinstance(result, tuple)
        if not is_tuple or len(result) != 2:
            shown = f"{len(result)} values" if is_tuple else describe(result)
            raise TypeError(
                f"`step` returned {shown}, but it must return a pair: the state after "
                "the step, and its metrics. Write `return state, metrics`, with `{}` "
                "if there are none."
            )
        self.state = take_back(self.state, result[0])
        # Without data, each step has the same weight.
        add_metrics(self._metrics, result[1], batches)

    def _start(self, num_steps: int, num_loops: int) -> StartedLoops:
        if isinstance(self.strategy, ParameterServerStrategy):
            raise ValueError(
                "`StepTrainer` replaces its whole state in each step, but under a "
                "`ParameterServerStrategy` workers change single variables. Use a "
                "`StandardTrainer` with Flax NNX, or another strategy."
            )
        started = super()._start(num_steps, num_loops)
        if isinstance(self._metrics, Means):
            started.change(functools.partial(name_means, self._metrics.seen.structure))
        return started


class StepEvaluator(StandardEvaluator):
    """Evaluates a trainer's state with a pure step: `step(state, batch) -> metrics`.

    The output is the mean of each metric over all examples: those of an array, while a
    number counts as the mean over its batch. Each example counts once, whatever the
    batch size and the number of replicas::

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
        options: As for any `StandardEvaluator`.

    Raises:
        TypeError: If an argument is of the wrong type, or `step` returns no dictionary,
            or takes a batch and there is no data, or takes none and there is.
    """

    def __init__(
        self,
        step: Callable[..., Mapping[str, Any]],
        trainer: Any,
        eval_dataset: PyTree = None,
        *,
        metrics: Any = None,
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
        self._step, self._trainer = step, trainer
        self._metrics = make_metrics(metrics)

    def eval_begin(self) -> None:
        self._metrics.reset()

    def eval_step(self, iterator: Any) -> None:
        self.strategy.run(self._run, args=take_batches(iterator))

    eval_step.__name__ = "step"

    def eval_end(self, *state: Any) -> Output:
        del state
        output = self._metrics.compute()
        if isinstance(self._metrics, Means):
            return name_means(self._metrics.seen.structure, output)
        return output

    def _run(self, *batches: Batch) -> None:
        result = self._step(lend(self._trainer.state), *batches)
        add_metrics(self._metrics, result, batches)
