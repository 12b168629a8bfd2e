"""Trainer and evaluator around pure functions of any pytree and a batch."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import check_callable, check_instance, check_methods
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
from armillary.trainer._hooks import without_python
from armillary.trainer._runner import StandardEvaluatorOptions, StandardTrainerOptions
from armillary.trainer._standard_evaluator import StandardEvaluator
from armillary.trainer._standard_trainer import StandardTrainer, StartedLoops
from armillary.typing import Batch, Output, PyTree

_MOST_METRICS = 64


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
        train_dataset: As for `StandardTrainer`.
        strategy: Whose replicas run the step; by default the one in effect.
        metrics: What reduces the metrics, such as an `nnx.MultiMetric`.
        kinds: Kinds of leaves that may differ between replicas during a step. A key
            is a regular expression, searched for in the path of a leaf
            (`state/batch_stats/norm/mean`), or the type of a node that holds the leaf.
            A value is `"mean"`, `"sum"`, `"only_first_replica"` or `"none"`, as the
            `aggregation` of a variable (see `VariableAggregation`). The first key that
            finds a leaf counts. By default the library of a leaf decides: Linen's
            `batch_stats`, the state of an Equinox module and the statistics of a Keras
            model are averaged, and the variables of an `nnx.State` keep their kind. Any
            other leaf must be equal on all replicas.
        options: As for any `StandardTrainer`.

    `Checkpoint(trainer=trainer)` saves the state, the number of steps and the position
    in the data, if that has one.

    Attributes:
        state: The state after the last step. The next loop reuses its memory: copy an
            array that you keep (`array.copy()`).
        global_step: How many steps were run, a variable of shape `()`.

    Raises:
        TypeError: If an argument is of the wrong type, or `step` returns no such pair.
        StateStructureError: If `step` returns another kind of state than it took.
        ValueError: If `state` has no array, there are more than 64 means, or `kinds`
            has a kind that does not exist or a key that finds no leaf.
    """

    def __init__(
        self,
        step: Callable[[Any, Batch], tuple[Any, Mapping[str, Any] | None]],
        state: Any,
        train_dataset: PyTree,
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

    def _kind_of_leaf(self, leaf: Leaf) -> LeafKind:
        return self._kinds.find(leaf)

    def _place_of_leaf(self, leaf: Leaf) -> str:
        return self._kinds.place_of(leaf)

    def train_loop_begin(self) -> None:
        self._metrics.reset()

    def train_step(self, iterator: Any) -> None:
        self.strategy.run(self._run, args=(jax.tree.map(next, iterator),))
        self.global_step[...] += 1

    train_step.__name__ = "step"  # for messages: the user wrote `step`

    def train_loop_end(self) -> Output:
        return self._metrics.compute()

    def _run(self, batch: Batch) -> None:
        with explained_types(self._step, self.state, (batch,), self._weak):
            result = self._step(lend(self.state), batch)
        is_tuple = isinstance(result, tuple)
        if not is_tuple or len(result) != 2:
            shown = f"{len(result)} values" if is_tuple else describe(result)
            raise TypeError(
                f"`step` returned {shown}, but it must return a pair: the state after "
                "the step, and its metrics. Write `return state, metrics`, with `{}` "
                "if there are none."
            )
        self.state = take_back(self.state, result[0])
        add_metrics(self._metrics, result[1], batch)

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
        eval_dataset: As for `StandardEvaluator`.
        metrics: As in `StepTrainer`.
        options: As for any `StandardEvaluator`.

    Raises:
        TypeError: If an argument is of the wrong type, or `step` returns no dictionary.
    """

    def __init__(
        self,
        step: Callable[[Any, Batch], Mapping[str, Any]],
        trainer: Any,
        eval_dataset: PyTree,
        *,
        metrics: Any = None,
        options: StandardEvaluatorOptions | None = None,
    ) -> None:
        super().__init__(eval_dataset, options)
        check_callable("step", step)
        check_methods("trainer", trainer, ["state"], "Give the `StepTrainer`.")
        self.strategy = getattr(trainer, "strategy", None) or get_strategy()
        self._step, self._trainer = step, trainer
        self._metrics = make_metrics(metrics)

    def eval_begin(self) -> None:
        self._metrics.reset()

    def eval_step(self, iterator: Any) -> None:
        self.strategy.run(self._run, args=(jax.tree.map(next, iterator),))

    eval_step.__name__ = "step"

    def eval_end(self, *state: Any) -> Output:
        del state
        output = self._metrics.compute()
        if isinstance(self._metrics, Means):
            return name_means(self._metrics.seen.structure, output)
        return output

    def _run(self, batch: Batch) -> None:
        result = self._step(lend(self._trainer.state), batch)
        add_metrics(self._metrics, result, batch)


class Seen:
    """What a trace has found; a step that changed plain values would be traced anew."""

    structure: Any = None


@without_python
class Means:
    """Means by number: which ones there are is known only when the step is traced."""

    def __init__(self) -> None:
        from flax import nnx

        zeros = np.zeros(_MOST_METRICS, np.float32)
        self.total = nnx.metrics.MetricState(jnp.array(zeros))
        self.weight = nnx.metrics.MetricState(jnp.array(zeros))
        self.seen = Seen()

    def reset(self) -> None:
        for each in (self.total, self.weight):
            each[...] = jnp.zeros_like(each[...])

    def add(self, metrics: Mapping[str, Any], batch: Batch) -> None:
        leaves, self.seen.structure = jax.tree.flatten(metrics)
        if len(leaves) > _MOST_METRICS:
            raise ValueError(
                f"`step` returned {len(leaves)} metrics, but at most {_MOST_METRICS} "
                "can be means. Return fewer, or one array: its values are averaged."
            )
        if not leaves:
            return
        sizes = [leaf.shape[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
        values = [jnp.asarray(leaf) for leaf in leaves]
        weights = [each.size if each.ndim else (sizes or [1])[0] for each in values]
        means = [jnp.mean(each, dtype=jnp.float32) for each in values]
        weight, rest = jnp.asarray(weights, jnp.float32), _MOST_METRICS - len(values)
        total = jnp.where(weight > 0, jnp.stack(means) * weight, 0)
        self.total[...] = self.total[...] + jnp.pad(total, (0, rest))
        self.weight[...] = self.weight[...] + jnp.pad(weight, (0, rest))

    def compute(self) -> Any:
        return {"total": self.total[...], "weight": self.weight[...]}


def name_means(structure: Any, output: Any) -> Output:
    """Returns the means by name, from what `Means.compute` returned."""
    if output is None or structure is None:
        return None
    with np.errstate(invalid="ignore"):  # Of no values, the mean is NaN.
        means = np.asarray(output["total"]) / np.asarray(output["weight"])
    return jax.tree.unflatten(structure, means[: structure.num_leaves])


def make_metrics(metrics: Any) -> Any:
    if metrics is not None:
        fix = "Use `armillary`'s or `nnx` metrics, in an `nnx.MultiMetric`."
        check_methods("metrics", metrics, ["reset", "update", "compute"], fix)
    return Means() if metrics is None else metrics


def add_metrics(to: Any, metrics: Any, batch: Batch) -> None:
    if not isinstance(metrics, Mapping | None):
        raise TypeError(
            f"`step` returned {describe(metrics)} as its metrics, but they must be a "
            'dictionary. Write, for example, `{"loss": loss}`.'
        )
    if isinstance(to, Means):
        to.add(metrics or {}, batch)
    else:
        to.update(**(metrics or {}))
