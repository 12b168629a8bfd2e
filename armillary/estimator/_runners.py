"""Input functions, and a model function as training, evaluation and predictions."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from armillary._logging import ensure_visible, logger
from armillary._traceback import hides_frames
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext, InputOptions
from armillary.data.feed._stream import Position, decode_position, encode_position
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._context import get_replica_context
from armillary.distribute.replica._reductions import all_reduce
from armillary.distribute.strategies._single import DefaultStrategy
from armillary.errors import EstimatorError
from armillary.estimator._model_fn import ModeKeys, Model, call_with
from armillary.trainer._runner import StandardTrainerOptions
from armillary.trainer._standard_evaluator import StandardEvaluator
from armillary.trainer._standard_evaluator import predict as predict_batches
from armillary.trainer._standard_trainer import StandardTrainer
from armillary.typing import Output, PyTree

_BATCHES = (
    "Return `armillary.data.from_arrays((features, labels), batch_size=...)`, or "
    "anything else that gives batches `(features, labels)`."
)


def make_input(
    input_fn: Callable[..., Any], values: dict[str, Any], input_context: InputContext
) -> Any:
    values = {**values, "input_context": input_context}
    made = call_with(input_fn, values)
    if made is None or isinstance(made, tuple | dict):
        raise EstimatorError(
            f"`input_fn` returned {made!r:.80} of type {type(made).__name__}, but it "
            f"must return a data set that gives batches. {_BATCHES}"
        )
    # A generator function can begin again; the generator it made cannot.
    is_generator = inspect.isgenerator(made)
    return functools.partial(call_with, input_fn, values) if is_generator else made


def distribute(
    make_data: Callable[[InputContext], Any], strategy: Strategy, *, is_training: bool
) -> tuple[DistributedDataset, tuple[PyTree, PyTree]]:
    """Returns data, and what features and labels of one replica's batch look like."""
    # A step of training needs a batch for each replica, and no rows of other processes.
    remainder = "exact" if strategy.peers is None else "drop"
    options = InputOptions(remainder=remainder if is_training else None)
    dataset = strategy.distribute_datasets_from_function(make_data, options)
    spec, count = dataset.element_spec, dataset.layout.num_replicas
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
    """Where in its data a training is; unless it `resumes`, the data begin anew."""

    def __init__(
        self, dataset: DistributedDataset | None = None, *, resumes: bool = False
    ) -> None:
        self._dataset, self._resumes = dataset, resumes

    def get_state(self) -> dict[str, Any]:
        """Returns the position; none, if the data has no positions."""
        dataset = self._dataset
        if dataset is None or not dataset.is_repositionable:
            return {"position": None}
        return {"position": dataset.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position; the manager begins anew if that is none of this data."""
        dataset, position = self._dataset, state["position"]
        if self._resumes and dataset is not None and position is not None:
            dataset.check_repositionable()
            dataset.set_state(_begin_next_pass(dataset, position))


def _begin_next_pass(dataset: DistributedDataset, state: dict[str, Any]) -> Any:
    """Returns a position, or, if no batch follows it, the start of the next pass."""
    if dataset.layout.peers is not None:
        return state  # Another process may have batches left.
    name = dataset.source_name
    position = decode_position(state, name)
    if next(dataset.read(position), None) is not None:
        return state
    return encode_position(Position(epoch=position.epoch + 1), name)


@hides_frames
def predict(
    model: Model,
    make_data: Callable[[InputContext], Any],
    find_checkpoint: Callable[[], str | None],
) -> Iterator[PyTree]:
    """Yields the predictions of a checkpoint, of which it reads the modules alone."""
    strategy = DefaultStrategy()
    dataset = strategy.distribute_dataset(make_data(InputContext()))
    model.build(_features_of(dataset.element_spec), None, ModeKeys.PREDICT)
    ensure_visible()
    path = find_checkpoint()
    if path is None:
        logger.info("found no checkpoint; predicting as it is.")
    else:
        Checkpoint(model=model.modules).read(path)

    def model_fn(modules: Any, batch: Any) -> PyTree:
        features = _features_of(batch)
        return model.call(modules, features, None, ModeKeys.PREDICT).predictions

    fn = functools.update_wrapper(functools.partial(model_fn, model.modules), model_fn)
    for predictions in predict_batches(fn, dataset, strategy=strategy):
        leaves, treedef = jax.tree.flatten(predictions)
        yield from map(treedef.unflatten, zip(*leaves, strict=True))


def _features_of(batch: Any) -> Any:
    return batch[0] if type(batch) in (tuple, list) else batch


class EstimatorTrainer(StandardTrainer):
    """Trains the modules of a model function; reports the mean loss of each loop."""

    def __init__(
        self, dataset: DistributedDataset, strategy: Strategy, model: Model
    ) -> None:
        # As TensorFlow's estimators, which end when a loss is not a number.
        super().__init__(dataset, StandardTrainerOptions(on_non_finite="raise"))
        self.strategy, self._model = strategy, model
        self.modules, self.optimizer = model.modules, model.optimizer
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            loss, gradients = nnx.value_and_grad(self._loss)(self.modules, *batch)
            assert self.optimizer is not None  # The model was built for training.
            self.optimizer.update(self.modules, all_reduce("mean", gradients))
            self.loss.update(loss=loss)

        self.strategy.run(step_fn, args=(next(iterator),))

    def _loss(self, modules: Any, features: Any, labels: Any) -> Any:
        """Returns the loss of a model function, which is no part of a sum."""
        context = get_replica_context()
        assert context is not None  # This is a step.
        context.was_asked = False
        spec = self._model.call(modules, features, labels, ModeKeys.TRAIN)
        if context.was_asked:
            raise EstimatorError(
                "`model_fn` uses the number of replicas, as `compute_average_loss` "
                "does, but its loss is the mean over one replica's batch. Write "
                "`loss=losses.mean()`: the mean over replicas is taken of that."
            )
        return spec.loss

    def train_loop_end(self) -> Output:
        return {"loss": self.loss.compute()}


class EstimatorEvaluator(StandardEvaluator):
    """Evaluates a model function; the loss is the mean over batches."""

    def __init__(
        self, dataset: DistributedDataset, strategy: Strategy, model: Model, ops: Any
    ) -> None:
        super().__init__(dataset)
        self.strategy, self._model, self.modules = strategy, model, model.modules
        metrics = {name: _make_metric(name, op) for name, op in ops.items()}
        self.metrics = {"loss": nnx.metrics.Average(), **metrics}

    def eval_begin(self) -> None:
        for metric in self.metrics.values():
            metric.reset()

    def eval_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            features, labels = batch
            spec = self._model.call(self.modules, features, labels, ModeKeys.EVAL)
            self.metrics["loss"].update(values=spec.loss)
            for name, op in spec.eval_metric_ops.items():
                arguments = op[1] if isinstance(op, tuple) else {"values": op}
                self.metrics[name].update(**arguments)

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self, *state: Any) -> Output:
        del state
        return {name: metric.compute() for name, metric in self.metrics.items()}


def _make_metric(name: str, op: Any) -> Any:
    if name == "loss":
        raise EstimatorError(
            '`eval_metric_ops` has the entry "loss", which an evaluation reports in '
            'any case, as the mean over batches. Call it "average_loss".'
        )
    if isinstance(op, tuple):
        metric_fn, _ = op
        return metric_fn()
    if jnp.ndim(op) == 0:
        raise EstimatorError(
            f"`eval_metric_ops[{name!r}]` is a scalar, of which no mean over examples "
            "can be taken. Give an array with an entry for each example, or a pair "
            "`(metric_fn, arguments)`."
        )
    return nnx.metrics.Average()
