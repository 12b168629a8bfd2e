"""Trainer and evaluator around pure functions of any pytree and a batch."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import check_callable, check_instance, check_methods
from armillary.data.sources._stale import check_state_is_current
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._context import get_strategy
from armillary.distribute.replica._policy import create_global_step
from armillary.errors import StateStructureError
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.state._slots import describe, is_array, is_equal, join_keys
from armillary.trainer._hooks import without_python
from armillary.trainer._no_data import check_step_arguments, take_batches
from armillary.trainer._runner import StandardEvaluatorOptions, StandardTrainerOptions
from armillary.trainer._standard_evaluator import StandardEvaluator
from armillary.trainer._standard_trainer import StandardTrainer, StartedLoops
from armillary.typing import Batch, Output, PyTree

_MOST_METRICS = 64


class StepTrainer(StandardTrainer):
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
        ValueError: If `state` has no array, or there are more than 64 means.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Any, Mapping[str, Any] | None]],
        state: Any,
        train_dataset: PyTree = None,
        *,
        strategy: Strategy | None = None,
        metrics: Any = None,
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
        if not any(map(_is_data, jax.tree.leaves(state))):
            raise ValueError(
                f"`state` is {state!r:.80}, which has no array, so that no step could "
                "change it. Give parameters and optimizer state, as a pytree."
            )
        self._step, self._metrics = step, make_metrics(metrics)
        self.state = jax.tree.map(_own, state)
        self.global_step = create_global_step()

    if not TYPE_CHECKING:  # as a type checker would take every attribute to exist

        def __getattribute__(self, name: str) -> Any:
            if name == "state":
                check_state_is_current("trainer.state")
            return super().__getattribute__(name)

    def train_loop_begin(self) -> None:
        self._metrics.reset()

    def train_step(self, iterator: Any) -> None:
        self.strategy.run(self._run, args=take_batches(iterator))
        self.global_step[...] += 1

    train_step.__name__ = "step"  # for messages: the user wrote `step`

    def train_loop_end(self) -> Output:
        return self._metrics.compute()

    def _run(self, *batches: Batch) -> None:
        result = self._step(self.state, *batches)
        is_tuple = isinstance(result, tuple)
        if not is_tuple or len(result) != 2:
            shown = f"{len(result)} values" if is_tuple else describe(result)
            raise TypeError(
                f"`step` returned {shown}, but it must return a pair: the state after "
                "the step, and its metrics. Write `return state, metrics`, with `{}` "
                "if there are none."
            )
        check_state(self.state, result[0])
        self.state = result[0]
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
        result = self._step(self._trainer.state, *batches)
        add_metrics(self._metrics, result, batches)


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


def _is_data(leaf: Any) -> bool:
    # As in `jax.jit`, an integer is an array; a flag or a rate of Equinox is none.
    is_host = isinstance(leaf, np.ndarray | np.generic) or type(leaf) is int
    return is_host or is_array(leaf)


def _own(leaf: Any) -> Any:
    try:
        return jnp.array(leaf) if _is_data(leaf) else leaf
    except (OverflowError, TypeError) as error:
        raise TypeError(
            f"`state` has the leaf {leaf!r:.80}, of which JAX makes no array: {error}"
        ) from error


def check_state(before: PyTree, after: PyTree) -> None:
    """Raises, with the place, if a step returns another kind of state than it took."""
    for problem in _find_changes(before, after):
        raise StateStructureError(
            f"`step` must return a state like the one that it takes, but {problem}. "
            "Return all of it, in the same order, with the same shapes and dtypes, and "
            "the metrics after it: `return state, metrics`."
        )


def _find_changes(before: PyTree, after: PyTree) -> Iterator[str]:
    flatten = jax.tree_util.tree_flatten_with_path
    old, new = (
        {join_keys("state", keys): leaf for keys, leaf in flatten(tree)[0]}
        for tree in (before, after)
    )
    for place in dict.fromkeys([*old, *new]):
        if place not in new:
            yield f"`{place}` is gone"
        elif place not in old:
            yield f"`{place}` is new"
        elif not is_array(old[place]):
            if not is_equal(old[place], new[place]):
                yield (
                    f"`{place}`, which is no array but {old[place]!r:.40}, became "
                    f"{describe(new[place])}: begin with `jnp.asarray(...)`"
                )
        elif (now := describe(new[place])) != (was := describe(old[place])):
            yield f"`{place}` was {was} and became {now}"
    if jax.tree.structure(before) != jax.tree.structure(after):
        yield "its structure changed: a node has another type, or other static fields"
