"""Which part of each array of a state every device of a mesh holds.

    array                                       held
    a scalar, a random key, of a metric         whole, by every device
    of an optimizer, made like a parameter      as that parameter
    at a path that a rule matches               as the first such rule says
    another one, of `SMALL` values or more      split over the axis `fsdp`, along its
                                                longest axis that divides
    anything else                               whole, by every device

An array of an optimizer is made like the parameter of its shape that shares most of the
end of its path: `optimizer/opt_state/0/mu/first/kernel` like `model/first/kernel`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from armillary._checks import check_instance, list_lines
from armillary.distribute._global_arrays import is_key
from armillary.state._lift import State, as_array
from armillary.state._slots import Role, describe

SMALL = 1024
"""Arrays of fewer values are held whole: to collect one costs more than it saves."""

_RULES_FIX = 'Write `rules={"kernel": PartitionSpec("fsdp", "tensor")}`.'


class ShardingRules:
    """Chooses a `PartitionSpec` for each array of a state."""

    def __init__(self, mesh: Mesh, rules: Mapping[str, PartitionSpec] | None) -> None:
        if rules is not None:
            check_instance("rules", rules, Mapping, _RULES_FIX)
        self._rules = [
            (_compile(pattern), _check_spec(mesh, pattern, spec))
            for pattern, spec in (rules or {}).items()
        ]
        # The rules that no program had an array for yet.
        self._unused = {pattern for pattern, _ in self._rules}

    def specs(self, state: State, mesh: Mesh | AbstractMesh) -> list[PartitionSpec]:
        """Returns how each array of a state is split, in the order of its paths."""
        leaves = [as_array(leaf) for leaf in state.read()]
        of_optimizer = [part for s in state.slots for part in s.is_of_optimizer()]
        split = [
            i
            for i, (leaf, owner) in enumerate(zip(leaves, state.owners, strict=True))
            if leaf.ndim and not is_key(leaf) and owner.role is not Role.METRIC
        ]
        own = [i for i in split if not of_optimizer[i]]
        specs = [PartitionSpec()] * len(leaves)
        for i, spec in zip(own, self._match(state, own, leaves, mesh), strict=True):
            specs[i] = spec
        for i in set(split).difference(own):
            path, shape = state.paths[i].split("/"), leaves[i].shape
            alike = [j for j in own if leaves[j].shape == shape]
            shared = [(_num_shared(path, state.paths[j].split("/")), j) for j in alike]
            most, j = max(shared, key=lambda pair: pair[0], default=(0, 0))
            specs[i] = specs[j] if most else _automatic(mesh, shape)
        return specs

    def _match(
        self,
        state: State,
        indices: Sequence[int],
        leaves: Sequence[Any],
        mesh: Mesh | AbstractMesh,
    ) -> list[PartitionSpec]:
        specs: list[PartitionSpec] = []
        misfits: dict[int, list[str]] = {}
        for i in indices:
            path, shape = state.paths[i], leaves[i].shape
            found = [n for n, (p, _) in enumerate(self._rules) if p.search(path)]
            self._unused.difference_update(self._rules[n][0] for n in found)
            spec = self._rules[found[0]][1] if found else _automatic(mesh, shape)
            specs.append(spec)
            problem = _find_problem(mesh, shape, spec)
            if problem is not None:
                line = f"{path}: {describe(leaves[i])}, {problem}"
                misfits.setdefault(found[0], []).append(line)
        for n, lines in misfits.items():
            pattern, spec = self._rules[n]
            raise ValueError(
                f"`rules` has {pattern.pattern!r}: {_show(spec)}, which does not fit "
                f"{len(lines)} of the arrays that it matches:\n{list_lines(lines)}\n"
                "Make it match fewer, or put a rule for these before it; "
                "`PartitionSpec()` leaves an array whole on every device."
            )
        if self._unused and any(state.owners[i].role is Role.PLAIN for i in indices):
            unused = " and ".join(repr(pattern.pattern) for pattern in self._unused)
            raise ValueError(
                f"`rules` has {unused}, found in none of these paths:\n"
                f"{list_lines(state.paths[i] for i in indices)}\n"
                "Correct it, or leave it out: scalars, metrics and random keys need no "
                "rule, and the state of an optimizer follows the parameters."
            )
        return specs


def _automatic(mesh: Mesh | AbstractMesh, shape: tuple[int, ...]) -> PartitionSpec:
    count = mesh.shape["fsdp"]
    fitting = [axis for axis, size in enumerate(shape) if size % count == 0]
    if count == 1 or math.prod(shape) < SMALL or not fitting:
        return PartitionSpec()
    longest = max(fitting, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * longest, "fsdp")


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the axes of the mesh that one entry of a `PartitionSpec` names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _show(spec: PartitionSpec) -> str:
    # JAX has shortened the name of the type to `P`, which a program need not know.
    return f"PartitionSpec({', '.join(map(repr, spec))})"


def _num_shared(path: list[str], other: list[str]) -> int:
    """Returns how many names at the end of two paths are equal."""
    pairs = zip(reversed(path), reversed(other), strict=False)
    differ = [a != b for a, b in pairs]
    return differ.index(True) if True in differ else len(differ)


def _compile(pattern: Any) -> re.Pattern[str]:
    check_instance("rules", pattern, str, f"Its keys are paths. {_RULES_FIX}")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"`rules` has {pattern!r}, which is no regular expression: {error}. It is "
            "searched for in paths such as `model/first/kernel`."
        ) from error


def _check_spec(mesh: Mesh, pattern: str, spec: Any) -> PartitionSpec:
    name = f'rules["{pattern}"]'
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"`{name}` is {spec!r} of type {type(spec).__name__}, but it must be a "
            f"`PartitionSpec`. {_RULES_FIX}"
        )
    named = [axis for entry in spec for axis in axes_of(entry)]
    unknown = [axis for axis in named if axis not in mesh.axis_names]
    if unknown or len(set(named)) < len(named):
        known = ", ".join(map(repr, mesh.axis_names))
        problem = f"the axis {unknown[0]!r}" if unknown else "an axis twice"
        raise ValueError(
            f"`{name}` is {_show(spec)}, which names {problem}. Use each of {known} "
            "once, and `None` for an axis of the array that is not split."
        )
    return spec


def _find_problem(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], spec: PartitionSpec
) -> str | None:
    if len(spec) > len(shape):
        return f"which lacks axis {len(shape)}"
    for axis, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        count = math.prod(mesh.shape[name] for name in axes_of(entry))
        if size % count:
            return f"of which {count} devices cannot share axis {axis}"
    return None
