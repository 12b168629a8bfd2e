"""The base class of all strategies.

A subclass decides how a step runs (`_run`), and its placement says where state and
batches are. The methods that users call are written on top of these two: here if they
run code, in `_value_methods` and `_data_methods` if they take values or data.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from armillary._checks import check_callable, check_instance
from armillary._shorten import shorten
from armillary._traceback import hides_frames
from armillary.distribute._birth import make_in_place
from armillary.distribute._data_methods import DataMethods
from armillary.distribute._placement import Placement
from armillary.distribute._run_checks import check_divided, check_is_no_batch
from armillary.distribute._value_methods import ValueMethods
from armillary.distribute.replica._axis import DEFAULT_AXIS_NAME, explain_unbound_axis
from armillary.distribute.replica._context import (
    Scope,
    get_running_context,
    is_in_default_step,
    lifted_state,
    require_cross_replica_context,
)
from armillary.distribute.replica._cross_device import CrossDeviceOps
from armillary.distribute.replica._extended import StrategyExtended
from armillary.state._adapters import follow_strategies
from armillary.state._lift import State
from armillary.typing import PyTree

T = TypeVar("T")


class Strategy(DataMethods, ValueMethods):
    """Spreads one training step over devices (`tf.distribute.Strategy`).

    Use one of the subclasses. Code written against this class runs under all of them.

    Args:
        placement: The devices, and the place of state and batches on them.
        axis_name: The name of the axis of replicas inside `run`.

    Attributes:
        placement: The devices, and the place of state and batches on them.
        axis_name: The name of the axis of replicas, for the functions of `jax.lax`.
            Inside `run`, this axis exists under every strategy, even with one replica.
    """

    cross_device_ops: CrossDeviceOps | None = None
    """The method of `all_reduce` to combine values; `None` leaves it to XLA."""

    loop_class: Any = None
    """The class of a trainer's loops, if steps do not run on the devices."""

    def __init__(
        self, placement: Placement, axis_name: str = DEFAULT_AXIS_NAME
    ) -> None:
        super().__init__(placement, axis_name)
        # The findings in steps that the log has warned of, once each.
        self.warned: set[NamedTuple] = set()

    @property
    def extended(self) -> StrategyExtended:
        """More calls of `tf.distribute`, such as `update` within a `merge_call`."""
        return StrategyExtended(self)

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        """Runs `fn` once per replica; `state` is the state that a step has lifted."""
        raise NotImplementedError

    def scope(self) -> AbstractContextManager["Strategy"]:
        """Returns a context manager that puts this strategy in effect.

        Code inside is in cross-replica context, and `get_strategy()` returns this
        strategy. Variables may be made inside or outside; they are placed on the
        strategy's devices when a step first uses them. A `OneDeviceStrategy` places
        the arrays that are made inside on its device immediately. A `ShardedStrategy`
        sets its mesh, as `jax.set_mesh` does, so they are on all devices.

        Raises:
            ReplicaContextError: If called inside `run`, or inside another strategy's
                scope.
        """
        follow_strategies()
        instead = "enter the scope around `run`"
        require_cross_replica_context("strategy.scope", instead, self)
        return Scope(self, settings=self.jax_settings)

    @hides_frames
    def make(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Returns the result of `fn`, with each array made where it belongs.

        The function is traced and then compiled for the shardings of its arrays, so no
        device holds more than its part, also while the function runs. Random numbers
        are the same as on one device::

            def make_model():
                model = Transformer(nnx.Rngs(0))
                return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

            model, optimizer = strategy.make(make_model)

        Arrays that `fn` only reads, such as weights from a file, are copied to every
        device. The first step reuses the memory of the result, so copy an array before
        you keep it (`array.copy()`). All processes of the strategy must call it.

        Args:
            fn: Returns an object with variables, a pytree of arrays, or a nest of both.
                As it is traced, it cannot read the values of the arrays that it makes.
            args: Arguments of `fn`, such as `nnx.Rngs(0)` if `fn` is a class.
            kwargs: Arguments of `fn`.

        Returns:
            The result of `fn`, as if `fn` had been called.

        Raises:
            ReplicaContextError: If called inside `run`, or in another strategy's scope.
            StateStructureError: If `fn` puts an array into a tuple or a function of an
                object, where nothing can replace it.
            TypeError: If `fn` cannot be called.
            ValueError: If an annotation or a rule does not fit an array or the devices.
        """
        check_callable("fn", fn)
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
            raise TypeError(
                f"`fn` is {fn!r}, a generator or a coroutine, which makes nothing when "
                "it is called. Return the model from a function."
            )
        instead = "call it before the step"
        require_cross_replica_context("strategy.make", instead, self)
        return make_in_place(self, fn, args, kwargs)

    @hides_frames
    def run(
        self,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PyTree:
        """Runs `fn` once per replica, each with its share of the batch.

        In a trainer, `fn` may read and write every variable that the trainer reaches.
        Outside a trainer and `armillary.function`, it may use every variable that `fn`
        and its arguments reach. Inside `fn`, all values belong to one replica. Values
        are combined only by `armillary.all_reduce`, or by JAX's collectives over the
        axis `"replica"` (or the strategy's `axis_name`).

        Args:
            fn: The function. It runs in replica context.
            args: Positional arguments. `PerReplica` values, such as batches of a
                distributed dataset, are split. Other arrays must be equal in all
                processes, and every replica gets all of them.
            kwargs: Keyword arguments, with the same rules.

        Returns:
            The result of `fn`, with each array as a `PerReplica`. With a single
            replica, the result itself.

        Raises:
            ReplicaContextError: If called inside `run`, or in another strategy's scope.
            ReplicaMismatchError: If `fn` leaves a per-replica value in a mirrored slot.
            DoubleReductionError: If `fn` sums values that were already reduced, takes
                the mean of values that were already divided, or adds up noise that
                replicas share.
            TypeError: If `fn` cannot be called, `args` is not a tuple, or `args` is a
                batch that is a tuple.
        """
        check_callable("fn", fn)
        if not isinstance(args, tuple | list):
            raise TypeError(
                f"`args` is {shorten(args)} of type {type(args).__name__}, but it "
                "must be a tuple. Write `strategy.run(fn, args=(batch,))`, with the "
                "comma."
            )
        check_instance("kwargs", kwargs, dict | None, "Write `kwargs={...}`.")
        require_cross_replica_context("strategy.run", "call `fn` directly", self)
        replica = get_running_context(self)
        if replica is not None:  # The code runs in a `merge_call`.
            return replica.run_merged(fn, tuple(args), kwargs or {})
        if self.placement.num_replicas > 1 and is_in_default_step():
            check_divided(self, (args, kwargs))
        try:
            with self.leave_program_mesh():
                return self._run(lifted_state(), fn, *args, **(kwargs or {}))
        except NameError as error:
            note = explain_unbound_axis(error, self)
            # A program of this call may already have added it.
            if note is not None and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise
        except TypeError:
            check_is_no_batch(fn, args, kwargs or {})
            raise

    @hides_frames
    def experimental_run(
        self, fn: Callable[..., PyTree], input_iterator: Iterator[Any] | None = None
    ) -> PyTree:
        """Runs `fn` once per replica, with the next batch of an iterator.

        It is `run(fn, args=(next(input_iterator),))`, for programs written for
        TensorFlow 1.

        Args:
            fn: The function. It runs in replica context.
            input_iterator: An iterator over a distributed dataset. `None` calls `fn`
                without an argument.

        Returns:
            As `run`.

        Raises:
            TypeError: If `input_iterator` is not an iterator, but a dataset.
            StopIteration: If the data has ended.
        """
        if input_iterator is None:
            return self.run(fn)
        if not hasattr(input_iterator, "__next__"):
            raise TypeError(
                f"`input_iterator` is of type {type(input_iterator).__name__}, but it "
                "must be an iterator. Write `strategy.experimental_run(fn, "
                "iter(dataset))`, and make the iterator before the loop."
            )
        return self.run(fn, args=(next(input_iterator),))

    # Other spellings of these methods in TensorFlow's guides.
    experimental_distribute_dataset = DataMethods.distribute_dataset
    experimental_distribute_datasets_from_function = (
        DataMethods.distribute_datasets_from_function
    )
    experimental_distribute_values_from_function = (
        DataMethods.distribute_values_from_function
    )
    experimental_local_results = ValueMethods.local_results
    experimental_make_numpy_dataset = DataMethods.make_numpy_dataset
    experimental_run_v2 = run
    make_experimental_numpy_dataset = DataMethods.make_numpy_dataset
    unwrap = ValueMethods.local_results

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes the other spellings of a method follow an override in a subclass."""
        super().__init_subclass__(**kwargs)
        for spelling, method in vars(Strategy).items():
            name = getattr(method, "__name__", spelling)
            if name != spelling and name in vars(cls):
                setattr(cls, spelling, vars(cls)[name])
