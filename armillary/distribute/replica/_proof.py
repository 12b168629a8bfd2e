"""Refuses steps that would leave replicas different, or wait for each other for ever.

A replica's program is traced before it becomes a part of the step. What it computes
decides (`Differences`); nothing is taken for equal because it looks so.
"""

from collections.abc import Mapping, Sequence

from jax.extend import core

from armillary._checks import list_lines
from armillary._jaxpr import source_line
from armillary.distribute.replica._differences import Differences, Facts, Kind, Reasons
from armillary.errors import DoubleReductionError, ReplicaMismatchError


class Proof(Differences):
    """A program that leaves no replica waiting, and reduces nothing wrongly.

    The first of `counts` is the number of replicas that run it.
    """

    def __init__(
        self, program: core.ClosedJaxpr, inputs: Sequence[Facts], counts: Sequence[int]
    ) -> None:
        super().__init__(program, inputs, counts)
        self._made = program.jaxpr
        is_alone = counts[0] == 1
        if self.conflicts and not is_alone:
            conflict = self.conflicts[0]
            raise ReplicaMismatchError(
                f"`{conflict.kind}` at {conflict.where} is decided by a value that "
                f"differs between replicas ({_computed_from(conflict.reasons)}), and "
                "reduces over replicas inside, so that some would wait there for ever. "
                "Reduce the value that decides first (`armillary.all_reduce`), reduce "
                "outside, or choose with `jnp.where`."
            )
        if self.problems and not is_alone:
            kind, origin, where = self.problems[0]
            error = ValueError if kind is Kind.KEY else DoubleReductionError
            message = _MESSAGES[kind]
            raise error(message.format(origin=origin, where=where, count=counts[0]))
        self.is_equal = [is_alone or not facts.reasons for facts in self.results]

    def require_equal(self, names: Mapping[int, str], num_slots: int) -> None:
        """Raises if named results are not equal on all replicas."""
        differing = [i for i in names if not self.is_equal[i]]
        if not differing:
            return
        makers = {made: each for each in self._made.eqns for made in each.outvars}
        lines = []
        for i in differing:
            maker = makers.get(self._made.outvars[i])
            where = "" if maker is None else f", written at {source_line(maker)}"
            lines.append(names[i] + where)
        facts = self.join(self.results[i] for i in differing)
        raise ReplicaMismatchError(
            f"{len(lines)} of {num_slots} slots are mirrored, so they must be equal "
            "on all replicas, but `strategy.run` left values in them that differ:\n"
            f"{list_lines(sorted(lines), most=10)}\n"
            f"They were {_computed_from(facts.reasons)}{_way_out(facts)}"
        )


def _way_out(facts: Facts) -> str:
    where = facts.find(Kind.GRADIENT)
    if where is None:
        return (
            '. Reduce first (`armillary.all_reduce("mean", value)`), or make the '
            "variable with `aggregation=armillary.VariableAggregation.MEAN`, `SUM` or "
            "`ONLY_FIRST_REPLICA`."
        )
    op = "mean" if facts.find(Kind.DIVIDED) is None else "sum"
    return (
        f", through the gradient of a loss of one replica (at {where}), which nothing "
        "reduced. Write this before the update:\n"
        f'  gradients = armillary.all_reduce("{op}", gradients)\n'
        '"mean" fits a loss that is a mean over the examples of its replica, "sum" one '
        "that `compute_average_loss` (or you) divided by the global batch size."
    )


def _computed_from(reasons: Reasons) -> str:
    return f"computed from {' and '.join(sorted(reasons))}"


_MEAN = '`armillary.all_reduce("mean", gradients)`'
_MESSAGES = {
    Kind.REDUCED: (
        "The sum over replicas at {where} is of a value that is equal on all of them, "
        "since it was reduced at {origin}: it would be {count} times too large. Use "
        "the value as it is; to count replicas, use `strategy.num_replicas_in_sync`."
    ),
    Kind.OF_REDUCED: (
        "The sum over replicas at {where} is of gradients of a loss that was reduced "
        "before it was differentiated (at {origin}), so each replica's part counts "
        f"{{count}} times. Take the mean of the gradients ({_MEAN}), or differentiate "
        "the loss of this replica and reduce only what you report."
    ),
    Kind.WEIGHED: (
        "The sum over replicas at {where} is of what `weighted_mean` made (at "
        "{origin}), whose parts have the weighted mean as their mean: it would be "
        f"{{count}} times too large. Take the mean ({_MEAN})."
    ),
    Kind.DIVIDED: (
        "The mean over replicas at {where} is of what was divided by the size of the "
        "global batch, or by the number of replicas, already (at {origin}): it would "
        'be {count} times too small. Take the sum (`armillary.all_reduce("sum", '
        "gradients)`), or let the loss be the plain mean over this replica's examples "
        "(`jnp.mean(losses)`, penalties as they are)."
    ),
    Kind.KEY: (
        "`{origin}` holds a key of `jax.random.PRNGKey`, an array that is equal on all "
        "replicas, so that all of them would draw the same numbers (at {where}). Hold "
        "a key of `jax.random.key` there (`jax.random.wrap_key_data(key)` makes it "
        "one), or, if the same numbers are meant, "
        "`nnx.Variable(key, aggregation=VariableAggregation.NONE)`."
    ),
}
