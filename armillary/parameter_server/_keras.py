"""Rules to send models and optimizers of Keras to workers and parameter servers.

Keras pickles a model by saving it, which loses the identity of shared variables. With
these rules, its objects are sent like other Python objects. On parameter servers, a
Keras optimizer becomes an Optax transformation that calls the optimizer's own update.
"""

from typing import Any

import optax

from armillary._optional import loaded_keras
from armillary.parameter_server._optimizers import make_stand_in
from armillary.state._adapters import is_variable

# Compiled functions, and the state of `fit` between steps. Workers make their own.
_LOCAL = frozenset(
    """
    _eval_epoch_iterator _jax_state history predict_function test_function
    train_function
    """.split()  # noqa: SIM905
)


def reduce_keras(obj: Any) -> Any:
    """Returns the reduced form of a Keras object, or `NotImplemented` for others."""
    if loaded_keras() is None:
        return NotImplemented
    from keras.src.saving.keras_saveable import KerasSaveable
    from keras.src.utils import backend_utils, tracking

    if isinstance(obj, KerasSaveable):
        held = dict(vars(obj))
        for name in _LOCAL & held.keys():
            held[name] = None
        return make_blank, (type(obj),), held
    if isinstance(obj, backend_utils.DynamicBackend):
        # Without a rule, unpickling looks attributes up in the unfinished object.
        return type(obj), (obj._backend,)
    containers: Any = (tracking.TrackedList, tracking.TrackedDict, tracking.TrackedSet)
    if isinstance(obj, containers):
        items = dict(obj) if isinstance(obj, dict) else list(obj)
        return make_blank, (type(obj),), (vars(obj), items), None, None, _refill
    return NotImplemented


def is_built_optimizer(obj: Any) -> bool:
    """Returns whether an object is a Keras optimizer that has its variables."""
    keras = loaded_keras()
    return keras is not None and isinstance(obj, keras.Optimizer) and obj.built


def make_blank(kind: type) -> Any:
    """Returns an object of a class without calling the class."""
    base: Any = object
    for container in (list, dict, set):
        if issubclass(kind, container):
            base = container
    return base.__new__(kind)


def _refill(container: Any, held: tuple[dict[str, Any], Any]) -> None:
    """Fills a container of Keras by the method of its base, which tracks nothing."""
    attributes, items = held
    classes = type(container).__mro__
    of_others = (kind for kind in classes if not kind.__module__.startswith("keras."))
    base: Any = next(of_others)
    fill = base.extend if base is list else base.update
    fill(container, items)
    vars(container).update(attributes)


def as_transformation(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Returns a Keras optimizer as an Optax transformation of lists of arrays."""
    update = _KerasUpdate(optimizer)
    return optax.GradientTransformationExtraArgs(update.init, update)


class _KerasUpdate:
    def __init__(self, optimizer: Any) -> None:
        _check_optimizer(optimizer)
        self.optimizer = optimizer
        # Variables are known by number, because ids differ in another process.
        before = set(vars(optimizer))
        variables = optimizer._trainable_variables
        self._decayed = [optimizer._use_weight_decay(v) for v in variables]
        # The optimizer has made tables, and a task that reaches it would count as
        # changed because of them.
        for name in set(vars(optimizer)) - before:
            del vars(optimizer)[name]

    def init(self, params: Any) -> Any:
        raise NotImplementedError  # Keras has made the state.

    def __call__(
        self, updates: Any, state: Any, params: Any = None
    ) -> tuple[list[Any], list[Any]]:
        """Returns the changes of the parameters, and the new state."""
        optimizer = self.optimizer
        variables = optimizer._trainable_variables
        everything = [*variables, *optimizer.variables]
        for variable, array in zip(everything, [*params, *state], strict=True):
            variable._shape = array.shape  # A server may have a part of it.

        # The optimizer looks variables up in two tables, by a key of this process.
        keys = [optimizer._var_key(variable) for variable in variables]
        numbers = dict(zip(keys, range(len(keys)), strict=True))
        decayed = dict(zip(keys, self._decayed, strict=True))
        optimizer._trainable_variables_indices = numbers
        optimizer._exclude_from_weight_decay_cache = decayed

        new_params, new_state = optimizer.stateless_apply(
            list(state), list(updates), list(params)
        )
        changes = [new - old for new, old in zip(new_params, params, strict=True)]
        return changes, new_state


def _check_optimizer(optimizer: Any) -> None:
    """Raises if an optimizer of Keras cannot run on parameter servers."""
    name = type(optimizer).__name__
    rate = vars(optimizer).get("_learning_rate")
    keras: Any = loaded_keras()
    schedule = keras.optimizers.schedules.LearningRateSchedule
    is_sent = is_variable(rate) or isinstance(rate, schedule)
    if hasattr(optimizer, "inner_optimizer"):
        problem = (
            f"The optimizer is a `{name}`, which looks at all gradients before any "
            "variable changes. Use the optimizer inside it: with `mixed_bfloat16` in "
            'place of `"mixed_float16"`, losses need no scale.'
        )
    elif optimizer.global_clipnorm is not None:
        problem = (
            f"`global_clipnorm` of the optimizer is {optimizer.global_clipnorm}, but "
            "its gradients go to several parameter servers. Use `clipnorm`, which "
            "clips the gradient of each variable by itself."
        )
    elif callable(rate) and not is_sent:
        problem = (
            f"The learning rate of the optimizer is {rate!r}, a function of this "
            "process. Use a number, or a schedule of `keras.optimizers.schedules`."
        )
    else:
        return
    raise ValueError(problem)


def make_optimizer(kind: type, index: int) -> Any:
    """Returns the stand-in for a Keras optimizer on a worker, without attributes."""
    transformation = make_stand_in(index)

    # `stateless_apply` calls it in a scope that holds the given values.
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        variables = list(trainable_variables or self._trainable_variables)
        _check_given(self, grads, variables)
        state = [variable.value for variable in self.variables]
        values = [variable.value for variable in variables]
        updates: Any
        updates, _ = transformation.update(list(grads), state, values)
        for variable, value, update in zip(variables, values, updates, strict=True):
            variable.assign(value + update)

    return make_blank(type(kind.__name__, (kind,), {"apply": apply}))


def _check_given(optimizer: Any, gradients: Any, variables: Any) -> None:
    """Raises if an optimizer was not given one gradient for each of its variables."""
    own = optimizer._trainable_variables
    has_its_variables = list(map(id, variables)) == list(map(id, own))
    if not has_its_variables or len(gradients) != len(own):
        raise ValueError(
            f"The optimizer {optimizer.name!r} was given {len(variables)} variables in "
            f"a scheduled function, and was built for {len(own)}. Pass all of them, in "
            "the order in which it was built."
        )
    pairs = zip(own, gradients, strict=True)
    missing = [variable.path for variable, gradient in pairs if gradient is None]
    if missing:
        raise ValueError(
            f"The optimizer {optimizer.name!r} was given no gradient for "
            f"{', '.join(missing)} in a scheduled function. Build it for the variables "
            "that the loss depends on."
        )
