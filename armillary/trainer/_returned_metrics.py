"""Totals and names of the metrics that a pure step returns.

For all kinds of metrics, a loop adds up integers, the parts of `Counts`. A plain number
or array adds to the integers of a sum, and to a number of examples. A metric object
adds the integers that stand for its values. After the loop, the host computes the
values from the totals.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import check_methods
from armillary.state._slots import Trait, describe, join_keys, with_trait
from armillary.trainer._hook_code import without_python
from armillary.trainer._needs_room import NeedsRoom
from armillary.typing import Batch, Output

if TYPE_CHECKING:
    from armillary.metrics._parts import MetricStructure

_Result = TypeVar("_Result")
# Enough for 16 plain metrics. A step with more is traced again, once.
_FIRST_ROOM = 16 * 66


def with_room_for_metrics(run: Callable[[], _Result]) -> _Result:
    """Calls a function that traces a step, and again if the metrics need more room."""
    while True:
        try:
            return run()
        except NeedsRoom as need:
            need.make_room()


class Totals(NamedTuple):
    """An output that has no names yet: the integers of all metrics of a loop."""

    parts: Any


class Spec(NamedTuple):
    """The metrics of a step: their names, and which of them are metric objects."""

    structure: Any
    objects: "tuple[MetricStructure | None, ...]"

    @property
    def names(self) -> str:
        tree = self.structure.unflatten(range(len(self.objects)))
        names: list[str] = []
        for path, _ in jax.tree_util.tree_leaves_with_path(tree):
            names.append(join_keys("", path))
        return ", ".join(names) or "none"

    @property
    def num_plain(self) -> int:
        return self.objects.count(None)

    @property
    def num_integers(self) -> int:
        from armillary.metrics._parts import NUM_PER_PLAIN

        count = self.num_plain * NUM_PER_PLAIN
        for described in self.objects:
            if described is not None:
                count += described.num_integers
        return count


class Seen:
    """The metrics that traces of the step have found, by the shapes of the batch."""

    def __init__(self) -> None:
        self.spec: Spec | None = None
        self._by_shape: dict[Any, Spec] = {}

    def note(self, spec: Spec, batch: Batch) -> None:
        """Notes the metrics for batches of one shape.

        Raises:
            ValueError: If the step returned other metrics for batches of another shape.
        """
        shape = tuple(np.shape(leaf) for leaf in jax.tree.leaves(batch))
        if self._by_shape.get(shape, spec) != spec:
            self._by_shape.clear()  # The program has changed between two loops.
        for other in self._by_shape.values():
            if other != spec:
                raise ValueError(
                    f"`step` returned other metrics for batches of another shape, so "
                    f"they do not add up: {other.names} before, and {spec.names} now. "
                    "Return the same metrics, of the same kinds, for every batch."
                )
        self._by_shape[shape] = self.spec = spec


@without_python
@with_trait(Trait.ONE_LOOP)
@with_trait(Trait.HOLDS_STATE)
class ReturnedMetrics:
    """The totals of all metrics, whose names are known when the step is traced."""

    def __init__(self, *, is_read: bool, is_checked: bool) -> None:
        from flax import nnx

        self._is_read = is_read
        self.seen = Seen()
        # The totals are integers, so they cannot be NaN. This becomes NaN after a
        # metric that was not finite. It exists only if `on_non_finite` checks metrics.
        zero = nnx.metrics.MetricState(jnp.zeros(()))
        self.finite = zero if is_checked else None
        self.make_room(_FIRST_ROOM)

    def make_room(self, num_integers: int) -> None:
        from armillary.metrics._counts import Counts

        self.counts = Counts.zeros(num_integers)

    def reset(self) -> None:
        self.counts[...] = jnp.zeros_like(self.counts[...])
        if self.finite is not None:
            self.finite[...] = jnp.zeros_like(self.finite[...])

    def add(self, metrics: Mapping[str, Any], batch: Batch) -> None:
        """Adds the metrics that a step returned for a batch."""
        from armillary.metrics._counts import add_parts
        from armillary.metrics._parts import split_metric, split_plain

        paths, structure = jax.tree_util.tree_flatten_with_path(metrics, _is_metric)
        objects: list[MetricStructure | None] = []
        plain: dict[str, Any] = {}
        parts: list[jax.Array] = []
        for path, value in paths:
            name = join_keys("", path)
            if not _is_metric(value):
                objects.append(None)
                plain[name] = value
                continue
            described, own = split_metric(name, value)
            objects.append(described)
            parts += own

        spec = Spec(structure, tuple(objects))
        self.seen.note(spec, batch)
        room = self.counts[...].shape[1]
        if spec.num_integers > room:
            raise NeedsRoom(lambda: self.make_room(spec.num_integers))

        # `read_totals` expects the plain metrics first.
        if plain:
            num_examples = _count_examples(batch)
            parts = [*split_plain(plain, num_examples), *parts]
        if not parts:
            return

        # Each column has the parts of one integer.
        added = jnp.concatenate(parts, axis=1)
        num_unused = room - added.shape[1]
        filled = jnp.pad(added, ((0, 0), (0, num_unused)))
        self.counts[...] = add_parts(self.counts[...], filled)
        if self.finite is not None:
            values = [value for _, value in paths]
            self.finite[...] = self.finite[...] + _zero_or_nan(values)

    def compute(self) -> Any:
        """Returns `Totals`, or numbers by name if Python reads them."""
        totals = Totals(self.counts[...])
        if not self._is_read:
            return totals
        return read_totals(self.seen.spec, totals)


def _is_metric(value: Any) -> bool:
    from flax import nnx

    return isinstance(value, nnx.Metric)


def _zero_or_nan(metrics: Iterable[Any]) -> Any:
    """Returns 0, or NaN if a number or a metric object is not finite."""
    from flax import nnx

    are_finite: list[jax.Array] = []
    for metric in metrics:
        held = metric
        if _is_metric(metric):
            held = nnx.to_pure_dict(nnx.state(metric))
        for leaf in jax.tree.leaves(held):
            array = jnp.asarray(leaf)
            if jnp.issubdtype(array.dtype, jnp.floating):
                are_finite.append(jnp.all(jnp.isfinite(array)))
    if not are_finite:
        return 0.0
    return jnp.where(jnp.all(jnp.stack(are_finite)), 0.0, jnp.nan)


def _count_examples(batch: Batch) -> int:
    """Returns the number of examples in a batch; a batch without axes counts as 1."""
    for leaf in jax.tree.leaves(batch):
        if np.ndim(leaf):
            return leaf.shape[0]
    return 1


def read_totals(spec: Spec | None, output: Any) -> Output:
    """Returns an output with names; waits for the device if it has none yet."""
    if not isinstance(output, Totals):
        return output
    if spec is None:
        return None
    from armillary.metrics._counts import join_parts
    from armillary.metrics._parts import NUM_PER_PLAIN, join_metric, join_plain

    # The integers of plain metrics come first, and then the integers of each object.
    integers = join_parts(np.asarray(output.parts))
    start = spec.num_plain * NUM_PER_PLAIN
    means = iter(join_plain(integers[:start], spec.num_plain))
    values: list[Any] = []
    for described in spec.objects:
        if described is None:
            values.append(next(means))
            continue
        stop = start + described.num_integers
        values.append(join_metric(described, integers[start:stop]))
        start = stop
    return spec.structure.unflatten(values)


LoopEnd: TypeAlias = Callable[[dict[str, Any], Any], Mapping[str, Any]]
"""Takes the metrics of a loop, by name, and the state; returns more numbers by name."""


def add_derived(loop_end: LoopEnd, output: Any, state: Any) -> Output:
    """Returns an output with the numbers that `loop_end` derives from it.

    Raises:
        TypeError: If the metrics or the numbers have no names.
        ValueError: If a number has the name of a metric.
    """
    if output is None:
        return None
    if not isinstance(output, Mapping):
        raise TypeError(
            f"`loop_end` takes metrics by name, but `metrics` computed "
            f"{describe(output)}. Put the metric into an `nnx.MultiMetric(name=...)`."
        )
    derived = loop_end(dict(output), state)
    if not isinstance(derived, Mapping):
        raise TypeError(
            f"`loop_end` returned {describe(derived)}, but it must return a dictionary "
            'of the numbers to add, such as `{"perplexity": np.exp(metrics["loss"])}`.'
        )
    if twice := sorted(map(str, output.keys() & derived.keys())):
        raise ValueError(
            f"`loop_end` returned {', '.join(map(repr, twice))}, which the step "
            "returns already. Return the added numbers alone, under other names."
        )
    return {**output, **derived}


def make_metrics(metrics: Any, *, is_read: bool, is_checked: bool = False) -> Any:
    """Returns the user's metrics, checked, or new ones for the metrics of a step."""
    if metrics is not None:
        fix = "Use `armillary`'s or `nnx` metrics, in an `nnx.MultiMetric`."
        check_methods("metrics", metrics, ["reset", "update", "compute"], fix)
        return metrics
    return ReturnedMetrics(is_read=is_read, is_checked=is_checked)


def add_metrics(to: Any, metrics: Any, batch: Batch) -> None:
    """Adds the metrics that a step returned for a batch, by name; `None` adds none."""
    if not isinstance(metrics, Mapping | None):
        raise TypeError(
            f"`step` returned {describe(metrics)} as its metrics, but they must be a "
            'dictionary. Write, for example, `{"loss": loss}`.'
        )
    if isinstance(to, ReturnedMetrics):
        to.add(metrics or {}, batch)
    else:
        to.update(**(metrics or {}))
