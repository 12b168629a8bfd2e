"""Input functions: how they are called, and where in the data a training is."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from armillary._checks import check_callable
from armillary._logging import logger
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext, InputOptions
from armillary.data.feed._position import Position, decode_position, encode_position
from armillary.distribute._strategy import Strategy
from armillary.errors import DatasetStateError, EstimatorError
from armillary.estimator._model_fn import ModeKeys, call_with
from armillary.estimator._run_config import RunConfig
from armillary.typing import PyTree

_BATCHES = (
    "Return `armillary.data.from_arrays((features, labels), batch_size=...)`, or "
    "anything else that gives batches `(features, labels)`."
)


class InputFn:
    """An input function of the user's, and what it is called with.

    Any of `input_context`, `mode`, `params` and `config` may be among its arguments.
    """

    def __init__(
        self, fn: Callable[..., Any], mode: ModeKeys, params: Any, config: RunConfig
    ) -> None:
        check_callable("input_fn", fn)
        self._fn = fn
        self._values = {"mode": mode, "params": params, "config": config}

    def __call__(self, context: InputContext) -> Any:
        """Returns the data set of this process."""
        values = {**self._values, "input_context": context}
        made = call_with(self._fn, values)
        if made is None or isinstance(made, tuple | Mapping):
            raise EstimatorError(
                f"`input_fn` returned {made!r:.80} of type {type(made).__name__}, but "
                f"it must return a data set that gives batches. {_BATCHES}"
            )
        if inspect.isgenerator(made):
            # A generator function can begin again; the generator it made cannot.
            return lambda: call_with(self._fn, values)
        return made


def distribute_input(
    input_fn: InputFn, strategy: Strategy, *, is_training: bool
) -> DistributedDataset:
    """Returns a dataset that gives one batch of an input function to each replica.

    A step of training needs one for each; an evaluation counts every example once in
    any case.
    """
    # Rows that some replicas lack cannot travel between processes.
    remainder = "exact" if strategy.peers is None else "drop"
    options = InputOptions(remainder=remainder if is_training else None)
    return strategy.distribute_datasets_from_function(input_fn, options)


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
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (leaf.shape[0] // count, *leaf.shape[1:]), leaf.dtype
        ),
        spec,
    )


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
