"""Scheduled functions on their way to workers.

A function is pickled with all that it reaches, but three kinds of things are named and
not sent: the arrays of variables, which workers read from parameter servers;
optimizers, which run there; and the strategy, of which each worker has its own.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import optax

from armillary.cluster._ray import import_ray
from armillary.distribute.parameter_server import _keras_objects
from armillary.distribute.parameter_server._recorded_updates import make_stand_in


def ship(
    task: Any, arrays: Sequence[Any], named: dict[int, str]
) -> tuple[bytes, list[bytes]]:
    """Returns a pickled task, and the optimizers that it reaches."""
    cloudpickle = import_ray().cloudpickle
    places = {id(array): ("array", i) for i, array in enumerate(arrays)}
    places |= {key: ("named", name) for key, name in named.items()}
    # Keras' optimizers beside what stands for their updates.
    optimizers: list[Any] = []
    transformations: list[Any] = []

    def number(optimizer: Any, make: Callable[[Any], Any]) -> int:
        index = next((i for i, o in enumerate(optimizers) if o is optimizer), None)
        if index is None:
            index = len(optimizers)
            optimizers.append(optimizer)
            transformations.append(make(optimizer))
        return index

    class Pickler(cloudpickle.CloudPickler):
        def persistent_id(self, obj: Any) -> Any:
            return places.get(id(obj))

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, optax.GradientTransformation):
                return make_stand_in, (number(obj, lambda own: own),)
            reduced = _keras_objects.reduce_keras(obj)
            if reduced is NotImplemented:
                return super().reducer_override(obj)
            if _keras_objects.is_optimizer(obj) and obj.built:
                index = number(obj, _keras_objects.as_transformation)
                make = _keras_objects.make_optimizer
                return make, (type(obj), index), *reduced[2:]
            return reduced

    buffer = io.BytesIO()
    try:
        Pickler(buffer, protocol=5).dump(task)
    except (TypeError, pickle.PicklingError, AttributeError) as error:
        raise TypeError(
            "A scheduled function cannot be sent to workers, since something that it "
            f"reaches cannot be pickled ({error}). Hold files, locks, threads, devices "
            "and their like elsewhere, or make them inside the function."
        ) from error
    dump = _keras_objects.dump_transformation
    return buffer.getvalue(), [dump(t, cloudpickle) for t in transformations]


def unship(payload: bytes, arrays: Sequence[Any], find: Callable[[str], Any]) -> Any:
    """Returns a task on a worker."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            kind, value = pid
            return arrays[value] if kind == "array" else find(value)

    return Unpickler(io.BytesIO(payload)).load()


def load_transformation(dumped: bytes) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer, on the coordinator or a parameter server."""
    init, update = import_ray().cloudpickle.loads(dumped)
    return optax.with_extra_args_support(optax.GradientTransformation(init, update))
