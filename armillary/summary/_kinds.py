"""Values of summaries that are not numbers, as pytrees: distributions, images, text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import check_instance
from armillary._logging import logger
from armillary._shorten import shorten
from armillary.distribute.replica._values import PerReplica
from armillary.typing import PyTree

# Floats of 32 bits with the same first 12 bits share a bucket. These bits are the sign,
# the exponent and three bits of the fraction. So the ends of a bucket are an eighth of
# a power of two apart.
_SHIFT = 20
_NUM_FINITE = 0x7F8  # The later buckets hold infinities and NaN.
NUM_BUCKETS = 1 << (32 - _SHIFT)


@jax.jit
def count_values(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the number of elements of all arrays in each bucket."""
    counts = jnp.zeros(NUM_BUCKETS, jnp.int32)
    for array in arrays:
        floats = jnp.asarray(array, jnp.float32).ravel()
        bits = jax.lax.bitcast_convert_type(floats, jnp.uint32)
        counts = counts.at[bits >> _SHIFT].add(1)
    return counts


class Summary:
    """A value that a method of its own in a `SummaryWriter` writes."""

    kind: ClassVar[str]  # The name of that method.
    # Yields the arguments of the method before the step; its arrays must be known.
    read: Callable[[str, int], Iterator[tuple[Any, ...]]]

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return tuple(vars(self).values()), tuple(vars(self))

    @classmethod
    def tree_unflatten(cls, names: Sequence[str], arrays: Sequence[Any]) -> Self:
        self = object.__new__(cls)
        vars(self).update(zip(names, arrays, strict=True))
        return self


@jax.tree_util.register_pytree_node_class
class Histogram(Summary):
    """A histogram of values of any magnitude: weights, gradients, activations.

    Values are counted on their device, in buckets that are an eighth of a power of two
    wide. Values that are not finite are left out, and a warning is logged.

    Args:
        values: A pytree of arrays; all their elements are counted together.

    Raises:
        TypeError: If a leaf is not an array of numbers, or is a `PerReplica`.
        ValueError: If there is nothing to count.
    """

    kind = "histogram"

    def __init__(self, values: PyTree) -> None:
        self.counts: Any = count_values(as_arrays("values", values))

    def read(self, tag: str, step: int) -> Iterator[tuple[Any, ...]]:
        counts = np.asarray(self.counts, np.int64)
        # The sign is the first bit of a bucket's number.
        positive, negative = counts.reshape(2, -1)
        # The buckets of negative numbers come in the order of their distance from 0.
        finite_negative = negative[:_NUM_FINITE][::-1]
        finite_positive = positive[:_NUM_FINITE]
        finite = np.concatenate([finite_negative, finite_positive])

        count = counts.sum()
        num_left_out = count - finite.sum()
        if num_left_out:
            text = "%s | step: %d | %d of %d values are not finite, and are left out."
            logger.warning(text, tag, step, num_left_out, count)

        # The number of a bucket is the first bits of its smallest float.
        ends = np.arange(_NUM_FINITE + 1, dtype=np.uint32) << _SHIFT
        sizes = ends.view(np.float32).astype(np.float64)
        # The last end would be infinite.
        sizes[-1] = np.finfo(np.float32).max
        edges = np.concatenate([-sizes[:0:-1], sizes])

        # Empty buckets at both ends are left out.
        filled = np.flatnonzero(finite)
        if filled.size:
            first = filled[0]
            stop = filled[-1] + 1
            # There is one more edge than buckets.
            yield tag, edges[first : stop + 1], finite[first:stop]

    def __repr__(self) -> str:
        counts = self.counts
        if not isinstance(counts, np.ndarray):
            # A tracer has no values, and for an array on a device Python would wait.
            return "Histogram(...)"
        return f"Histogram({counts.sum()} values)"


@jax.tree_util.register_pytree_node_class
class Image(Summary):
    """One image, or several of one size.

    Args:
        pixels: An array of shape `(height, width)`, `(height, width, channels)` or
            `(images, height, width, channels)`, with 1, 3 or 4 channels: gray, RGB or
            RGBA. Pixels are of type `uint8`, or floats from 0 to 1. Values outside are
            cut off with a warning, and NaN becomes 0. If there are several images, the
            first is written as `tag/0`.

    Raises:
        TypeError: If `pixels` is not an array of numbers.
        ValueError: If its dtype or shape is not one of these.
    """

    kind = "image"

    def __init__(self, pixels: Any) -> None:
        self.pixels = as_real_array("pixels", pixels)
        dtype = self.pixels.dtype
        shape = tuple(self.pixels.shape)
        is_floating = jnp.issubdtype(dtype, jnp.floating)
        has_dtype = is_floating or dtype == np.uint8

        num_axes = len(shape)
        has_pixels = 2 <= num_axes <= 4 and 0 not in shape
        has_channels = num_axes < 3 or shape[-1] in (1, 3, 4)
        has_shape = has_pixels and has_channels
        if not (has_dtype and has_shape):
            raise ValueError(
                f"`pixels` is of dtype {dtype} and shape {shape}, but it must be of "
                "floats from 0 to 1 or of `uint8`, and of shape ([images,] height, "
                "width[, channels]), with 1, 3 or 4 channels. Use "
                "`pixels[..., None]` for several gray images."
            )

    def read(self, tag: str, step: int) -> Iterator[tuple[Any, ...]]:
        pixels = np.asarray(self.pixels)
        if pixels.dtype != np.uint8:
            pixels = pixels.astype(np.float32)
            is_in_range = (pixels >= 0) & (pixels <= 1)
            if not is_in_range.all():
                text = "%s | step: %d | Pixels are cut off at 0 and 1."
                logger.warning(text, tag, step)
            numbers = np.nan_to_num(pixels)
            pixels = np.clip(numbers, 0, 1) * 255
            pixels = pixels.round().astype(np.uint8)

        is_one_image = pixels.ndim < 4
        if is_one_image:
            height, width = pixels.shape[:2]
            # An image without channels gets one.
            yield tag, pixels.reshape(height, width, -1)
            return
        for index, image in enumerate(pixels):
            yield f"{tag}/{index}", image

    def __repr__(self) -> str:
        return f"Image({tuple(getattr(self.pixels, 'shape', ()))})"


@jax.tree_util.register_static
@dataclass(frozen=True)
class Text(Summary):
    """Text, which TensorBoard shows as Markdown."""

    text: str
    kind = "text"

    def __post_init__(self) -> None:
        check_instance("text", self.text, str, "Use `Text(str(value))`.")

    def read(self, tag: str, step: int) -> Iterator[tuple[Any, ...]]:
        yield tag, self.text


def as_arrays(name: str, values: PyTree) -> list[Any]:
    """Returns the leaves of a pytree; at least one must have elements."""
    # The arrays of a `PerReplica` would each count. As a leaf, it is refused.
    leaves = jax.tree.leaves(values, is_leaf=_is_per_replica)
    arrays = [as_real_array(name, leaf) for leaf in leaves]
    if not any(array.size for array in arrays):
        raise ValueError(f"`{name}` has no elements. Use arrays that have elements.")
    return arrays


def _is_per_replica(value: object) -> bool:
    return isinstance(value, PerReplica)


def as_real_array(name: str, value: Any) -> Any:
    """Returns a value, or the value of a variable, as an array of real numbers."""
    arrays = jax.Array | np.ndarray | np.generic
    is_array = isinstance(value, arrays)
    if not is_array and hasattr(value, "__jax_array__"):
        value = value.__jax_array__()  # A variable; a `PerReplica` raises.

    is_array = isinstance(value, arrays)
    if not is_array or not _is_real(value.dtype):
        raise TypeError(
            f"`{name}` holds {shorten(value)} of type {type(value).__name__}, but it "
            "must be an array of real numbers. Convert it: `jnp.asarray(value)`."
        )
    return value


def _is_real(dtype: Any) -> bool:
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)
