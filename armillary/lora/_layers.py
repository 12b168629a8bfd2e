"""Layers with an adapter: subclasses of the layers of Flax NNX.

A layer gets its adapter by changing its class, and loses it in the same way. So it
remains the same object at the same path, with the same weight.

The adapter computes in the dtype of the layer's outputs, in which a pretrained model
may be narrower than the adapter.
"""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from armillary.lora._axes import MATRIX, Axes, make_general_axes, parse_equation

A = "lora_a"
B = "lora_b"
SCALE = "lora_scale"
_MARK = "_has_lora"


def _read_matrices(layer: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns `lora_a`, and `lora_b` with the factor of the adapter, in a dtype."""
    a = layer.lora_a[...]
    # In the adapter's own dtype, which may be wider than `dtype`.
    b = layer.lora_b[...] * layer.lora_scale
    return a.astype(dtype), b.astype(dtype)


class _Linear:
    """An `nnx.Linear` with an adapter."""

    def __call__(self: Any, inputs: Any, out_sharding: Any = None) -> jax.Array:
        outputs = _plain(self).__call__(inputs, **_named(out_sharding=out_sharding))
        a, b = _read_matrices(self, outputs.dtype)
        x = jnp.asarray(inputs, outputs.dtype)
        narrow = jnp.matmul(x, a, precision=self.precision)

        # The sum over the rank, with the sharding of the outputs.
        summed = ((narrow.ndim - 1,), (0,))
        no_batch = ((), ())
        change = lax.dot_general(
            narrow,
            b,
            (summed, no_batch),
            precision=self.precision,
            out_sharding=out_sharding,
        )
        return outputs + change


class _LinearGeneral:
    """An `nnx.LinearGeneral` with an adapter."""

    def __call__(self: Any, inputs: Any, out_sharding: Any = None) -> jax.Array:
        outputs = _plain(self).__call__(inputs, **_named(out_sharding=out_sharding))
        a, b = _read_matrices(self, outputs.dtype)
        x = jnp.asarray(inputs, outputs.dtype)

        # As in Flax, the axes of the kernel have the order of the axes of the inputs.
        contracted = sorted(axis % x.ndim for axis in self.axis)
        batch = sorted(axis % x.ndim for axis in self.batch_axis)
        num_batch = len(batch)
        first = range(num_batch)  # the batch axes of `a`, `b` and `narrow`
        own = range(num_batch, num_batch + len(contracted))
        axes = ((contracted, own), (batch, first))
        narrow = lax.dot_general(x, a, axes, precision=self.precision)

        # The sum over the rank, which is the last axis of `narrow`.
        summed = ((narrow.ndim - 1,), (num_batch,))
        change = lax.dot_general(
            narrow,
            b,
            (summed, (first, first)),
            precision=self.precision,
            out_sharding=out_sharding,
        )
        return outputs + change


class _Einsum:
    """An `nnx.Einsum` with an adapter."""

    def __call__(
        self: Any, inputs: Any, einsum_str: str | None = None, out_sharding: Any = None
    ) -> jax.Array:
        # Flax refuses a second equation, so the layer's own equation counts.
        outputs = _plain(self).__call__(
            inputs, **_named(einsum_str=einsum_str, out_sharding=out_sharding)
        )
        a, b = _read_matrices(self, outputs.dtype)
        x = jnp.asarray(inputs, outputs.dtype)

        parsed = parse_equation(self.einsum_str)
        assert parsed is not None  # or `add` has refused the layer
        own, axes, result = parsed
        kept = [letter for letter in own if letter not in axes.contracted]
        between = "".join(kept) + axes.rank
        to_narrow = f"{own},{axes.a}->{between}"
        to_result = f"{between},{axes.b}->{result}"

        narrow = jnp.einsum(to_narrow, x, a, precision=self.precision)
        change = jnp.einsum(
            to_result,
            narrow,
            b,
            precision=self.precision,
            out_sharding=out_sharding,
        )
        return outputs + change


class _Embed:
    """An `nnx.Embed` with an adapter, also where it computes logits (`attend`)."""

    def __call__(self: Any, inputs: Any, out_sharding: Any = None) -> jax.Array:
        outputs = _plain(self).__call__(inputs, **_named(out_sharding=out_sharding))
        a, b = _read_matrices(self, outputs.dtype)
        narrow = jnp.take(a, inputs, axis=0)
        return outputs + jnp.matmul(narrow, b, out_sharding=out_sharding)

    def attend(self: Any, query: Any, out_sharding: Any = None) -> jax.Array:
        outputs = _plain(self).attend(query, **_named(out_sharding=out_sharding))
        a, b = _read_matrices(self, outputs.dtype)
        x = jnp.asarray(query, outputs.dtype)
        # Logits multiply by the transposed weight, so the two matrices change places.
        narrow = jnp.matmul(x, b.T)
        return outputs + jnp.matmul(narrow, a.T, out_sharding=out_sharding)


def _plain(layer: Any) -> Any:
    """Returns a layer as it is without its adapter."""
    return super(type(layer), layer)


def _named(**values: Any) -> dict[str, Any]:
    # A subclass of a user, or an earlier release of Flax, may not take them.
    return {name: value for name, value in values.items() if value is not None}


class Kind(NamedTuple):
    """A class of layers that can have adapters.

    Attributes:
        layer: The class of Flax.
        adapter: The methods of a layer with an adapter.
        weight: The attribute of the weight.
        methods: The methods that use the weight.
    """

    layer: type[nnx.Module]
    adapter: type
    weight: str = "kernel"
    methods: tuple[str, ...] = ("__call__",)


KINDS = (
    Kind(nnx.Linear, _Linear),
    Kind(nnx.LinearGeneral, _LinearGeneral),
    Kind(nnx.Einsum, _Einsum),
    Kind(nnx.Embed, _Embed, "embedding", ("__call__", "attend")),
)


def has_adapter(layer: Any) -> bool:
    return _MARK in vars(type(layer))


def find_kind(layer: Any) -> Kind | None:
    """Returns the kind of a layer, if it is one that can have an adapter."""
    for kind in KINDS:
        if isinstance(layer, kind.layer):
            return kind
    return None


def find_axes(layer: Any) -> tuple[Axes, tuple[int, ...]] | None:
    """Returns the axes of the weight of one layer, and its shape without a stack.

    It returns `None` for an einsum whose kernel no two matrices can replace.
    """
    if isinstance(layer, nnx.Linear):
        return MATRIX, (layer.in_features, layer.out_features)
    if isinstance(layer, nnx.Embed):
        return MATRIX, (layer.num_embeddings, layer.features)

    if isinstance(layer, nnx.LinearGeneral):
        batch = tuple(layer.batch_axis.values())
        inputs = tuple(layer.in_features)
        outputs = tuple(layer.out_features)
        axes = make_general_axes(len(batch), len(inputs), len(outputs))
        return axes, (*batch, *inputs, *outputs)

    if isinstance(layer, nnx.Einsum) and layer.einsum_str is not None:
        parsed = parse_equation(layer.einsum_str)
        if parsed is not None:
            _, axes, _ = parsed
            return axes, tuple(layer.kernel_shape)
    return None


def attach(layer: Any, kind: Kind, a: Any, b: Any, scale: float) -> None:
    """Gives a layer an adapter."""
    layer.lora_a = a
    layer.lora_b = b
    layer.lora_scale = scale
    # Not by `setattr`, with which Flax would take the class for an attribute.
    object.__setattr__(layer, "__class__", _adapted(type(layer), kind.adapter))


def detach(layer: Any) -> None:
    """Takes the adapter from a layer."""
    for name in (A, B, SCALE):
        delattr(layer, name)
    (original,) = type(layer).__bases__
    object.__setattr__(layer, "__class__", original)


@functools.cache
def _adapted(layer: type, adapter: type) -> type:
    """Returns a subclass of a class of layers, with an adapter."""
    # Python changes a class only to one with the same layout, which a second base could
    # change. So the methods are copied.
    members = {"__module__": __name__, "__doc__": adapter.__doc__, _MARK: True}
    for name, value in vars(adapter).items():
        if inspect.isfunction(value):
            members[name] = value

    # Flax gives modules a metaclass of its own, which must make the subclass, too.
    metaclass = type(layer)
    return metaclass(f"LoRA{layer.__name__}", (layer,), members)


# As attributes of this module, because `pickle` finds a class by its name.
for _kind in KINDS:
    _class = _adapted(_kind.layer, _kind.adapter)
    globals()[_class.__name__] = _class
