"""Calls of input functions, and the trainer, evaluator and predictor of a model."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from armillary._logging import ensure_visible, logger
from armillary._traceback import hides_frames
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext, InputOptions
from armillary.data.feed._position import (
    Position,
    decode_position,
    encode_position,
)
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._context import get_replica_context
from armillary.distribute.replica._reductions import all_reduce
from armillary.distribute.strategies._single import DefaultStrategy
from armillary.errors import EstimatorError, NonFiniteError
from armillary.estimator._model_fn import ModeKeys, Model, call_with
from armillary.metrics._sums import Mean, Pending
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.state._slots import Trait, with_trait
from armillary.trainer._options import StandardTrainerOptions
from armillary.trainer._prediction import predict as predict_batches
from armillary.trainer._standard_evaluator import StandardEvaluator
from armillary.trainer._standard_trainer import LoopsOnDevice, StandardTrainer
from armillary.typing import Output, PyTree

_BATCHES = (
    "Return `armillary.data.from_arrays((features, labels), batch_size=...)`, or "
    "anything else that gives batches `(features, labels)`."
)


def make_input(
    input_fn: Callable[..., Any], values: dict[str, Any], input_context: InputContext
) -> Any:
    """Calls an input function, and returns a dataset that can begin again."""
    values = {**values, "input_context": input_context}
    made = call_with(input_fn, values)
    if made is None or isinstance(made, tuple | dict):
        raise EstimatorError(
            f"`input_fn` returned {made!r:.80} of type {type(made).__name__}, but it "
            f"must return a dataset that gives batches. {_BATCHES} To use one batch "
            "many times, return, for example, `[(features, labels)] * 100`."
        )
    if isinstance(made, list):
        return list(map(_as_arrays, made))
    if inspect.isgenerator(made):
        # A generator function can begin again; the generator it made cannot.
        return lambda: map(_as_arrays, call_with(input_fn, values))
    return made


def _as_arrays(batch: Any) -> Any:
    """Returns a batch whose lists of numbers are arrays, as in TensorFlow."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return tuple(map(_as_array, batch))
    if isinstance(batch, list):
        return list(map(_as_array, batch))
    return _as_array(batch)


def _as_array(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _as_array(value) for name, value in part.items()}
    if not isinstance(part, list):
        return part
    leaves = jax.tree.leaves(part)
    are_numbers = all(isinstance(leaf, int | float) for leaf in leaves)
    return np.asarray(part) if are_numbers else part


def distribute(
    make_data: Callable[[InputContext], Any], strategy: Strategy, *, is_training: bool
) -> tuple[DistributedDataset, tuple[PyTree, PyTree]]:
    """Returns data, and the types of the features and labels of one replica's batch."""
    # A training step needs a batch for each replica, and no rows of other processes.
    remainder = "exact" if strategy.layout.peers.is_alone else "drop"
    options = InputOptions(remainder=remainder if is_training else None)
    dataset = strategy.distribute_datasets_from_function(make_data, options)
    spec = dataset.element_spec
    count = dataset.layout.num_replicas
    if type(spec) not in (tuple, list) or len(spec) != 2:
        raise EstimatorError(
            f"The batches of `input_fn` are of type {type(spec).__name__}, but they "
            f"must be pairs. {_BATCHES}"
        )

    def divide(leaf: Any) -> Any:
        shape = leaf.shape[0] // count, *leaf.shape[1:]
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return dataset, jax.tree.map(divide, tuple(spec))


class InputPosition:
    """The data position of a training; unless it `resumes`, the data begins again."""

    def __init__(
        self, dataset: DistributedDataset | None = None, *, resumes: bool = False
    ) -> None:
        # The controller looks for this attribute, to find out that the position is
        # saved.
        self.dataset = dataset
        self._resumes = resumes

    def get_state(self) -> dict[str, Any]:
        """Returns the position, which is `None` if the data has no positions."""
        dataset = self.dataset
        if dataset is None or not dataset.is_repositionable:
            return {"position": None}
        return {"position": dataset.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position; if this data lacks it, the manager begins again."""
        dataset = self.dataset
        position = state["position"]
        if not self._resumes or dataset is None:
            return
        if position is not None:
            dataset.check_repositionable()
            dataset.set_state(_begin_next_pass(dataset, position))


def _begin_next_pass(dataset: DistributedDataset, state: dict[str, Any]) -> Any:
    """Returns a position, or, if no batch follows it, the start of the next pass."""
    if not dataset.layout.peers.is_alone:
        return state  # Another process may have batches left.
    name = dataset.source_name
    position = decode_position(state, name)
    if next(dataset.input.read(position), None) is not None:
        return state
    return encode_position(Position(epoch=position.epoch + 1), name)


@hides_frames
def predict(
    model: Model,
    make_data: Callable[[InputContext], Any],
    find_checkpoint: Callable[[], str | None],
    predict_keys: Sequence[str] | None,
    yield_single_examples: bool,
) -> Iterator[PyTree]:
    """Yields the predictions of a checkpoint; reads only its modules."""
    strategy = DefaultStrategy()
    dataset = strategy.distribute_dataset(make_data(InputContext()))
    model.build(_features_of(dataset.element_spec), None, ModeKeys.PREDICT)
    ensure_visible()
    path = find_checkpoint()
    if path is None:
        logger.info("found no checkpoint; predicting as it is.")
    else:
        Checkpoint(model=model.modules).read(path)

    fn = functools.partial(_predict_batch, model, predict_keys, model.modules)
    named = functools.update_wrapper(fn, model.fn)
    for predictions in predict_batches(named, dataset, strategy=strategy):
        if not yield_single_examples:
            yield predictions
            continue
        leaves, treedef = jax.tree.flatten(predictions)
        yield from map(treedef.unflatten, zip(*leaves, strict=True))


def _predict_batch(
    model: Model,
    predict_keys: Sequence[str] | None,
    modules: Any,
    batch: Any,
) -> PyTree:
    features = _features_of(batch)
    predictions = model.call(modules, features, None, ModeKeys.PREDICT).predictions
    if predict_keys is None:
        return predictions
    found = predictions if isinstance(predictions, Mapping) else {}
    missing = [key for key in predict_keys if key not in found]
    if missing:
        raise EstimatorError(
            f"`predict_keys` is {list(predict_keys)!r:.80}, but the predictions of "
            f"`model_fn` have no {missing[0]!r}. Use some of "
            f"{sorted(map(str, found)) or 'a dictionary of predictions'}."
        )
    return {key: found[key] for key in predict_keys}


def _features_of(batch: Any) -> Any:
    return batch[0] if type(batch) in (tuple, list) else batch


@with_trait(Trait.HOLDS_STATE)
class EstimatorTrainer(StandardTrainer):
    """Trains the modules of a model function; reports the mean loss of each loop."""

    def __init__(
        self, dataset: DistributedDataset, strategy: Strategy, model: Model
    ) -> None:
        # TensorFlow's estimators also end when a loss is not a number. Workers of
        # parameter servers run single steps, so their loss is only checked per loop.
        self._is_watched = not isinstance(strategy, ParameterServerStrategy)
        on_non_finite = "raise" if self._is_watched else None
        super().__init__(dataset, StandardTrainerOptions(on_non_finite=on_non_finite))
        self.strategy = strategy
        self._model = model
        self.modules = model.modules
        self.optimizer = model.optimizer
        self.loss = Mean()

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator: Any) -> None:
        # The search for state follows a method to its object, but does not look into
        # functions of this library.
        self.strategy.run(self._update, args=(next(iterator),))

    def _update(self, batch: Any) -> None:
        loss, gradients = nnx.value_and_grad(self._loss)(self.modules, *batch)
        assert self.optimizer is not None  # The model was built for training.
        self.optimizer.update(self.modules, all_reduce("mean", gradients))
        self.loss.update(values=loss)

    def _loss(self, modules: Any, features: Any, labels: Any) -> Any:
        """Returns the loss of a model function, or raises if it is a part of a sum."""
        context = get_replica_context()
        assert context is not None  # This is a step.
        context.was_asked = False
        spec = self._model.call(modules, features, labels, ModeKeys.TRAIN)
        if context.was_asked:
            raise EstimatorError(
                "`model_fn` uses the number of replicas, as `compute_average_loss` "
                "does, but its loss is the mean over one replica's batch. Write "
                "`loss=losses.mean()`, which is then averaged over replicas."
            )
        return spec.loss

    def train_loop_end(self) -> Output:
        if self._is_watched:
            return {"loss": self.loss.pend()}
        loss = self.loss.compute()
        if not np.isfinite(loss):
            raise NonFiniteError(
                f"The loss of a loop is {loss}, so the variables on the "
                "parameter servers are not numbers any more. Training ends, and the "
                "last checkpoint has finite values: use a smaller learning rate, or "
                "look for wrong data."
            )
        return {"loss": loss}

    def _start(self, num_steps: int, num_loops: int) -> LoopsOnDevice:
        started = super()._start(num_steps, num_loops)
        started.change(_read_loss)
        return started


def _read_loss(output: Output) -> Output:
    """Returns the output of a loop with its loss as a number; waits for the device."""
    if output is None or not isinstance(output["loss"], Pending):
        return output
    return {**output, "loss": output["loss"].read()}


@with_trait(Trait.HOLDS_STATE)
class EstimatorEvaluator(StandardEvaluator):
    """Evaluates a model function; the loss is the mean over batches."""

    def __init__(
        self,
        dataset: DistributedDataset,
        strategy: Strategy,
        model: Model,
        ops: Any,
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self._model = model
        self.modules = model.modules
        metrics = {name: _make_metric(name, op) for name, op in ops.items()}
        self.metrics = {"loss": Mean(), **metrics}

    def eval_begin(self) -> None:
        for metric in self.metrics.values():
            metric.reset()

    def eval_step(self, iterator: Any) -> None:
        self.strategy.run(self._add, args=(next(iterator),))

    def _add(self, batch: Any) -> None:
        features, labels = batch
        spec = self._model.call(self.modules, features, labels, ModeKeys.EVAL)
        self.metrics["loss"].update(values=spec.loss)
        for name, op in spec.eval_metric_ops.items():
            arguments = op[1] if isinstance(op, tuple) else {"values": op}
            self.metrics[name].update(**arguments)

    def eval_end(self, *state: Any) -> Output:
        del state
        return {name: metric.compute() for name, metric in self.metrics.items()}


def _make_metric(name: str, op: Any) -> Any:
    if name == "loss":
        raise EstimatorError(
            '`eval_metric_ops` has the entry "loss", but an evaluation always reports '
            'the mean over batches by this name. Call the entry "average_loss".'
        )
    if isinstance(op, tuple):
        metric_fn, _ = op
        return metric_fn()
    if jnp.ndim(op) == 0:
        raise EstimatorError(
            f"`eval_metric_ops[{name!r}]` is a scalar, and cannot be averaged over "
            "examples. Give an array with an entry for each example, or a pair "
            "`(metric_fn, arguments)`."
        )
    return Mean()
