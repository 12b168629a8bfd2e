"""The content of a checkpoint at one moment, and its description on the disk.

The description is the item `manifest` of a checkpoint folder, in JSON. It has dtype and
shape of each leaf, and the states of Python objects. Leaves without values are in a
part of their own, so that a release that does not know digests misses them by name.
Among the other leaves, it would restore a number in place of each array.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from armillary._checks import list_lines
from armillary._planned import is_planning
from armillary.distribute._global_arrays import is_key

MANIFEST = "manifest/manifest.json"
WITH_DIGEST = " with digest "
"""Stands between the description and the digest of a leaf that is left out."""
_KEY_BYTES = 8  # as of `threefry2x32`


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The description of a leaf without its values."""

    # For example `bfloat16`, or `key<threefry2x32>`, whose shape lacks the last axis.
    dtype: str
    shape: tuple[int, ...]
    # Whether it is a NumPy array or a number, which a step gives JAX's default width.
    is_host: bool = False
    # The digest of a leaf whose values are left out of the checkpoint.
    digest: str | None = None

    def __str__(self) -> str:
        # A leaf of a checkpoint fits the program if these texts are equal.
        dtype = self.dtype
        if self.is_host:
            dtype = jax.dtypes.canonicalize_dtype(dtype).name
        ending = "" if self.digest is None else f"{WITH_DIGEST}{self.digest}"
        return f"{dtype} {self.shape}{ending}"

    @property
    def is_stored(self) -> bool:
        """True if the checkpoint has values of the leaf.

        An array without elements has none, and a leaf that is left out has a digest.
        """
        return 0 not in self.shape and self.digest is None

    @property
    def _item_bytes(self) -> int:
        is_key = self.dtype.startswith("key<")
        return _KEY_BYTES if is_key else jax.numpy.dtype(self.dtype).itemsize

    def own_bytes(self, sharding: jax.sharding.Sharding | None) -> int:
        """Returns the bytes of the parts on this process's devices."""
        if sharding is None:
            return self._item_bytes * math.prod(self.shape)
        part = math.prod(sharding.shard_shape(self.shape))
        return self._item_bytes * part * len(sharding.addressable_devices)

    def different_bytes(self, sharding: jax.sharding.Sharding | None) -> int:
        """Returns the bytes of the different parts on this process's devices."""
        if sharding is None:
            return self.own_bytes(None)
        part = math.prod(sharding.shard_shape(self.shape))
        indices = sharding.addressable_devices_indices_map(self.shape).values()
        # The text of an index, because slices have no hash before Python 3.12.
        return self._item_bytes * part * len(set(map(str, indices)))


def count_bytes(
    shardings: Mapping[str, jax.sharding.Sharding | None],
    specs: Mapping[str, LeafSpec],
) -> int:
    """Returns the bytes that this process reads of the arrays that are described."""
    total = 0
    for name, sharding in shardings.items():
        if name in specs:
            total += specs[name].different_bytes(sharding)
    return total


def group_by_bytes(sizes: Mapping[str, int], most: float) -> list[list[str]]:
    """Returns names in groups of at most `most` bytes, or of one larger array."""
    groups: list[list[str]] = []
    room = 0.0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= size
    return groups


class Manifest(NamedTuple):
    """The description of a checkpoint, as its manifest has it."""

    specs: dict[str, LeafSpec]
    states: dict[str, Any]
    # The progress of a controller's evaluation.
    evaluation: Any


@dataclasses.dataclass(frozen=True)
class Content:
    """The values of a checkpoint at one moment."""

    leaves: dict[str, Any]
    specs: dict[str, LeafSpec]
    # The state of each object as JSON, and the arrays that belong to these states.
    states: dict[str, Any]
    state_arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    # The progress of a controller's evaluation.
    evaluation: Any = None

    @property
    def has_arrays(self) -> bool:
        """True if the checkpoint folder has the item `arrays`."""
        has_leaves = any(spec.is_stored for spec in self.specs.values())
        return has_leaves or bool(self.state_arrays)

    def as_manifest(self) -> str:
        """Returns the description as JSON."""
        leaves: dict[str, dict[str, Any]] = {}
        left_out: dict[str, dict[str, Any]] = {}
        for name, spec in self.specs.items():
            part = leaves if spec.digest is None else left_out
            part[name] = vars(spec)
        manifest = {
            "leaves": leaves,
            "left_out": left_out,
            "states": self.states,
            "evaluation": self.evaluation,
        }
        return json.dumps(manifest)


def describe_leaves(leaves: Mapping[str, Any]) -> dict[str, LeafSpec]:
    """Returns the description of each leaf, or raises an error that names bad ones."""
    specs: dict[str, LeafSpec] = {}
    bad: list[str] = []
    for path, leaf in leaves.items():
        if is_planning() and isinstance(leaf, jax.ShapeDtypeStruct):
            specs[path] = LeafSpec(str(leaf.dtype), tuple(leaf.shape))
            continue
        if is_key(leaf):
            dtype = f"key<{jax.random.key_impl(leaf)}>"
            specs[path] = LeafSpec(dtype, tuple(leaf.shape))
            continue
        is_host = not isinstance(leaf, jax.Array)
        array = np.asarray(leaf) if is_host else leaf
        if _is_numeric(array.dtype):
            specs[path] = LeafSpec(array.dtype.name, tuple(array.shape), is_host)
        else:
            bad.append(f"{path}: {type(leaf).__name__} {leaf!r}")
    if bad:
        raise TypeError(
            f"`Checkpoint` holds {len(bad)} values that are not numeric arrays, and "
            f"only those can be saved:\n{list_lines(bad)}\n"
            "Keep such values in plain attributes, outside variables."
        )
    return specs


def _is_numeric(dtype: np.dtype) -> bool:
    # Not by NumPy, which does not count types such as `bfloat16` among numbers.
    is_bool = jax.dtypes.issubdtype(dtype, np.bool_)
    return is_bool or jax.dtypes.issubdtype(dtype, np.number)


def read_manifest(path: epath.Path) -> Manifest:
    """Returns the description in a checkpoint folder."""
    return parse_manifest((path / MANIFEST).read_text())


def parse_manifest(text: str) -> Manifest:
    """Returns the description that `Content.as_manifest` has written."""
    manifest = json.loads(text)
    leaves = {**manifest["leaves"], **manifest.get("left_out", {})}
    specs: dict[str, LeafSpec] = {}
    for name, spec in leaves.items():
        shape = tuple(spec["shape"])
        digest = spec.get("digest")  # not in checkpoints of older releases
        specs[name] = LeafSpec(spec["dtype"], shape, spec["is_host"], digest)
    return Manifest(specs, manifest["states"], manifest.get("evaluation"))
