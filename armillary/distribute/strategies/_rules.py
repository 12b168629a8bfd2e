"""The rule for the place of each array of a state on a mesh.

In this order, the division of a parameter comes from

1. the array, if it is divided over the same devices already,
2. the annotation of the model, such as the metadata of a variable of Flax,
3. the first of the user's rules that is found in its path,
4. the automatic rule.

Scalars, random keys and metrics are whole on every device. An array of an optimizer is
split like a parameter of the same shape: the parameter whose path has the most names in
common at its end. For example, `optimizer/opt_state/0/mu/first/kernel` is split like
`model/first/kernel`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from armillary._checks import check_instance, list_lines
from armillary.distribute._global_arrays import is_key
from armillary.distribute._new_arrays import is_new
from armillary.distribute.strategies._axis_names import (
    explain_unknown_name,
    find_program_rules,
)
from armillary.state._lift import State, as_array
from armillary.state._slots import AxisNames, LeafKind, Role, describe

AnyMesh = Mesh | AbstractMesh
SMALL = 1024
"""Arrays of fewer values are not split, because collecting them costs too much."""

_WHOLE = "whole: a scalar, key or metric"
_NO_LEADER = "no parameter has this shape"


class Decision(NamedTuple):
    """The division of an array, and the words for the rule that decided it."""

    spec: PartitionSpec
    reason: str


class Rules:
    """Chooses a `PartitionSpec` for each array of a state.

    Args:
        mesh: The devices.
        rules: A `PartitionSpec` for each regular expression.
        logical_rules: The axis of the mesh for each name that a model gives an axis,
            checked by `check_logical_rules`.
    """

    def __init__(
        self,
        mesh: Mesh,
        rules: Mapping[str, PartitionSpec] | None,
        logical_rules: Mapping[str, Any] | None = None,
    ) -> None:
        fix = 'Write `rules={"kernel": PartitionSpec("fsdp", "tensor")}`.'
        check_instance("rules", rules, Mapping | None, fix)
        for path, spec in (rules or {}).items():
            check_instance("rules", path, str, fix)
            check_instance(f'rules["{path}"]', spec, PartitionSpec, fix)
            _check_axes(path, spec, mesh)
        self._rules = {re.compile(path): spec for path, spec in (rules or {}).items()}
        # The rules that have not matched an array of any program yet.
        self._unused = set(self._rules)
        self._logical_rules = logical_rules or {}

    def specs(
        self, state: State, mesh: AnyMesh, *, is_whole: bool
    ) -> list[PartitionSpec]:
        """Returns the spec of each array of a state, in the order of its paths.

        If the state is the whole state of a step, each rule must have matched by now.
        """
        decisions = self.decide(state, mesh)
        if is_whole:
            self._check_used(state)
        return [decision.spec for decision in decisions]

    def decide(self, state: State, mesh: AnyMesh) -> list[Decision]:
        """Returns the division of each array of a state, with the reason."""
        leaves = [as_array(leaf) for leaf in state.read()]
        decisions = [Decision(PartitionSpec(), _WHOLE)] * len(leaves)
        parameters: list[int] = []
        followers: list[int] = []
        rows = zip(leaves, state.kinds, state.of_optimizer, strict=True)
        for index, (leaf, kind, is_of_optimizer) in enumerate(rows):
            if not _may_be_split(leaf, kind):
                continue
            if is_of_optimizer:
                followers.append(index)
            else:
                parameters.append(index)

        annotations = state.axis_names
        for index in parameters:
            path = state.paths[index]
            annotation = annotations[index]
            decisions[index] = self._choose(path, leaves[index], annotation, mesh)

        leaders = _Leaders(state.paths, leaves, parameters)
        for index in followers:
            leaf = leaves[index]
            leader = leaders.find(state.paths[index], leaf)
            if leader is None:
                spec, reason = _automatic(mesh, leaf.shape)
                decisions[index] = Decision(spec, f"{reason} ({_NO_LEADER})")
            else:
                reason = f"like {state.paths[leader]}"
                decisions[index] = Decision(decisions[leader].spec, reason)
        return decisions

    def _choose(
        self,
        path: str,
        leaf: Any,
        annotation: AxisNames | None,
        mesh: AnyMesh,
    ) -> Decision:
        """Returns the division of a parameter: its own, or the one of the rules."""
        # A rule counts as used for an array that it names but does not decide, too.
        matching = [pattern for pattern in self._rules if pattern.search(path)]
        self._unused.difference_update(matching)
        own = _own_spec(leaf, mesh)
        if own is None:
            return self._choose_new(path, leaf, annotation, matching, mesh)

        try:
            new = self._choose_new(path, leaf, annotation, matching, mesh)
        except ValueError:
            # For an array that is divided already, it does not matter.
            return Decision(own, "its own sharding")
        # Such as an array that `strategy.make` has divided.
        is_same = _without_ending(own) == _without_ending(new.spec)
        return Decision(own, new.reason if is_same else "its own sharding")

    def _choose_new(
        self,
        path: str,
        leaf: Any,
        annotation: AxisNames | None,
        matching: Sequence[re.Pattern[str]],
        mesh: AnyMesh,
    ) -> Decision:
        """Returns the division of an array that is not divided yet."""
        if annotation is not None:
            spec = self._follow(path, leaf, annotation, mesh)
            return Decision(spec, f"annotation {annotation.names}")
        if not matching:
            return _automatic(mesh, leaf.shape)

        pattern = matching[0]
        spec = self._rules[pattern]
        misfit = _find_misfit(spec, leaf, mesh)
        if misfit is not None:
            raise ValueError(
                f"`rules` has {pattern.pattern!r}: {spec}, which does not fit {path}, "
                f"{describe(leaf)}: {misfit}. Add an "
                "earlier rule for this array. `PartitionSpec()` leaves it whole on "
                "every device."
            )
        return Decision(spec, f"rule {pattern.pattern!r}")

    def _check_used(self, state: State) -> None:
        """Raises if a rule has matched no parameter of any program."""
        if not self._unused:
            return
        paths: list[str] = []
        has_plain = False
        rows = zip(
            state.paths, state.read(), state.kinds, state.of_optimizer, strict=True
        )
        for path, leaf, kind, is_of_optimizer in rows:
            if is_of_optimizer or not _may_be_split(as_array(leaf), kind):
                continue
            paths.append(path)
            if kind.role is Role.PLAIN:
                has_plain = True
        if not has_plain:
            return
        unused = " and ".join(repr(pattern.pattern) for pattern in self._unused)
        raise ValueError(
            f"`rules` has {unused}, found in none of these paths:\n"
            f"{list_lines(paths)}\n"
            "Correct it, or leave it out: scalars, metrics and random keys need no "
            "rule, and the state of an optimizer follows the parameters."
        )

    def _follow(
        self,
        path: str,
        leaf: Any,
        annotation: AxisNames,
        mesh: AnyMesh,
    ) -> PartitionSpec:
        """Returns the division that a model's annotation asks for."""
        entries: list[Any] = []
        taken: set[str] = set()
        for names in annotation.names:
            axes: list[str] = []
            for name in axes_of(names):
                found = self._axes_for(path, name, annotation, mesh)
                # As in Flax, an axis of the mesh divides only one axis of an array.
                axes += [axis for axis in found if axis not in taken]
                taken.update(found)
            entries.append(tuple(axes) or None)
        spec = PartitionSpec(*entries)
        misfit = _find_misfit(spec, leaf, mesh)
        if misfit is None:
            return spec

        sizes = ", ".join(f"{name!r} has {size}" for name, size in mesh.shape.items())
        raise ValueError(
            f"{path}, {describe(leaf)}, is annotated with {annotation.names}, so its "
            f"division is {spec}, but {misfit}: in the mesh, {sizes}. Change "
            "the mesh or the annotation, or leave a name "
            'whole: `logical_rules={"name": None}`.'
        )

    def _axes_for(
        self,
        path: str,
        name: str,
        annotation: AxisNames,
        mesh: AnyMesh,
    ) -> tuple[str, ...]:
        """Returns the axes of the mesh for one name of an annotation."""
        for own, axes in annotation.rules:
            if own == name:
                return axes_of(axes)
        if name in self._logical_rules:
            return axes_of(self._logical_rules[name])
        for own, axes in find_program_rules():
            if own == name:
                return axes_of(axes)
        if name in mesh.axis_names:
            return (name,)
        reason = explain_unknown_name(name, mesh.axis_names)
        raise ValueError(f"{path} is annotated with {annotation.names}, but {reason}")


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the axes of the mesh that one entry of a `PartitionSpec` names."""
    if entry is None:
        return ()
    has_several = isinstance(entry, tuple | list)
    return tuple(entry) if has_several else (entry,)


def _check_axes(path: str, spec: PartitionSpec, mesh: Mesh) -> None:
    """Raises if the rule for a path names an axis that the mesh lacks, or one twice."""
    for entry in spec:
        for axis in axes_of(entry):
            if axis not in mesh.axis_names:
                raise ValueError(
                    f'`rules["{path}"]` is {spec}, but {axis!r} is not an axis of the '
                    f"mesh. Use some of {list(mesh.axis_names)}."
                )
    NamedSharding(mesh, spec)  # JAX refuses an axis that is named twice.


def check_logical_rules(mesh: Mesh, rules: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a copy of checked rules; raises if one names no axis of the mesh."""
    fix = 'Write `logical_rules={"embed": "fsdp", "heads": None}`.'
    check_instance("logical_rules", rules, Mapping | None, fix)
    for name, axes in (rules or {}).items():
        check_instance("logical_rules", name, str, fix)
        unknown = [axis for axis in axes_of(axes) if axis not in mesh.axis_names]
        if unknown:
            raise ValueError(
                f'`logical_rules["{name}"]` is {axes!r}, but {unknown[0]!r} is not an '
                f"axis of the mesh. Use {list(mesh.axis_names)}, several of them in a "
                "tuple, or `None` to leave the axis whole."
            )
    return dict(rules or {})


def _may_be_split(leaf: Any, kind: LeafKind) -> bool:
    """Returns whether an array may be split: not scalars, keys and metrics."""
    is_array = leaf.ndim > 0 and not is_key(leaf)
    return is_array and kind.role is not Role.METRIC


def _own_spec(leaf: Any, mesh: AnyMesh) -> PartitionSpec | None:
    """Returns the division of an array that is divided over the same mesh already.

    An array that is whole on every device may be so by chance, so it does not count.
    Neither does an array that `strategy.make` has just made: there, its path was a part
    of its path in the step, so a rule may not have matched.
    """
    if is_new(leaf):
        return None
    if isinstance(leaf, Tracer):
        return None
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return None
    is_same = _is_same_mesh(sharding.mesh, mesh)
    fits = is_same and _find_misfit(sharding.spec, leaf, mesh) is None
    return sharding.spec if fits else None


def _without_ending(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Returns the axes of a spec without empty entries at its end."""
    entries = [axes_of(entry) for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return entries


def _is_same_mesh(a: AnyMesh, b: AnyMesh) -> bool:
    """Returns whether two meshes have the same axes and devices; their types differ.

    The mesh of a plan has other devices, so only its axes count.
    """
    if not (isinstance(a, Mesh) and isinstance(b, Mesh)):
        return a.axis_names == b.axis_names
    has_same_shape = a.shape == b.shape
    return has_same_shape and list(a.devices.flat) == list(b.devices.flat)


def _find_misfit(spec: PartitionSpec, leaf: Any, mesh: AnyMesh) -> str | None:
    """Returns why devices cannot share an array equally, or `None` if they can."""
    counts = [math.prod(mesh.shape[axis] for axis in axes_of(entry)) for entry in spec]
    if len(counts) > leaf.ndim:
        return f"it has {leaf.ndim} axes, and the division has {len(spec)}"
    # A spec may be shorter than the shape: the axes at its end are not divided.
    pairs = zip(leaf.shape, counts, strict=False)
    for axis, (size, count) in enumerate(pairs):
        if size % count:
            return f"{count} devices cannot share axis {axis} of {size} equally"
    return None


class _Leaders:
    """Finds the parameter that an array of an optimizer is split like.

    It has the same shape, and shares the most names at the end of its path.
    """

    def __init__(
        self, paths: Sequence[str], leaves: Sequence[Any], parameters: Sequence[int]
    ) -> None:
        # The first parameter of each shape for each end of its path.
        self._by_end: dict[tuple[Any, str], int] = {}
        for index in parameters:
            shape = leaves[index].shape
            for end in _ends_of(paths[index]):
                self._by_end.setdefault((shape, end), index)

    def find(self, path: str, leaf: Any) -> int | None:
        """Returns the index of the parameter, or `None` if there is none."""
        for end in _ends_of(path):
            leader = self._by_end.get((leaf.shape, end))
            if leader is not None:
                return leader
        return None


def _ends_of(path: str) -> list[str]:
    """Returns the ends of a path, such as `a/b/c`, `b/c` and `c`, the longest first."""
    names = path.split("/")
    return ["/".join(names[start:]) for start in range(len(names))]


def _automatic(mesh: AnyMesh, shape: tuple[int, ...]) -> Decision:
    """Returns the division of an array along `fsdp`, on its longest axis that fits."""
    whole = PartitionSpec()
    if "fsdp" not in mesh.shape:
        return Decision(whole, "automatic: the mesh has no axis 'fsdp'")
    count = mesh.shape["fsdp"]
    if count == 1:
        return Decision(whole, "automatic: one device along 'fsdp'")
    if math.prod(shape) < SMALL:
        return Decision(whole, f"automatic: fewer than {SMALL} values")
    fitting = [axis for axis, size in enumerate(shape) if size % count == 0]
    if not fitting:
        return Decision(whole, f"automatic: {count} divides no axis")

    longest = max(fitting, key=lambda axis: shape[axis])
    axes_before = [None] * longest
    return Decision(PartitionSpec(*axes_before, "fsdp"), "automatic")
