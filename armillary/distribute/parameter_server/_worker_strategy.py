"""The strategy that a scheduled function finds on its worker."""

from collections.abc import Callable
from typing import Any

from armillary.data._input_context import InputContext
from armillary.distribute.replica._collectives import ReplicaContext
from armillary.distribute.replica._context import entered
from armillary.distribute.strategies._single import SingleStrategy
from armillary.errors import ReplicaContextError
from armillary.state._lift import State
from armillary.typing import PyTree


class WorkerStrategy(SingleStrategy):
    """One replica: on its own, or of as many as there are workers."""

    def __init__(self, index: int, num_workers: int, *, is_synchronous: bool) -> None:
        super().__init__()
        self._index, self._num_workers = index, num_workers
        if is_synchronous:
            self._num_replicas = num_workers

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        if self._num_replicas == 1:
            return super()._run(state, fn, *args, **kwargs)
        context = _WorkerContext(self, self._index)
        with entered(self, context):
            return fn(*args, **kwargs)

    @property
    def input_context(self) -> InputContext:
        """Which worker reads the data, of how many."""
        return InputContext(self._num_workers, self._index, self.num_replicas_in_sync)


class _WorkerContext(ReplicaContext):
    """A replica whose gradients are summed on the parameter servers."""

    def __init__(self, strategy: WorkerStrategy, index: int) -> None:
        super().__init__(strategy, None, active=strategy.num_replicas_in_sync)
        self._index = index

    @property
    def replica_id_in_sync_group(self) -> Any:
        return self._index

    def all_reduce(self, *_: Any, **__: Any) -> PyTree:
        raise _alone("all_reduce")

    def all_gather(self, *_: Any, **__: Any) -> PyTree:
        raise _alone("all_gather")

    def merge_call(self, *_: Any, **__: Any) -> PyTree:
        raise _alone("merge_call")


def _alone(method: str) -> ReplicaContextError:
    return ReplicaContextError(
        f"`{method}` was called under `ParameterServerStrategy(max_staleness=0)`. Its "
        "workers hear nothing from each other within a step: gradients, metrics and "
        "batch statistics are summed on the parameter servers. Return the value, or "
        "add it to a metric."
    )
