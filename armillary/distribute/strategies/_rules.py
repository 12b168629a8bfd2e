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

How a step says where its own values lie, among the devices that share a model.

After the three methods of `tf.distribute.TPUStrategy`: there a replica has several
logical devices; here those are the devices along the axis `tensor` of a mesh. What they
say are sharding annotations, which XLA follows, and which change no number.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from armillary._checks import check_instance, list_lines
from armillary.distribute._global_arrays import is_key
from armillary.state._lift import State, as_array
from armillary.state._slots import Role, describe

AXIS = "tensor"


def split_over(
    mesh: Mesh | AbstractMesh, tensor: jax.Array, partition_dimensions: Sequence[int]
) -> jax.Array:
    """Returns an array of which each device along `tensor` has a part."""
    parts, count = list(partition_dimensions), mesh.shape[AXIS]
    split = [axis for axis, size in enumerate(parts) if size != 1]
    shape, problem = tensor.shape, None
    if len(parts) != len(shape):
        problem = f"the array has shape {shape}: give one number for each axis"
    elif math.prod(parts) != count or len(split) > 1:
        problem = (
            f"the mesh has {count} devices along 'tensor': split one axis in {count} "
            "parts, and give 1 for the others"
        )
    elif split and shape[split[0]] % count:
        problem = (
            f"axis {split[0]} of shape {shape} has no {count} equal parts: split "
            "another one"
        )
    if problem is not None:
        raise ValueError(f"`partition_dimensions` is {parts}, but {problem}.")
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(parts)
    for axis in split:
        entries[axis] = AXIS
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    return jax.lax.with_sharding_constraint(tensor, sharding)


SMALL = 1024
"""Arrays of fewer values are held whole: to collect one costs more than it saves."""

_RULES_FIX = 'Write `rules={"kernel": PartitionSpec("fsdp", "tensor")}`.'


class ShardingRules:
    """Chooses a `PartitionSpec` for each array of a state.

    Args:
        mesh: The mesh, with an axis `fsdp`.
        rules: From regular expressions, searched for in the paths of arrays that are
            not of an optimizer, to how such arrays are split.

    Raises:
        TypeError: If `rules` or a part of it is of another type.
        ValueError: If a key is no regular expression, or a value does not fit the mesh.
    """

    def __init__(self, mesh: Mesh, rules: Mapping[str, PartitionSpec] | None) -> None:
        self.mesh: Mesh | AbstractMesh = mesh
        if rules is not None:
            check_instance("rules", rules, Mapping, _RULES_FIX)
        self._rules = [
            (_compile(pattern), _check_spec(mesh, pattern, spec))
            for pattern, spec in (rules or {}).items()
        ]
        # The rules that no program had an array for yet.
        self._unused = {pattern for pattern, _ in self._rules}

    def specs(self, state: State) -> list[PartitionSpec]:
        """Returns how each array of a state is split, in the order of its paths."""
        leaves = [as_array(leaf) for leaf in state.read()]
        of_optimizer = [part for s in state.slots for part in s.is_of_optimizer()]
        is_whole = [
            leaf.ndim == 0 or is_key(leaf) or owner.role is Role.METRIC
            for leaf, owner in zip(leaves, state.owners, strict=True)
        ]
        specs = [PartitionSpec()] * len(leaves)
        # The parameters, and what else an optimizer may have made its state like.
        models: dict[tuple[int, ...], list[tuple[list[str], PartitionSpec]]] = {}
        indices = [i for i in range(len(leaves)) if not is_whole[i]]
        own = [i for i in indices if not of_optimizer[i]]
        self._match(state, own, leaves, specs)
        for i in own:
            entry = state.paths[i].split("/"), specs[i]
            models.setdefault(leaves[i].shape, []).append(entry)
        for i in set(indices).difference(own):
            path, shape = state.paths[i].split("/"), leaves[i].shape
            shared = [(_num_shared(path, p), s) for p, s in models.get(shape, [])]
            most, spec = max(shared, key=lambda pair: pair[0], default=(0, None))
            specs[i] = spec if most and spec is not None else self._automatic(shape)
        return specs

    def _match(
        self,
        state: State,
        indices: Sequence[int],
        leaves: Sequence[Any],
        specs: list[PartitionSpec],
    ) -> None:
        """Puts the specs of parameters into `specs`."""
        problems: dict[str, list[str]] = {}
        for i in indices:
            path = state.paths[i]
            found = [rule for rule in self._rules if rule[0].search(path)]
            self._unused.difference_update(pattern for pattern, _ in found)
            if not found:
                specs[i] = self._automatic(leaves[i].shape)
                continue
            pattern, specs[i] = found[0]
            problem = _find_problem(self.mesh, leaves[i].shape, specs[i])
            if problem is not None:
                line = f"{path}: {describe(leaves[i])}, {problem}"
                problems.setdefault(pattern.pattern, []).append(line)
        for pattern, lines in problems.items():
            spec = next(s for p, s in self._rules if p.pattern == pattern)
            raise ValueError(
                f"`rules` has {pattern!r}: {_show(spec)}, which does not fit "
                f"{len(lines)} of the arrays that it matches:\n{list_lines(lines)}\n"
                "Make it match fewer, or put a rule for these before it; "
                "`PartitionSpec()` leaves an array whole on every device."
            )
        roles = [state.owners[i].role for i in indices]
        if self._unused and Role.PLAIN in roles:
            unused = " and ".join(repr(pattern.pattern) for pattern in self._unused)
            raise ValueError(
                f"`rules` has {unused}, found in none of these paths:\n"
                f"{list_lines(state.paths[i] for i in indices)}\n"
                "Correct it, or leave it out. (Rules are regular expressions; scalars, "
                "metrics and random keys need none, and the state of an optimizer "
                "follows the parameters.)"
            )

    def _automatic(self, shape: tuple[int, ...]) -> PartitionSpec:
        count = self.mesh.shape["fsdp"]
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
    """Returns a regular expression."""
    check_instance("rules", pattern, str, f"Its keys are paths. {_RULES_FIX}")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"`rules` has {pattern!r}, which is no regular expression: {error}. It is "
            "searched for in paths such as `model/first/kernel`."
        ) from error


def _check_spec(mesh: Mesh, pattern: str, spec: Any) -> PartitionSpec:
    """Returns a spec that names axes of the mesh, each once."""
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
