"""Rules for the sharding of each array of a state.

Scalars, random keys and metrics are whole on every device. An array of an optimizer is
split like a parameter of the same shape: the parameter whose path has the most names in
common at its end. For example, `optimizer/opt_state/0/mu/first/kernel` is split like
`model/first/kernel`.
"""

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from armillary._checks import check_instance, list_lines
from armillary.distribute._global_arrays import is_key
from armillary.state._lift import State, as_array
from armillary.state._slots import Role, describe

AnyMesh = Mesh | AbstractMesh
SMALL = 1024
"""Arrays of fewer values are not split, because collecting them costs too much."""


class Rules:
    """Chooses a `PartitionSpec` for each array of a state."""

    def __init__(self, mesh: Mesh, rules: Mapping[str, PartitionSpec] | None) -> None:
        fix = 'Write `rules={"kernel": PartitionSpec("fsdp", "tensor")}`.'
        check_instance("rules", rules, Mapping | None, fix)
        for path, spec in (rules or {}).items():
            check_instance("rules", path, str, fix)
            check_instance(f'rules["{path}"]', spec, PartitionSpec, fix)
            NamedSharding(mesh, spec)  # JAX refuses axes that are not in the mesh.
        self._rules = {re.compile(path): spec for path, spec in (rules or {}).items()}
        # The rules that have not matched an array of any program yet.
        self._unused = set(self._rules)

    def specs(self, state: State, mesh: AnyMesh) -> list[PartitionSpec]:
        """Returns the spec of each array of a state, in the order of its paths."""
        leaves = [as_array(leaf) for leaf in state.read()]
        of_optimizer = [part for s in state.slots for part in s.is_of_optimizer()]
        split = [
            i
            for i, (leaf, kind) in enumerate(zip(leaves, state.kinds, strict=True))
            if leaf.ndim and not is_key(leaf) and kind.role is not Role.METRIC
        ]
        specs = [PartitionSpec()] * len(leaves)
        own = [i for i in split if not of_optimizer[i]]
        for i in own:
            specs[i] = self._match(state.paths[i], leaves[i], mesh)
        if self._unused and any(state.kinds[i].role is Role.PLAIN for i in own):
            unused = " and ".join(repr(pattern.pattern) for pattern in self._unused)
            raise ValueError(
                f"`rules` has {unused}, found in none of these paths:\n"
                f"{list_lines(state.paths[i] for i in own)}\n"
                "Correct it, or leave it out: scalars, metrics and random keys need no "
                "rule, and the state of an optimizer follows the parameters."
            )
        for i in set(split).difference(own):
            path = state.paths[i]
            shape = leaves[i].shape
            alike = [j for j in own if leaves[j].shape == shape]
            shared = [(_num_shared(path, state.paths[j]), j) for j in alike]
            most, j = max(shared, key=lambda pair: pair[0], default=(0, 0))
            specs[i] = specs[j] if most else _automatic(mesh, shape)
        return specs

    def _match(self, path: str, leaf: Any, mesh: AnyMesh) -> PartitionSpec:
        found = [pattern for pattern in self._rules if pattern.search(path)]
        self._unused.difference_update(found)
        if not found:
            return _automatic(mesh, leaf.shape)
        spec = self._rules[found[0]]
        sizes = [math.prod(mesh.shape[x] for x in axes_of(entry)) for entry in spec]
        pairs = zip(leaf.shape, sizes, strict=False)
        if len(sizes) > leaf.ndim or any(size % count for size, count in pairs):
            raise ValueError(
                f"`rules` has {found[0].pattern!r}: {spec}, which does not fit {path}, "
                f"{describe(leaf)}: devices cannot share an axis of it equally. Add an "
                "earlier rule for this array. `PartitionSpec()` leaves it whole on "
                "every device."
            )
        return spec


def _automatic(mesh: AnyMesh, shape: tuple[int, ...]) -> PartitionSpec:
    count = mesh.shape["fsdp"]
    fitting = [axis for axis, size in enumerate(shape) if size % count == 0]
    if count == 1 or math.prod(shape) < SMALL or not fitting:
        return PartitionSpec()
    longest = max(fitting, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * longest, "fsdp")


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the axes of the mesh that one entry of a `PartitionSpec` names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _num_shared(path: str, other: str) -> int:
    """Returns the number of equal names at the end of two paths."""
    pairs = zip(reversed(path.split("/")), reversed(other.split("/")), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
