"""The strategy that a scheduled function finds on its worker."""

from collections.abc import Callable
from typing import Any

import jax

from armillary._jaxpr import mark
from armillary.data._input_context import InputContext
from armillary.distribute.replica._alone import run_in_place
from armillary.distribute.replica._collectives import ReplicaContext
from armillary.distribute.replica._context import entered
from armillary.distribute.replica._differences import BY_OPS
from armillary.distribute.replica._values import ReduceOp
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
        del state
        # Not as a call of its own: what it does to each variable is looked at.
        if self._num_replicas == 1:
            context = ReplicaContext(self, None, active=1)
            return run_in_place(self, context, fn, args, kwargs)
        with entered(self, _WorkerContext(self, self._index)):
            try:
                return fn(*args, **kwargs)
            except NameError as error:
                if "unbound axis name" not in str(error):
                    raise
                raise ReplicaContextError(alone_message("a collective")) from error

    @property
    def input_context(self) -> InputContext:
        """Which worker reads the data, of how many."""
        return InputContext(self._num_workers, self._index, self.num_replicas_in_sync)


SENT = {ReduceOp.SUM: BY_OPS % "sum", ReduceOp.MEAN: BY_OPS % "mean"}
"""Names what the servers are to add up, and nothing else may use."""


class _WorkerContext(ReplicaContext):
    """A replica whose gradients are summed on the parameter servers."""

    def __init__(self, strategy: WorkerStrategy, index: int) -> None:
        super().__init__(strategy, None, active=strategy.num_replicas_in_sync)
        self._index = index

    @property
    def replica_id_in_sync_group(self) -> Any:
        return self._index

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, *, dtype: Any = None
    ) -> PyTree:
        """Returns gradients as the servers are to add them up."""
        del dtype
        op = ReduceOp.of(reduce_op)
        if op not in SENT:
            raise ReplicaContextError(alone_message("all_reduce"))
        count = self.num_replicas_in_sync if op is ReduceOp.MEAN else 1

        def send(leaf: Any) -> Any:
            return mark(leaf if count == 1 else leaf / count, SENT[op])

        return jax.tree.map(send, value)

    def all_gather(self, *_: Any, **__: Any) -> PyTree:
        raise ReplicaContextError(alone_message("all_gather"))

    def merge_call(self, *_: Any, **__: Any) -> PyTree:
        raise ReplicaContextError(alone_message("merge_call"))


def alone_message(method: str) -> str:
    """Returns the message for what needs to hear from the other workers."""
    return (
        f"`{method}` was called under `ParameterServerStrategy(max_staleness=0)`. Its "
        "workers hear nothing from each other within a step: gradients, metrics and "
        "batch statistics are summed on the parameter servers. Give what `all_reduce` "
        "returns to the optimizer as it is (no `all_reduce_gradients` in its chain), "
        "return other values, or add them to a metric."
    )
