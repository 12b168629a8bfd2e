"""The metrics of a pure step: how they add up over steps, and their names."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import check_methods
from armillary.state._slots import describe
from armillary.trainer._hooks import without_python
from armillary.typing import Batch, Output

_MOST_METRICS = 64


class Seen:
    """What a trace has found; a step that changed plain values would be traced anew."""

    structure: Any = None


@without_python
class Means:
    """Means by number: which ones there are is known only when the step is traced."""

    def __init__(self) -> None:
        from flax import nnx

        zeros = np.zeros(_MOST_METRICS, np.float32)
        self.total = nnx.metrics.MetricState(jnp.array(zeros))
        self.weight = nnx.metrics.MetricState(jnp.array(zeros))
        self.seen = Seen()

    def reset(self) -> None:
        for each in (self.total, self.weight):
            each[...] = jnp.zeros_like(each[...])

    def add(self, metrics: Mapping[str, Any], batch: Batch) -> None:
        leaves, self.seen.structure = jax.tree.flatten(metrics)
        if len(leaves) > _MOST_METRICS:
            raise ValueError(
                f"`step` returned {len(leaves)} metrics, but at most {_MOST_METRICS} "
                "can be means. Return fewer, or one array: its values are averaged."
            )
        if not leaves:
            return
        sizes = [leaf.shape[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
        values = [jnp.asarray(leaf) for leaf in leaves]
        weights = [each.size if each.ndim else (sizes or [1])[0] for each in values]
        means = [jnp.mean(each, dtype=jnp.float32) for each in values]
        weight, rest = jnp.asarray(weights, jnp.float32), _MOST_METRICS - len(values)
        total = jnp.where(weight > 0, jnp.stack(means) * weight, 0)
        self.total[...] = self.total[...] + jnp.pad(total, (0, rest))
        self.weight[...] = self.weight[...] + jnp.pad(weight, (0, rest))

    def compute(self) -> Any:
        return {"total": self.total[...], "weight": self.weight[...]}


def name_means(structure: Any, output: Any) -> Output:
    """Returns the means by name, from what `Means.compute` returned."""
    if output is None or structure is None:
        return None
    with np.errstate(invalid="ignore"):  # Of no values, the mean is NaN.
        means = np.asarray(output["total"]) / np.asarray(output["weight"])
    return jax.tree.unflatten(structure, means[: structure.num_leaves])


def make_metrics(metrics: Any) -> Any:
    if metrics is not None:
        fix = "Use `armillary`'s or `nnx` metrics, in an `nnx.MultiMetric`."
        check_methods("metrics", metrics, ["reset", "update", "compute"], fix)
    return Means() if metrics is None else metrics


def add_metrics(to: Any, metrics: Any, batch: Batch) -> None:
    if not isinstance(metrics, Mapping | None):
        raise TypeError(
            f"`step` returned {describe(metrics)} as its metrics, but they must be a "
            'dictionary. Write, for example, `{"loss": loss}`.'
        )
    if isinstance(to, Means):
        to.add(metrics or {}, batch)
    else:
        to.update(**(metrics or {}))
