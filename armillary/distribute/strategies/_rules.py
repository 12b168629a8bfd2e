"""Rules for the sharding of each array of a state.

Scalars, random keys and metrics are whole on every device. An array of an optimizer is
split like a parameter of the same shape: the parameter whose path has the most names in
common at its end. For example, `optimizer/opt_state/0/mu/first/kernel` is split like
`model/first/kernel`.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from armillary._checks import check_instance, list_lines
from armillary.distribute._global_arrays import is_key
from armillary.state._lift import State, as_array
from armillary.state._slots import LeafKind, Role, describe

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
        specs = [PartitionSpec()] * len(leaves)
        parameters: list[int] = []
        followers: list[int] = []
        pairs = zip(leaves, state.kinds, state.of_optimizer, strict=True)
        for index, (leaf, kind, is_of_optimizer) in enumerate(pairs):
            if _may_be_split(leaf, kind):
                found = followers if is_of_optimizer else parameters
                found.append(index)

        for index in parameters:
            specs[index] = self._match(state.paths[index], leaves[index], mesh)
        if any(state.kinds[index].role is Role.PLAIN for index in parameters):
            self._check_used([state.paths[index] for index in parameters])

        for index in followers:
            leader = _find_leader(state.paths, leaves, index, parameters)
            if leader is None:
                specs[index] = _automatic(mesh, leaves[index].shape)
            else:
                specs[index] = specs[leader]
        return specs

    def _check_used(self, paths: list[str]) -> None:
        """Raises if a rule has matched no parameter of any program."""
        if not self._unused:
            return
        unused = " and ".join(repr(pattern.pattern) for pattern in self._unused)
        raise ValueError(
            f"`rules` has {unused}, found in none of these paths:\n"
            f"{list_lines(paths)}\n"
            "Correct it, or leave it out: scalars, metrics and random keys need no "
            "rule, and the state of an optimizer follows the parameters."
        )

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


def _may_be_split(leaf: Any, kind: LeafKind) -> bool:
    """Returns whether an array may be split: not scalars, keys and metrics."""
    is_array = leaf.ndim > 0 and not is_key(leaf)
    return is_array and kind.role is not Role.METRIC


def _find_leader(
    paths: Sequence[str], leaves: Sequence[Any], index: int, parameters: Sequence[int]
) -> int | None:
    """Returns the parameter that an array of an optimizer is split like, if any.

    It has the same shape, and shares the most names at the end of its path.
    """
    leader = None
    most = 0
    for parameter in parameters:
        if leaves[parameter].shape != leaves[index].shape:
            continue
        num_shared = _num_shared(paths[index], paths[parameter])
        if num_shared > most:
            leader = parameter
            most = num_shared
    return leader


def _automatic(mesh: AnyMesh, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the division of an array along `fsdp`, on its longest axis that fits."""
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
