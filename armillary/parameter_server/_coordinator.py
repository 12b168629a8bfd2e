"""Schedules functions on workers."""

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from armillary._checks import check_callable, check_instance
from armillary._optional import import_ray
from armillary._shorten import shorten
from armillary.data.sources._libraries import as_source
from armillary.distribute.program._function import warn_if_compiled_often
from armillary.distribute.program._keys import argument_key, code_of, identity_of
from armillary.errors import PSUnavailableError
from armillary.parameter_server._closures import (
    RemoteValue,
    ScheduledTask,
    Statistics,
    is_dynamic,
    ship,
)
from armillary.parameter_server._node import start_ray
from armillary.parameter_server._scheduler import Scheduler
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.parameter_server._tasks import PerWorkerDataset
from armillary.parameter_server._variables import Variables
from armillary.state._holders import captured, is_claimed
from armillary.typing import PyTree


class ClusterCoordinator:
    """Runs functions on the workers of a `ParameterServerStrategy`.

    It works like `tf.distribute.coordinator.ClusterCoordinator`;
    `docs/advanced/scheduled_functions.md` has an example.

    A scheduled function is compiled once on each worker. It reads variables when it
    begins, and sends gradients and sums when it ends. The variables of this process are
    current after `join`; new values for them are sent before the next call.

    Calls of a lost worker run again on another one, and no update is applied twice. An
    error in a call cancels the calls that have not begun. The next `schedule` or `join`
    raises it, and the coordinator can be used again after that.

    There is one coordinator for each strategy. A second call for the same strategy
    returns the same object.

    Args:
        strategy: The strategy.

    Raises:
        TypeError: If `strategy` is not a `ParameterServerStrategy`.
        ImportError: If Ray is not installed.
    """

    # All coordinators share the numbers, so that none takes the dataset of another.
    _numbers = itertools.count()

    def __new__(cls, strategy: ParameterServerStrategy) -> "ClusterCoordinator":
        """Returns the coordinator of a strategy."""
        check_instance(
            "strategy",
            strategy,
            ParameterServerStrategy,
            "Pass an `armillary.distribute.ParameterServerStrategy`.",
        )
        if strategy.coordinator is None:
            strategy.coordinator = super().__new__(cls)
            strategy.coordinator._begin(strategy)
        return strategy.coordinator

    def _begin(self, strategy: ParameterServerStrategy) -> None:
        start_ray(strategy.cluster_resolver)
        self._strategy = strategy
        self._variables = Variables(strategy.num_ps, strategy.variable_partitioner)
        self._scheduler = Scheduler(strategy, self._variables)
        self._tasks: dict[Any, ScheduledTask] = {}
        self._left_out: list[Any] = []
        self._named = {id(strategy): "strategy", id(self): "nothing"}

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedules a call of a function on some worker, and returns without waiting.

        If an earlier call has failed, this method waits until all calls that had begun
        have ended, and raises that error once.

        Args:
            fn: The function. It may read variables, change them through an optimizer or
                by adding to them, and take batches of per-worker iterators.
            args: The positional arguments of the function: arrays, results of other
                calls, per-worker iterators, and any objects that can be pickled.
            kwargs: The keyword arguments of the function, of the same kinds.

        Returns:
            The object that will hold the result.

        Raises:
            TypeError: If `fn` cannot be called, `args` is not a tuple, or an object
                that the function reaches cannot be sent to workers.
            PSUnavailableError: If a parameter server was lost since the last call.
        """
        check_callable("fn", fn)
        if args is not None and not isinstance(args, tuple | list):
            raise TypeError(
                f"`args` is {shorten(args)} of type {type(args).__name__}, but it "
                "must be a tuple of arguments. Write "
                "`schedule(fn, args=(iterator,))`, with the comma."
            )
        self._scheduler.raise_error()
        leaves, tree = jax.tree.flatten(
            (tuple(args or ()), dict(kwargs or {})), is_leaf=is_claimed
        )
        task = self._get_task(fn, leaves, tree)
        servers = self._scheduler.server_group
        with servers.needed():
            servers.revive(self._variables.put_all)
            self._variables.put_changed(servers.actors)
        inputs: list[Any] = []
        for leaf in leaves:
            if not is_dynamic(leaf):
                continue
            # The call is sent later, and by then the caller may have written into an
            # array.
            inputs.append(np.copy(leaf) if isinstance(leaf, np.ndarray) else leaf)
        return self._scheduler.add(task, inputs)

    def join(self) -> None:
        """Waits until every scheduled call has ended, and reads all variables.

        If a call has failed, its error is raised here.

        Raises:
            PSUnavailableError: If a parameter server was lost.
        """
        scheduler = self._scheduler
        scheduler.wait()
        if scheduler.is_stopped:
            return
        servers = scheduler.server_group
        with servers.needed():
            servers.revive(self._variables.put_all)
            self._variables.put_changed(servers.actors)
            self._variables.fetch(servers.actors)

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Joins at the end of a `with` statement, also if an error or Ctrl-C ends it.

        After an error, the calls that have not begun are cancelled. The program may
        handle the error and schedule calls again. So its variables get the changes of
        all calls that ran, and no call of this statement runs later.
        """
        try:
            yield
            self.join()
        except PSUnavailableError:
            raise  # The values on the other servers are of no use.
        except BaseException:
            self._scheduler.drop("the program was interrupted")
            self.join()
            raise

    def done(self) -> bool:
        """Returns whether every scheduled call has ended.

        If a call has failed, its error is raised when all calls have ended.
        """
        if not self._scheduler.is_done():
            return False
        self._scheduler.raise_error()
        return True

    def fetch(self, values: PyTree) -> PyTree:
        """Returns a pytree of `RemoteValue` with their results, as NumPy arrays."""
        return jax.tree.map(_fetch, values)

    def create_per_worker_dataset(
        self, dataset_fn: Callable[..., Any] | Any
    ) -> PerWorkerDataset:
        """Builds one dataset on every worker.

        If a worker is lost, its replacement builds a new dataset from the beginning.

        Args:
            dataset_fn: A function that is called on each worker. If it takes an
                argument, this is an `InputContext` with the number of the worker. It
                returns any data that a strategy can distribute, in batches of the size
                that one call takes. If you pass such data in place of a function, all
                of the data is sent to every worker.

        Returns:
            A dataset whose iterator is for scheduled functions.

        Raises:
            TypeError: If `dataset_fn` gives no batches, or cannot be sent to workers.
        """
        make = dataset_fn
        if not callable(make):
            source = as_source(dataset_fn)

            def make() -> Any:
                return source

        payload, _ = ship(make, (), self._named)
        reference = import_ray().put(payload)

        def build() -> int:
            number = next(self._numbers)
            self._scheduler.datasets.append((number, reference))
            return number

        return PerWorkerDataset(build)

    @property
    def statistics(self) -> Statistics:
        """The counts since the last `take_statistics`."""
        return self._scheduler.statistics

    def take_statistics(self) -> Statistics:
        """Returns the counts since the last call, and sets them to zero."""
        statistics = self._scheduler.statistics
        self._scheduler.statistics = Statistics()
        return statistics

    def leave_out(self, objects: Sequence[Any]) -> None:
        """Sends workers `None` in place of objects that scheduled functions hold."""
        # The objects are kept, so that no new object gets the id of one of them.
        self._left_out += objects
        self._named |= {id(value): "nothing" for value in objects}

    def shutdown(self) -> None:
        """Ends workers and parameter servers; the variables keep their values."""
        self._scheduler.stop()
        self._strategy.coordinator = None

    def _get_task(
        self, fn: Callable[..., Any], leaves: list[Any], tree: Any
    ) -> ScheduledTask:
        """Returns the task of a function; a new one if a value it reads changed."""
        inner = getattr(fn, "armillary_function", None)
        if inner is not None:
            owner = getattr(fn, "__self__", None)
            fn = inner if owner is None else types.MethodType(inner, owner)

        # The values that a function reads may depend on the shapes of its arguments.
        kinds = tuple(map(_kind_of_argument, leaves))
        held: list[tuple[str, Any]] = []
        for name, value in captured(fn):
            held.append((name, identity_of(value)))
        key = code_of(fn), tuple(held), tree, kinds
        task = self._tasks.get(key)
        if task is None or not task.is_current():
            # While a function is pickled, its variables hold stand-ins, which the
            # thread of a worker must not send.
            with self._variables.lock:
                task = ScheduledTask(next(self._numbers), fn, leaves, tree, self._named)
                task.numbers = self._variables.adopt(task.state)
            self._tasks[key] = task
            warn_if_compiled_often(fn, task.name)
        return task


def _fetch(leaf: Any) -> Any:
    return leaf.fetch() if isinstance(leaf, RemoteValue) else leaf


def _kind_of_argument(leaf: Any) -> Any:
    if isinstance(leaf, RemoteValue):
        return RemoteValue
    return argument_key(leaf) if is_dynamic(leaf) else identity_of(leaf)
