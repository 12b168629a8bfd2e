"""`model.fit` of Keras on the devices of a strategy.

A model that was made or compiled under `strategy.scope()` runs on the devices of the
strategy: XLA copies or divides variables and each global batch. The program is written
for a single device, so the numbers are the same as with one replica. If the devices
cannot share a batch equally, each device runs the whole batch. Under a
`ParameterServerStrategy`, the training steps run on workers (`_scheduled.py`).

Keras has a global setting for the devices of a model. So, once Keras is loaded,
Armillary wraps the methods of `keras.Model` that run a model. Models without a strategy
run as before.
"""

import contextlib
import functools
import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from armillary._logging import logger
from armillary.cluster._peers import Peers
from armillary.distribute._global_arrays import (
    as_global,
    as_whole,
    everywhere,
    place_parts,
)
from armillary.distribute.replica._context import (
    get_strategy,
    has_strategy,
    without_strategy,
)
from armillary.distribute.replica._cross_device import NcclAllReduce
from armillary.errors import PeerError
from armillary.keras._datasets import STEPS, adapt_datasets, copy_generated
from armillary.keras._generators import copy_batches
from armillary.keras._values import check_backend, is_unset, set_value, value_of
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.state._lift import State
from armillary.xla._compile import partition

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy
    from armillary.keras._scheduled import ScheduledSteps

_RUNNING = (*STEPS, "train_on_batch", "test_on_batch", "predict_on_batch")
_TRAINING = ("fit", "train_on_batch")
_MAKING = ("make_train_function", "make_test_function", "make_predict_function")
_FUNCTIONS = ("train_function", "test_function", "predict_function")

# The strategy that each model was made or, later, compiled under.
_strategies: "weakref.WeakKeyDictionary[Any, Strategy]" = weakref.WeakKeyDictionary()
# Strategies whose `cross_device_ops` a warning has named.
_warned: "weakref.WeakSet[Strategy]" = weakref.WeakSet()
# The strategy that the functions of each model were made for.
_made_for: "weakref.WeakKeyDictionary[Any, Strategy]" = weakref.WeakKeyDictionary()


@functools.cache
def follow() -> None:
    """Lets models of Keras, which is loaded, run under their strategies."""
    import keras

    kind: Any = keras.Model
    _wrap(kind, "__new__", _around_new, bind=False)
    _wrap(kind, "compile", _around_compile)
    if keras.config.backend() != "jax":
        return  # Here a model of a strategy is an error, and other models run as usual.
    from keras.src.backend.jax import trainer as keras_trainer

    module: Any = keras_trainer
    for name in _RUNNING:
        _wrap(kind, name, functools.partial(_around_run, name=name))
    for name in _MAKING:
        _wrap(kind, name, _around_make)
    _wrap(kind, "_make_function", _around_make_function)
    _wrap(kind, "_symbolic_build", _around_build)
    _wrap(module.JAXEpochIterator, "_get_distributed_iterator", _around_iterate)
    distribute = module._distribute_data

    def distribute_data(data: Any, layouts: Any = None) -> Any:
        return _divide(data) if _is_running_here() else distribute(data, layouts)

    module._distribute_data = distribute_data


def _wrap(
    kind: Any, name: str, around: Callable[..., Any], *, bind: bool = True
) -> None:
    # The method is replaced in the class that defines it, because a model that is
    # loaded checks whether its class overrides it.
    kind = next(base for base in kind.__mro__ if name in vars(base))
    method = getattr(kind, name)

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(method, self) if bind else method
        return around(bound, self, args, kwargs)

    setattr(kind, name, wrapped)


def _around_new(method: Any, kind: Any, args: Any, kwargs: Any) -> Any:
    return _remember(method(kind, *args, **kwargs))


def _around_compile(method: Any, model: Any, args: Any, kwargs: Any) -> None:
    method(*args, **kwargs)
    _remember(model)


def _remember(model: Any) -> Any:
    if has_strategy():
        check_backend()
        _strategies[model] = get_strategy()
    return model


def _around_run(method: Any, model: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Calls a method that runs a model, on the devices of the model's strategy."""
    import keras

    strategy = get_strategy() if has_strategy() else _strategies.get(model)
    if name in STEPS:
        bound = inspect.signature(method).bind(*args, **kwargs)
        adapt_datasets(bound.arguments, strategy or get_strategy(), name)
        if strategy is not None:
            copy_generated(bound.arguments)
        args = bound.args
        kwargs = bound.kwargs
    # In the `fit` of a model, a callback may run another model, on the same devices.
    is_inside = keras.distribution.distribution() is not None
    if is_inside:
        strategy = _get_running_strategy()
    _forget_functions_for_others(model, strategy)
    if is_inside or strategy is None:
        return method(*args, **kwargs)

    if not strategy.layout.peers.is_alone:
        _check_same(strategy.layout.peers, model, name)
    _warn_of_operations(strategy)

    with contextlib.ExitStack() as stack:
        stack.enter_context(strategy.leave_program_mesh())
        stack.enter_context(strategy.jax_settings())
        stack.enter_context(_make_distribution(strategy).scope())
        if name in _TRAINING and isinstance(strategy, ParameterServerStrategy):
            steps = _schedule_steps(model, strategy)
            if name == "fit":
                stack.enter_context(steps.fitting())
        return method(*args, **kwargs)


def _forget_functions_for_others(model: Any, strategy: "Strategy | None") -> None:
    """Removes functions that were made for other devices; Keras would keep them."""
    if _made_for.get(model) is strategy:
        return
    for function in _FUNCTIONS:
        setattr(model, function, None)
    if strategy is None:
        del _made_for[model]
    else:
        _made_for[model] = strategy


def _schedule_steps(model: Any, strategy: ParameterServerStrategy) -> "ScheduledSteps":
    """Makes the training steps of a model run on workers."""
    # Only fits on workers need the coordinator and its imports.
    from armillary.keras._scheduled import ScheduledSteps

    steps = model.train_function
    is_made = isinstance(steps, ScheduledSteps) and steps.strategy is strategy
    if not is_made:
        steps = ScheduledSteps(model, strategy)
        # Keras makes no function where there is one.
        model.train_function = steps
    return steps


def _find_scheduled_steps(model: Any) -> "ScheduledSteps | None":
    if not isinstance(_made_for.get(model), ParameterServerStrategy):
        return None
    from armillary.keras._scheduled import ScheduledSteps

    steps = model.train_function
    return steps if isinstance(steps, ScheduledSteps) else None


def _warn_of_operations(strategy: "Strategy") -> None:
    """Warns, once, about `cross_device_ops` that Keras' own step does not use."""
    operations = strategy.cross_device_ops
    if isinstance(operations, NcclAllReduce | None) or strategy in _warned:
        return
    _warned.add(strategy)
    logger.warning(
        f"`cross_device_ops` of {strategy!r} is {operations!r}, but in `fit`, "
        "`evaluate` and `predict` of Keras, XLA divides the step and does not use it. "
        "To use it, train with an `armillary.keras.KerasTrainer`."
    )


def _around_build(method: Any, model: Any, args: Any, kwargs: Any) -> Any:
    """Builds a model as if there were one replica, because its step runs like that."""
    steps = _find_scheduled_steps(model)
    if steps is not None:
        kwargs = steps.take_over(kwargs)
    with without_strategy():
        return method(*args, **kwargs)


def _around_make(method: Any, model: Any, args: Any, kwargs: Any) -> Any:
    """Places the variables of a model, and then makes one of its functions."""
    if _is_running_here():
        _place(model)
    method(*args, **kwargs)


def _around_make_function(method: Any, model: Any, args: Any, kwargs: Any) -> Any:
    """Makes a function of a compiled step that waits until a further step may start."""
    if not _is_running_here():
        return method(*args, **kwargs)
    step, *others = args
    strategy = _made_for[model]
    split = strategy.split
    if split is not None:
        step = partition(step, split)
    dispatch = strategy.dispatch
    sharding = everywhere(_mesh_of(strategy))
    # Keras passes more than a step only for `predict`. It fetches these outputs, and
    # they belong to the global batch.
    is_predict = bool(others or kwargs)
    is_alone = strategy.layout.peers.is_alone
    gathers = is_predict and not is_alone
    gather = jax.jit(_as_it_is, out_shardings=sharding)

    def bounded_step(state: Any, data: Any) -> tuple[Any, Any]:
        if not is_alone:
            # Metrics that were reset are arrays of this process only.
            state = jax.tree.map(lambda leaf: _copy_to(leaf, sharding), state)
        dispatch.wait()
        # The step computes global values, so it must not see several replicas, by whose
        # number it would scale.
        with without_strategy():
            outputs, new_state = step(state, data)
        if split is not None:
            new_state = jax.tree.map(_move_like, new_state, state)
        if gathers:
            outputs = gather(outputs)
        dispatch.started(outputs)
        return outputs, new_state

    return method(bounded_step, *others, **kwargs)


def _as_it_is(outputs: Any) -> Any:
    return outputs


def _around_iterate(
    method: Any, iterator: Any, args: Any, kwargs: Any
) -> Iterator[Any]:
    if not _is_running_here():
        return method(*args, **kwargs)
    adapter = iterator.data_adapter
    batches = adapter.get_jax_iterator()
    # Workers get the batches as they are.
    if getattr(iterator, "armillary_is_for_workers", False):
        return batches
    if not getattr(adapter, "has_own_arrays", False):
        batches = copy_batches(batches)
    return map(_divide, batches)


def _divide(data: Any) -> Any:
    """Puts a global batch on the devices; each process has the whole batch."""
    import keras

    distribution: Any = keras.distribution.distribution()

    def place(leaf: Any) -> jax.Array:
        sharding = distribution.divide(np.shape(leaf))
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        return place_parts(np.asarray(leaf), sharding)

    return jax.tree.map(place, data)


def _move_like(value: jax.Array, old: jax.Array) -> jax.Array:
    """Moves a result of a step back to the old place; XLA may choose another one."""
    # Metrics that were reset are not committed to a device.
    if not old.committed:
        return value
    if value.sharding.is_equivalent_to(old.sharding, value.ndim):
        return value
    return jax.device_put(value, old.sharding)


def _copy_to(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    if not value.is_fully_addressable:
        return value
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return as_global(value, sharding)


def _check_same(peers: Peers, model: Any, name: str) -> None:
    """Raises if processes would train different models, or in different orders."""
    own = hashlib.blake2b(repr(np.random.get_state()).encode())
    for variable in model.variables:
        whole = np.asarray(as_whole(value_of(variable)))
        own.update(whole.tobytes())
    digests = peers.gather(f"model.{name}", own.hexdigest())
    if len(set(digests)) > 1:
        raise PeerError(
            f"`model.{name}` was called on processes that differ in the weights of the "
            "model, or in the random numbers with which Keras shuffles. Begin all "
            "processes with the same seed: `keras.utils.set_random_seed(0)`."
        )


def _is_running_here() -> bool:
    return _get_running_strategy() is not None


def _get_running_strategy() -> "Strategy | None":
    """Returns the strategy on whose devices a model runs now, if there is one."""
    import keras

    return getattr(keras.distribution.distribution(), "of_strategy", None)


def _place(model: Any) -> None:
    """Moves the variables of a model to the places that the strategy gives them."""
    strategy = _made_for[model]
    sharding = everywhere(_mesh_of(strategy))
    homes: dict[int, Any] = {}
    if strategy.split is not None:
        state = State([(model, type(model).__name__)])
        shardings = strategy.placement.state_shardings(state)
        pairs = zip(state.read(), shardings, strict=True)
        homes = {id(leaf): home for leaf, home in pairs}

    variables = [*model.variables]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += optimizer.variables
    variables += model.metrics_variables
    for variable in variables:
        if is_unset(variable):
            continue
        value = value_of(variable)
        home = homes.get(id(value), sharding)
        set_value(variable, _copy_to(value, home))


def _mesh_of(strategy: "Strategy") -> Mesh:
    if strategy.mesh is not None:
        return strategy.mesh
    devices = np.asarray(list(strategy.layout.devices))
    return Mesh(devices, (strategy.axis_name,))


@functools.lru_cache(maxsize=16)
def _make_distribution(strategy: "Strategy") -> Any:
    """Returns the distribution of Keras that stands for a strategy."""
    import keras

    base: Any = keras.distribution.DataParallel
    mesh = _mesh_of(strategy)
    axis = strategy.axis_name

    class StrategyDistribution(base):
        """Divides batches if the devices can share them equally; moves no variables."""

        of_strategy = strategy

        def divide(self, shape: tuple[int, ...]) -> NamedSharding:
            if strategy.split is not None:
                return strategy.split(shape, 0)
            is_divided = bool(shape) and shape[0] % mesh.size == 0
            spec = PartitionSpec(axis) if is_divided else PartitionSpec()
            return NamedSharding(mesh, spec)

        def get_variable_layout(self, variable: Any) -> None:
            # `_place` moves the variable. With a layout, no other program could use it.
            del variable

    devices = np.asarray(mesh.devices).reshape(-1)
    device_mesh = keras.distribution.DeviceMesh(devices.shape, [axis], devices)
    return StrategyDistribution(device_mesh, auto_shard_dataset=False)
