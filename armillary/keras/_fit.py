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
from armillary.data._dataset import DistributedDataset
from armillary.data.sources._arrays import IndexedDataset
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
from armillary.keras._dataset_creator import DatasetCreator
from armillary.keras._generators import copy_batches
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.state import _keras
from armillary.state._lift import State
from armillary.xla._compile import partition

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy
    from armillary.keras._scheduled import ScheduledSteps

# The methods that take data sets, and the argument that bounds the batches of `x`.
_STEPS = {"fit": "steps_per_epoch", "evaluate": "steps", "predict": "steps"}
_RUNNING = (*_STEPS, "train_on_batch", "test_on_batch", "predict_on_batch")
_TRAINING = ("fit", "train_on_batch")
# What Keras takes beside arrays, and a data set holds in its batches.
_BESIDE = ("y", "sample_weight", "class_weight")
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
    _wrap(kind, "__new__", _make_model, bind=False)
    _wrap(kind, "compile", _compile)
    if keras.config.backend() != "jax":
        return  # Here a model of a strategy is an error, and other models run as usual.
    from keras.src.backend.jax import trainer as keras_trainer

    module: Any = keras_trainer
    for name in _RUNNING:
        _wrap(kind, name, functools.partial(_run, name=name))
    for name in _MAKING:
        _wrap(kind, name, _make)
    _wrap(kind, "_make_function", _bound)
    _wrap(kind, "_symbolic_build", _build)
    _wrap(module.JAXEpochIterator, "_get_distributed_iterator", _iterate)
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


def _make_model(method: Any, kind: Any, args: Any, kwargs: Any) -> Any:
    return _remember(method(kind, *args, **kwargs))


def _compile(method: Any, model: Any, args: Any, kwargs: Any) -> None:
    method(*args, **kwargs)
    _remember(model)


def _remember(model: Any) -> Any:
    if has_strategy():
        _keras.check_backend()
        _strategies[model] = get_strategy()
    return model


def _run(method: Any, model: Any, args: Any, kwargs: Any, name: str) -> Any:
    import keras

    strategy = get_strategy() if has_strategy() else _strategies.get(model)
    if name in _STEPS:
        bound = inspect.signature(method).bind(*args, **kwargs)
        _adapt(bound.arguments, strategy or get_strategy(), name)
        if strategy is not None:
            _copy_generated(bound.arguments)
        args, kwargs = bound.args, bound.kwargs
    if strategy is None or keras.distribution.distribution() is not None:
        return method(*args, **kwargs)
    if strategy.peers is not None:
        _check_same(strategy.peers, model, name)
    _warn_of_operations(strategy)
    if _made_for.get(model) is not strategy:
        for function in _FUNCTIONS:
            setattr(model, function, None)
    _made_for[model] = strategy
    with contextlib.ExitStack() as stack:
        stack.enter_context(strategy.leave_program_mesh())
        stack.enter_context(_make_distribution(strategy).scope())
        if name in _TRAINING and isinstance(strategy, ParameterServerStrategy):
            steps = _schedule_steps(model, strategy)
            if name == "fit":
                stack.enter_context(steps.fitting())
        return method(*args, **kwargs)


def _schedule_steps(model: Any, strategy: ParameterServerStrategy) -> "ScheduledSteps":
    """Makes the training steps of a model run on workers."""
    # Only fits on workers need the coordinator and its imports.
    from armillary.keras._scheduled import ScheduledSteps

    steps = model.train_function
    if not isinstance(steps, ScheduledSteps) or steps.strategy is not strategy:
        # Keras makes no function where there is one.
        steps = model.train_function = ScheduledSteps(model, strategy)
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


def _build(method: Any, model: Any, args: Any, kwargs: Any) -> Any:
    """Builds a model as if there were one replica, because its step runs like that."""
    steps = _find_scheduled_steps(model)
    if steps is not None:
        kwargs = steps.take_over(kwargs)
    with without_strategy():
        return method(*args, **kwargs)


def _make(method: Any, model: Any, args: Any, kwargs: Any) -> Any:
    """Places the variables of a model, and then makes one of its functions."""
    if _is_running_here():
        _place(model)
    method(*args, **kwargs)


def _bound(method: Any, model: Any, args: Any, kwargs: Any) -> Any:
    """Makes a function of a compiled step that waits until a further step may start."""
    if not _is_running_here():
        return method(*args, **kwargs)
    step, *others = args
    strategy = _made_for[model]
    if strategy.split is not None:
        step = partition(step, strategy.split)
    dispatch = strategy.dispatch
    sharding = everywhere(_mesh_of(strategy))
    # Keras fetches the outputs of `predict`, which belong to the global batch.
    is_predict = bool(others or kwargs) and strategy.peers is not None
    gather = jax.jit(lambda outputs: outputs, out_shardings=sharding)

    def bounded_step(state: Any, data: Any) -> tuple[Any, Any]:
        if strategy.peers is not None:
            # Metrics that were reset are arrays of this process only.
            state = jax.tree.map(lambda leaf: _copy_to(leaf, sharding), state)
        dispatch.wait()
        # The step computes global values, so it must not see several replicas, by whose
        # number it would scale.
        with without_strategy():
            outputs, new = step(state, data)
        is_divided = strategy.split is not None
        state = jax.tree.map(_move_like, new, state) if is_divided else new
        outputs = gather(outputs) if is_predict else outputs
        dispatch.started(outputs)
        return outputs, state

    return method(bounded_step, *others, **kwargs)


def _iterate(method: Any, iterator: Any, args: Any, kwargs: Any) -> Iterator[Any]:
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
        is_here = sharding.is_fully_addressable
        put = jax.device_put if is_here else place_parts
        return put(leaf if is_here else np.asarray(leaf), sharding)

    return jax.tree.map(place, data)


def _move_like(value: jax.Array, old: jax.Array) -> jax.Array:
    """Moves a result of a step back to the old place; XLA may choose another one."""
    # Metrics that were reset are not committed to a device.
    is_free = not old.committed
    is_there = is_free or value.sharding.is_equivalent_to(old.sharding, value.ndim)
    return value if is_there else jax.device_put(value, old.sharding)


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
        own.update(np.asarray(as_whole(_keras.value_of(variable))).tobytes())
    if len(set(peers.gather(f"model.{name}", own.hexdigest()))) > 1:
        raise PeerError(
            f"`model.{name}` was called on processes that differ in the weights of the "
            "model, or in the random numbers with which Keras shuffles. Begin all "
            "processes with the same seed: `keras.utils.set_random_seed(0)`."
        )


def _is_running_here() -> bool:
    import keras

    return getattr(keras.distribution.distribution(), "is_of_strategy", False)


def _place(model: Any) -> None:
    """Moves the variables of a model to the places that the strategy gives them."""
    strategy = _made_for[model]
    sharding = everywhere(_mesh_of(strategy))
    homes: dict[int, Any] = {}
    if strategy.split is not None:
        state = State([(model, type(model).__name__)])
        pairs = zip(state.read(), strategy.state_shardings(state), strict=True)
        homes = {id(leaf): home for leaf, home in pairs}
    optimizer = getattr(model, "optimizer", None)
    own = [] if optimizer is None else optimizer.variables
    for variable in [*model.variables, *own, *model.metrics_variables]:
        if not _keras.is_unset(variable):
            value = _keras.value_of(variable)
            _keras.set_value(variable, _copy_to(value, homes.get(id(value), sharding)))


def _mesh_of(strategy: "Strategy") -> Mesh:
    if strategy.mesh is not None:
        return strategy.mesh
    devices = np.asarray(list(strategy.layout.devices))
    return Mesh(devices, (strategy.axis_name,))


@functools.lru_cache(maxsize=16)
def _make_distribution(strategy: "Strategy") -> Any:
    import keras

    base: Any = keras.distribution.DataParallel
    mesh = _mesh_of(strategy)
    axis = strategy.axis_name

    class StrategyDistribution(base):
        """Divides batches if the devices can share them equally; moves no variables."""

        is_of_strategy = True

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


def _adapt(arguments: dict[str, Any], strategy: "Strategy", name: str) -> None:
    """Replaces Armillary's data sets by adapters from which Keras takes batches."""
    import keras

    given = arguments.get

    def adapt(key: str, data: Any, steps: str) -> None:
        dataset, *beside = data
        if key == "x" and name == "fit" and _is_of_workers(dataset, strategy):
            _check_beside(beside, name)
            arguments[key] = _adapt_for_workers(dataset, strategy, given(steps))
            return

        if isinstance(dataset, DatasetCreator):
            _check_beside(beside, name)
            dataset = arguments[key] = dataset()
        if isinstance(dataset, IndexedDataset):
            dataset = strategy.distribute_dataset(dataset)
        if isinstance(dataset, DistributedDataset):
            _check_beside(beside, name)
            _check_dataset(dataset, name, steps, given(steps))
            arguments[key] = _as_adapter(dataset)

    adapt("x", (given("x"), *map(given, _BESIDE)), _STEPS[name])
    data = keras.utils.unpack_x_y_sample_weight(given("validation_data"))
    adapt("validation_data", data, "validation_steps")


def _copy_generated(arguments: dict[str, Any]) -> None:
    """Replaces generators by generators whose batches have arrays of their own."""
    for name in ("x", "validation_data"):
        if inspect.isgenerator(data := arguments.get(name)):
            arguments[name] = copy_batches(data)


def _is_of_workers(dataset: Any, strategy: "Strategy") -> bool:
    """Returns whether each worker of parameter servers reads a data set of its own."""
    if not isinstance(strategy, ParameterServerStrategy):
        return False
    is_distributed = isinstance(dataset, DistributedDataset)
    has_function = is_distributed and dataset.dataset_fn is not None
    return has_function or isinstance(dataset, DatasetCreator)


def _adapt_for_workers(dataset: Any, strategy: Any, steps: Any) -> Any:
    from armillary.keras._scheduled import make_worker_data

    if not steps:
        raise ValueError(
            f"`steps_per_epoch` is {steps!r}, but the data of `model.fit` is made on "
            f"the workers of {strategy!r}, so the end of an epoch is unknown. Pass the "
            "number of steps of all workers together, such as `steps_per_epoch=100`."
        )
    is_creator = isinstance(dataset, DatasetCreator)
    options = dataset.input_options if is_creator else dataset.options
    return make_worker_data(dataset.dataset_fn, options, strategy)


def _check_beside(beside: Any, name: str) -> None:
    """Raises if an argument is passed that must be part of the data set."""
    for argument, value in zip(_BESIDE, beside, strict=False):
        if value is not None:
            raise ValueError(
                f"`model.{name}` was given `{argument}` together with a data set. "
                f"Leave `{argument}` out, and let the data set make batches `(x, y)` "
                "or `(x, y, sample_weight)`."
            )


def _check_dataset(
    dataset: DistributedDataset, name: str, steps_name: str, steps: Any
) -> None:
    """Raises if a data set cannot be read whole."""
    if dataset.per_replica_batches or dataset.options.place_on_device:
        raise ValueError(
            f"`model.{name}` was given a dataset of per-replica batches, or one that "
            "stays on the device, but Keras divides global batches itself. Use "
            "`strategy.distribute_dataset`, or pass the data set as it is."
        )
    if dataset.is_endless and not steps:
        raise ValueError(
            f"`model.{name}` was given a dataset that repeats its data without end. "
            f"Make it without `repeat=True`, or pass `{steps_name}=`."
        )


def _as_adapter(dataset: DistributedDataset) -> Any:
    """Returns an adapter from which Keras takes the global batches."""
    from keras.src.trainers.data_adapters import data_adapter

    base: Any = data_adapter.DataAdapter

    class Adapter(base):
        """Reads the source of a distributed dataset, one pass for each epoch."""

        has_own_arrays = True  # Nobody writes to its batches.
        num_batches = dataset.num_global_batches
        batch_size = partial_batch_size = has_partial_batch = None
        _epoch = 0

        def get_jax_iterator(self) -> Iterator[Any]:
            batches = enumerate(dataset.global_batches(self._epoch), start=1)
            for number, batch in batches:
                # Keras does not read further after the last batch.
                self._epoch += number == self.num_batches
                yield batch
            self._epoch += self.num_batches is None

    return Adapter()
