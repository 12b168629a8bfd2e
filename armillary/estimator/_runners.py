"""Input functions, and a model function as training, evaluation and predictions."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from armillary._logging import ensure_visible, logger
from armillary._traceback import hides_frames
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext
from armillary.data.feed._position import Position, decode_position, encode_position
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._function import function
from armillary.distribute.replica._context import get_replica_context
from armillary.distribute.replica._reductions import all_reduce
from armillary.distribute.strategies._single import DefaultStrategy
from armillary.errors import DatasetStateError, EstimatorError
from armillary.estimator._model_fn import (
    EstimatorSpec,
    ModeKeys,
    Model,
    Modules,
    ModuleStore,
    call_with,
)
from armillary.estimator._run_config import RunConfig
from armillary.trainer._options import StandardTrainerOptions
from armillary.trainer._standard_evaluator import StandardEvaluator
from armillary.trainer._standard_trainer import StandardTrainer
from armillary.typing import Output, PyTree

_BATCHES = (
    "Return `armillary.data.from_arrays((features, labels), batch_size=...)`, or "
    "anything else that gives batches `(features, labels)`."
)


def bind_input(
    input_fn: Callable[..., Any], mode: ModeKeys, params: Any, config: RunConfig
) -> Callable[[InputContext], Any]:
    """Returns what makes the data set of this process, by a user's function.

    Any of `input_context`, `mode`, `params` and `config` may be among its arguments.
    """

    def make(context: InputContext) -> Any:
        values = {"mode": mode, "params": params, "config": config}
        values |= {"input_context": context}
        made = call_with(input_fn, values)
        if made is None or isinstance(made, tuple | Mapping):
            raise EstimatorError(
                f"`input_fn` returned {made!r:.80} of type {type(made).__name__}, but "
                f"it must return a data set that gives batches. {_BATCHES}"
            )
        if inspect.isgenerator(made):
            # A generator function can begin again; the generator it made cannot.
            return lambda: call_with(input_fn, values)
        return made

    return make


def find_specs(dataset: DistributedDataset) -> tuple[PyTree, PyTree]:
    """Returns what the features and the labels of one replica's batch look like."""
    spec = find_batch_spec(dataset)
    if type(spec) not in (tuple, list) or len(spec) != 2:
        raise EstimatorError(
            f"The batches of `input_fn` are of type {type(spec).__name__}, but they "
            f"must be pairs. {_BATCHES}"
        )
    return spec[0], spec[1]


def find_batch_spec(dataset: DistributedDataset) -> PyTree:
    """Returns what one replica's batch looks like."""
    try:
        spec = dataset.element_spec
    except ValueError as error:
        raise EstimatorError(
            f"`input_fn` returned a data set that cannot be used: {error}"
        ) from error
    count = dataset.layout.num_replicas

    def divide(leaf: Any) -> Any:
        shape = leaf.shape[0] // count, *leaf.shape[1:]
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(divide, spec)


class InputPosition:
    """Where in its data a training is, for checkpoints.

    Without data, a checkpoint is only read. Unless it `resumes`, the data begin anew.
    """

    def __init__(
        self, dataset: DistributedDataset | None = None, *, resumes: bool = False
    ) -> None:
        self.dataset, self._resumes = dataset, resumes

    def get_state(self) -> dict[str, Any]:
        """Returns the position; none, if the data has no positions."""
        if self.dataset is None or not self.dataset.is_repositionable:
            return {"position": None}
        return {"position": self.dataset.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position; warns if that is none of this data."""
        dataset, position = self.dataset, state["position"]
        if not self._resumes or dataset is None or position is None:
            return
        try:
            dataset.check_repositionable()
            dataset.set_state(_begin_next_pass(dataset, position))
        except DatasetStateError as error:
            logger.warning(
                "The data of `input_fn` begins anew, because the position in the "
                "checkpoint is not one of it: %s",
                error,
            )


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
    *,
    yields_examples: bool,
) -> Iterator[Any]:
    """Yields the predictions of a checkpoint, of which it reads the modules alone."""
    strategy = DefaultStrategy()
    dataset = strategy.distribute_dataset(make_data(InputContext()))
    features = _features_of(find_batch_spec(dataset))
    model.build(features, None, ModeKeys.PREDICT)
    ensure_visible()
    path = find_checkpoint()
    if path is None:
        logger.info("found no checkpoint; predicting as it is.")
    else:
        Checkpoint(model=model.store).read(path)

    @function(strategy=strategy)
    def predict_batch(store: ModuleStore, features: PyTree) -> PyTree:
        mode = ModeKeys.PREDICT
        return model.model_fn(Modules(store), features, None, mode).predictions

    for batch in dataset:
        predictions = jax.device_get(predict_batch(model.store, _features_of(batch)))
        if not yields_examples:
            yield predictions
            continue
        leaves, treedef = jax.tree.flatten(predictions)
        num_rows = len(jax.tree.leaves(batch)[0])
        shapes = [np.shape(leaf) for leaf in leaves]
        if not leaves or any(shape[:1] != (num_rows,) for shape in shapes):
            raise EstimatorError(
                f"`predictions` of the `EstimatorSpec` have the shapes {shapes}, but "
                f"the batch has {num_rows} examples. Give arrays with an entry for "
                "each, or call `predict(..., yield_single_examples=False)`."
            )
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
        self.strategy, self.model_fn = strategy, model.model_fn
        self.modules, self.optimizer = model.store, model.optimizer
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            features, labels = batch

            def loss_fn(modules: Any) -> Any:
                return self._call(Modules(modules), features, labels).loss

            loss, gradients = nnx.value_and_grad(loss_fn)(self.modules)
            self.optimizer.update(self.modules, all_reduce("mean", gradients))
            self.loss.update(loss=loss)

        self.strategy.run(step_fn, args=(next(iterator),))

    def _call(self, modules: Modules, features: Any, labels: Any) -> EstimatorSpec:
        """Calls the model function; its loss is no part of a sum over replicas."""
        context = get_replica_context()
        assert context is not None  # This is a step.
        context.was_asked = False
        spec = self.model_fn(modules, features, labels, ModeKeys.TRAIN)
        if context.was_asked:
            raise EstimatorError(
                "`model_fn` uses the number of replicas, as `compute_average_loss` "
                "does, but its loss is the mean over one replica's batch. Write "
                "`loss=losses.mean()`: the mean over replicas is taken of that."
            )
        return spec

    def train_loop_end(self) -> Output:
        return {"loss": self.loss.compute()}


class EstimatorEvaluator(StandardEvaluator):
    """Evaluates a model function; the loss is the mean over batches."""

    def __init__(
        self, dataset: DistributedDataset, strategy: Strategy, model: Model, ops: Any
    ) -> None:
        super().__init__(dataset)
        self.strategy, self.model_fn = strategy, model.model_fn
        self.modules = model.store
        metrics = {name: _make_metric(name, op) for name, op in ops.items()}
        self.metrics = {"loss": nnx.metrics.Average(), **metrics}

    def eval_begin(self) -> None:
        for metric in self.metrics.values():
            metric.reset()

    def eval_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            features, labels = batch
            modules = Modules(self.modules)
            spec = self.model_fn(modules, features, labels, ModeKeys.EVAL)
            self.metrics["loss"].update(values=spec.loss)
            for name, op in spec.eval_metric_ops.items():
                arguments = op[1] if isinstance(op, tuple) else {"values": op}
                self.metrics[name].update(**arguments)

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self, *state: Any) -> Output:
        del state
        return {name: metric.compute() for name, metric in self.metrics.items()}


def _make_metric(name: str, op: Any) -> nnx.metrics.Metric:
    """Returns the metric of an entry of `eval_metric_ops`."""
    if name == "loss":
        raise EstimatorError(
            '`eval_metric_ops` has the entry "loss", which an evaluation reports in '
            'any case, as the mean over batches. Call it "average_loss".'
        )
    if not isinstance(op, tuple):
        if jnp.ndim(op) == 0:
            raise EstimatorError(
                f"`eval_metric_ops[{name!r}]` is a scalar, of which no mean over "
                "examples can be taken. Give an array with an entry for each example, "
                "or a pair `(metric_fn, arguments)`."
            )
        return nnx.metrics.Average()
    metric = op[0]() if len(op) == 2 and callable(op[0]) else None
    if not isinstance(metric, nnx.metrics.Metric):
        raise EstimatorError(
            f"`eval_metric_ops[{name!r}]` is {op!r:.80}, but a pair must begin with a "
            "function that makes a metric, and end with the arguments of its `update`. "
            "Write `(armillary.metrics.AUC, {'logits': logits, 'labels': labels})`."
        )
    return metric
