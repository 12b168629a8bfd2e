"""Adapters for a whole model: adds, merges and removes them.

All errors come before the model changes, and name each weight by its path.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from armillary._checks import (
    check_instance,
    check_positive,
    check_positive_int,
    counted,
    list_lines,
)
from armillary.distribute._global_arrays import as_global, everywhere, is_on_host
from armillary.distribute.replica._program_mesh import without_program_mesh
from armillary.lora._axes import Axes
from armillary.lora._layers import (
    KINDS,
    Kind,
    attach,
    detach,
    find_axes,
    find_kind,
    has_adapter,
)
from armillary.state._slots import Slot, is_array
from armillary.state._walk import Walk

_Model = TypeVar("_Model", bound=nnx.Module)
_MODEL_FIX = "Use a model of Flax NNX."
# The metadata of a variable that names its axes, in all releases of Flax.
_AXIS_NAMES = ("out_sharding", "sharding_names", "sharding")


class _Weight(NamedTuple):
    """A weight that gets an adapter."""

    path: str
    layer: Any
    kind: Kind
    axes: Axes
    variable: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, with the axes of a stack of layers first."""
        return self.variable.get_value().shape


def add(
    model: nnx.Module,
    *,
    rank: int,
    where: str,
    rngs: nnx.Rngs,
    alpha: float | None = None,
) -> list[str]:
    """Adds a LoRA adapter to each weight whose path matches.

    A layer with an adapter computes with `weight + alpha / rank * lora_a @ lora_b`.
    At first, `lora_b` is 0 (for an embedding, `lora_a`), so the model's outputs do not
    change. The source of the method is Hu et al., "LoRA: Low-Rank Adaptation of Large
    Language Models", https://arxiv.org/abs/2106.09685.

    The layers are changed in place, and remain the same objects. `nnx.Linear`,
    `nnx.LinearGeneral`, `nnx.Einsum` and `nnx.Embed` can have adapters, also inside
    `nnx.MultiHeadAttention`. In a stack of layers of `nnx.vmap`, with the axes of the
    stack first, each layer gets an adapter of its own.

    Make the optimizer after this call, with `wrt=nnx.LoRAParam`.

    Args:
        model: The model.
        rank: The columns of `lora_a`, and the rows of `lora_b`: at most the rank that
            one of the weights can have.
        where: A regular expression that is found in the paths of the weights, such as
            `"attention/.*kernel"`. `armillary.summarize(model)` shows the paths.
        rngs: The random numbers for the first values of the adapters.
        alpha: The factor of the adapters, times `rank`, a positive number. `None` means
            `rank`, so that the factor is 1.

    Returns:
        The paths of the weights that have adapters now.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range, `where` is not a regular expression, it
            matches nothing, or it matches a parameter that cannot have an adapter. The
            model is not changed then.
    """
    check_instance("model", model, nnx.Module, _MODEL_FIX)
    check_instance("rngs", rngs, nnx.Rngs, "Use `rngs=nnx.Rngs(1)`.")
    rank = check_positive_int("rank", rank)
    scale = 1.0
    if alpha is not None:
        # With 0, the adapters would never learn.
        scale = check_positive("alpha", alpha, f"Use `alpha={2 * rank}`.") / rank
    _check_has_stream(rngs)

    weights = _find_weights(model, where)
    most = max(map(_find_full_rank, weights))
    check_positive_int("rank", rank, most, "No weight has more rows and columns.")

    # All are made before the first one changes the model.
    pairs = [_make_matrices(weight, rank, rngs) for weight in weights]
    for weight, (a, b) in zip(weights, pairs, strict=True):
        attach(weight.layer, weight.kind, a, b, scale)
    return [weight.path for weight in weights]


def merge(model: _Model) -> _Model:
    """Returns a copy of a model whose weights include the adapters.

    The copy consists of plain layers, to be exported or served. `model` keeps its
    adapters and its base, so nothing needs to be subtracted to train on. Each merged
    weight is a new array with the dtype and the sharding of the old one. So in
    `bfloat16`, it is rounded, and the outputs may differ a little. Batch statistics and
    random keys are copied. The two models share all other parameters: if you train
    parameters other than the adapters, merge again afterwards.

    In a job of several processes, all of them must call it.

    Args:
        model: A model with adapters.

    Returns:
        The copy.

    Raises:
        TypeError: If `model` is not a model of Flax NNX.
        ValueError: If it has no adapters.
    """
    _check_has_adapters(model)
    merged = nnx.clone(model)
    for _, layer in _find_adapted(merged):
        kind = find_kind(layer)
        found = find_axes(layer)
        assert kind is not None and found is not None
        axes, _ = found
        variable = getattr(layer, kind.weight)
        with without_program_mesh():
            weight = _add_product(layer, variable.get_value(), axes)
            variable.set_value(weight)
        detach(layer)
    _copy_other_arrays(merged)
    return merged


def _copy_other_arrays(model: nnx.Module) -> None:
    """Gives a model its own batch statistics and random keys.

    Training changes them without an optimizer, and donates the old arrays to the step.
    A clone shares these arrays, so it would lose them.
    """
    walk = Walk([(model, "")])
    for slot in walk.slots.values():
        if not slot.is_parameter():
            with without_program_mesh():
                slot.write([array.copy() for array in slot.read()])


def remove(model: nnx.Module) -> None:
    """Takes all adapters from a model, in place.

    The weights were never changed, so the model is its base again, bit for bit.

    Args:
        model: A model with adapters.

    Raises:
        TypeError: If `model` is not a model of Flax NNX.
        ValueError: If it has no adapters.
    """
    _check_has_adapters(model)
    for _, layer in _find_adapted(model):
        detach(layer)


def base(model: nnx.Module) -> list[nnx.Variable]:
    """Returns the frozen variables of a model: all parameters except the adapters.

    It is the value for `armillary.Checkpoint(..., leave_out=...)`. Batch statistics and
    random keys are not in it, because they change in training. The adapters may come
    from `add`, from `nnx.LoRA` or from Qwix.

    Args:
        model: A model with adapters.

    Returns:
        The variables of type `nnx.Param` that are not of type `nnx.LoRAParam`.

    Raises:
        TypeError: If `model` is not a model of Flax NNX.
        ValueError: If it has no adapters, or no other parameters.
    """
    check_instance("model", model, nnx.Module, _MODEL_FIX)
    walk = Walk([(model, "")])
    variables = [slot.variable for slot in walk.slots.values() if slot.is_parameter()]
    frozen = [
        variable for variable in variables if not isinstance(variable, nnx.LoRAParam)
    ]
    num_adapters = len(variables) - len(frozen)
    if not frozen or not num_adapters:
        raise ValueError(
            f"`model` has {counted(len(variables), 'parameter')}, of which "
            f"{num_adapters} are of type `nnx.LoRAParam`, but a base needs adapters "
            "and other parameters. Call `armillary.lora.add(model, ...)` first."
        )
    return frozen


def _check_has_stream(rngs: nnx.Rngs) -> None:
    """Raises if nothing can be drawn for parameters."""
    try:
        rngs["params"]
    except (AttributeError, KeyError) as error:
        raise ValueError(
            "`rngs` has neither a stream `params` nor a default, but the first values "
            "of adapters come from it. Use `rngs=nnx.Rngs(1)`."
        ) from error


def _find_weights(model: nnx.Module, where: str) -> list[_Weight]:
    """Returns the weights whose paths match, or raises if one cannot be adapted."""
    pattern = _compile(where)
    walk = Walk([(model, "")])
    parameters: list[Slot] = []
    for slot in walk.slots.values():
        is_adapter = isinstance(slot.variable, nnx.LoRAParam)
        if slot.is_parameter() and not is_adapter:
            parameters.append(slot)

    matching = [slot for slot in parameters if pattern.search(slot.path)]
    if not matching:
        raise ValueError(
            f"`where` is {where!r}, found in none of these paths:\n"
            f"{list_lines(slot.path for slot in parameters)}\n"
            "Correct it: it is a regular expression for the paths of weights that "
            "`armillary.summarize(model)` shows."
        )

    layers = _find_layers(walk)
    weights: list[_Weight] = []
    refused: list[str] = []
    for slot in matching:
        found = _as_weight(slot, layers.get(slot.key, []))
        if isinstance(found, str):
            refused.append(f"{slot.path}: {found}")
        else:
            weights.append(found)
    if refused:
        names = ", ".join(f"`nnx.{kind.layer.__name__}`" for kind in KINDS)
        fix = "Let `where` match only the weights of such layers."
        if weights:
            fix += f" For example, it also matches {weights[0].path!r}, which is one."
        raise ValueError(
            f"`where` is {where!r}, and {counted(len(refused), 'parameter')} that it "
            f"matches cannot have an adapter:\n{list_lines(refused)}\n"
            f"An adapter needs the weight of one of {names}. {fix}"
        )
    return weights


def _compile(where: str) -> re.Pattern[str]:
    fix = 'Use `where="attention/.*kernel"`.'
    check_instance("where", where, str, fix)
    try:
        return re.compile(where)
    except re.error as error:
        raise ValueError(
            f"`where` is {where!r}, but it must be a regular expression: {error}. {fix}"
        ) from error


def _find_layers(walk: Walk) -> dict[Any, list[Any]]:
    """Returns the layers of each weight, by the key of the weight's slot."""
    layers: dict[Any, list[Any]] = {}
    for node in walk.nodes.values():
        kind = find_kind(node.value)
        if kind is not None:
            key = id(getattr(node.value, kind.weight))
            layers.setdefault(key, []).append(node.value)
    return layers


def _as_weight(slot: Slot, layers: list[Any]) -> _Weight | str:
    """Returns a weight that can have an adapter, or the reason why it cannot."""
    if not layers:
        return "it is not the weight of such a layer"
    if len(layers) > 1:
        return f"{len(layers)} layers share it"
    [layer] = layers
    if has_adapter(layer):
        return "it has an adapter already (`armillary.lora.remove(model)` takes it)"

    kind = find_kind(layer)
    assert kind is not None
    own_class = type(layer)
    for method in kind.methods:
        # A method of a subclass may compute something else with the weight.
        is_own = getattr(own_class, method) is not getattr(kind.layer, method)
        if is_own:
            return f"`{own_class.__name__}` has a `{method}` of its own"

    problem = _find_wrong_value(slot.variable.get_value())
    if problem:
        return problem
    found = find_axes(layer)
    if found is None:
        equation = layer.einsum_str
        return f"no two matrices can replace the kernel of the equation {equation!r}"

    axes, shape = found
    own = slot.variable.get_value().shape
    of_one_layer = own[len(own) - len(shape) :]
    if of_one_layer != shape:
        return (
            f"its shape is {own}, and the layer's is {shape}: the axes of a stack of "
            "layers must come first"
        )
    return _Weight(slot.path, layer, kind, axes, slot.variable)


def _find_wrong_value(value: Any) -> str:
    """Returns why the value of a weight cannot have an adapter; empty if it can."""
    is_planned = isinstance(value, jax.ShapeDtypeStruct)
    if not is_array(value) and not is_planned:
        kind = f"{type(value).__module__}.{type(value).__name__}"
        return f"its value is a `{kind}`, not an array of JAX (`jnp.asarray`)"
    # A sum with an adapter would be rounded to whole numbers, or lack its scale.
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    if not is_float or value.dtype.itemsize == 1:
        return f"its dtype is {value.dtype}; for a quantized base, use QLoRA by Qwix"
    return ""


def _find_full_rank(weight: _Weight) -> int:
    """Returns the smaller number of rows and columns of a weight."""
    axes = weight.axes
    shape = weight.shape
    of_one_layer = shape[len(shape) - len(axes.letters) :]
    sizes = dict(zip(axes.letters, of_one_layer, strict=True))

    outputs = set(axes.letters) - set(axes.batch + axes.contracted)
    rows = math.prod(sizes[letter] for letter in axes.contracted)
    columns = math.prod(sizes[letter] for letter in outputs)
    return min(rows, columns)


def _make_matrices(
    weight: _Weight, rank: int, rngs: nnx.Rngs
) -> tuple[nnx.LoRAParam, nnx.LoRAParam]:
    """Returns the first values of an adapter, one of which is 0."""
    axes = weight.axes
    shape_a = axes.pick(axes.a, weight.shape, rank)
    shape_b = axes.pick(axes.b, weight.shape, rank)
    is_lookup = weight.kind.weight == "embedding"
    if is_lookup:
        # Rows of an embedding are looked up in `lora_a`, and then multiplied by
        # `lora_b`. So the values of `lora_b` do not depend on the number of rows.
        initialize = _make_initializer(weight, axes.b, summed=axes.rank)
        value_a = jnp.zeros(shape_a, jnp.float32)
        value_b = initialize(rngs.params(), shape_b, jnp.float32)
    else:
        initialize = _make_initializer(weight, axes.a, summed=axes.contracted)
        value_a = initialize(rngs.params(), shape_a, jnp.float32)
        value_b = jnp.zeros(shape_b, jnp.float32)

    a = nnx.LoRAParam(value_a)
    b = nnx.LoRAParam(value_b)
    _copy_axis_names(weight, a, b)
    return a, b


def _make_initializer(weight: _Weight, letters: str, summed: str) -> Any:
    """Returns the initializer of the matrix with these axes, by the axes it sums."""
    num_stacked = len(weight.shape) - len(weight.axes.letters)
    place_of = {letter: num_stacked + i for i, letter in enumerate(letters)}
    batch = [place_of[letter] for letter in weight.axes.batch]
    return jax.nn.initializers.variance_scaling(
        2.0,  # He's initialization, as of `nnx.LoRA`
        "fan_in",
        "uniform",
        in_axis=[place_of[letter] for letter in summed],
        out_axis=num_stacked + len(letters) - 1,
        # The variance is the same for one layer and for a stack.
        batch_axis=[*range(num_stacked), *batch],
    )


def _copy_axis_names(weight: _Weight, a: nnx.LoRAParam, b: nnx.LoRAParam) -> None:
    """Gives the matrices the names that the model gives the axes of the weight."""
    axes = weight.axes
    metadata = weight.variable.get_metadata()
    for name in _AXIS_NAMES:
        names = metadata.get(name)
        if not names:
            continue
        # As in a `PartitionSpec`, the last axes need no name.
        unnamed = [None] * (len(weight.shape) - len(names))
        names = (*names, *unnamed)
        a.set_metadata(name, axes.pick(axes.a, names, None))
        b.set_metadata(name, axes.pick(axes.b, names, None))

    rules = metadata.get("sharding_rules")
    if rules:
        a.set_metadata("sharding_rules", rules)
        b.set_metadata("sharding_rules", rules)


def _find_adapted(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Yields each layer that has an adapter, with its path."""
    for node in Walk([(model, "")]).nodes.values():
        if has_adapter(node.value):
            yield node.path, node.value


def _check_has_adapters(model: nnx.Module) -> None:
    check_instance("model", model, nnx.Module, _MODEL_FIX)
    if next(_find_adapted(model), None) is None:
        raise ValueError(
            f"`model` is a `{type(model).__name__}` without adapters. Call "
            "`armillary.lora.add(model, ...)` first."
        )


def _add_product(layer: Any, weight: jax.Array, axes: Axes) -> jax.Array:
    """Returns `weight + scale * a @ b`, with the dtype and sharding of the weight."""
    home = weight.sharding
    if is_on_host(weight):  # where nothing is computed
        weight = jax.device_put(weight, home.with_memory_kind("device"))
    own_a = _put_next_to(layer.lora_a.get_value(), home)
    own_b = _put_next_to(layer.lora_b.get_value(), home)

    # The sum is rounded only once, to the dtype of the weight.
    dtype = jnp.promote_types(weight.dtype, jnp.float32)

    def compute(weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        a = a.astype(dtype)
        b = b.astype(dtype)
        product = jnp.einsum(axes.product, a, b, precision="highest")
        total = weight.astype(dtype) + product * layer.lora_scale
        return total.astype(weight.dtype)

    # With the sharding, because each device computes only its part.
    return jax.jit(compute, out_shardings=home)(weight, own_a, own_b)


def _put_next_to(matrix: jax.Array, home: Any) -> jax.Array:
    """Returns a matrix of an adapter on the devices of its weight.

    Before the first step, new adapters are not there yet.
    """
    if not isinstance(home, NamedSharding):
        return matrix
    if matrix.sharding.device_set == home.device_set:
        return matrix
    return as_global(matrix, everywhere(home.mesh))
