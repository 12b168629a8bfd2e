"""The texts of the warnings about numbers that depend on a replica's share."""

from armillary.distribute.analysis._positions import (
    ChosenRows,
    MixedRows,
    PositionFinding,
)
from armillary.distribute.analysis._share_facts import Cause, CauseKind
from armillary.distribute.analysis._share_findings import (
    MeanOfSums,
    MetricOfShare,
    ReductionOfShare,
    ShareFinding,
    StateOfSum,
    SumOfEqual,
    SumOfMeans,
)


def explain(found: ShareFinding, num_replicas: int, place: str = "") -> str:
    """Returns the warning about a finding: the fact, its line and the line to write.

    Args:
        found: The finding.
        num_replicas: The number of replicas.
        place: The name of the value, if the finding is about the state.
    """
    if isinstance(found, StateOfSum):
        return _explain_state(found, num_replicas, place)
    if isinstance(found, MeanOfSums):
        return _explain_sums(found, num_replicas)
    if isinstance(found, SumOfEqual):
        return _explain_equal(found, num_replicas)
    if isinstance(found, SumOfMeans):
        return _explain_means(found, num_replicas)
    if isinstance(found, ReductionOfShare):
        return _explain_reduction(found, num_replicas)
    return _explain_metric(found, num_replicas)


def explain_position(found: PositionFinding, num_replicas: int) -> str:
    """Returns the warning about rows of a replica that stand for rows of the batch."""
    if isinstance(found, MixedRows):
        return (
            f"Rows at {found.line} are told apart by their place, but they were "
            "concatenated before they were gathered. So the rows of each of "
            f"{num_replicas} replicas follow each other, and not all rows of one part. "
            "Gather each part, and concatenate the results."
        )
    if isinstance(found, ChosenRows):
        return (
            f"Numbers of the batch choose rows of the batch at {found.line}. They "
            f"count the rows of the whole batch, but each of {num_replicas} replicas "
            "has only its own rows, and JAX replaces numbers that are too large. Put "
            "the chosen rows into the batch, or gather all rows first "
            "(`armillary.get_replica_context().all_gather(rows, axis=0)`)."
        )
    return (
        f"Rows of this replica are paired with gathered rows at {found.line} by "
        f"numbers that are equal on all {num_replicas} replicas, so only the first "
        "replica gets its own rows. Add the number of its first row: `numbers + "
        "armillary.get_replica_context().replica_id_in_sync_group * num_rows`."
    )


def _explain_state(found: StateOfSum, num_replicas: int, place: str) -> str:
    wrong = (
        f"is of a sum over the {found.num_examples} examples of one replica, so it is "
        f"{num_replicas} times smaller than on one device."
    )
    if found.line:
        return (
            f"`{place}` keeps the mean over replicas at {found.line}, which {wrong} "
            'Take `armillary.all_reduce("sum", value)`, or divide the sum by the '
            "number of examples."
        )
    return (
        f"The mean of `{place}` over replicas, which is taken when the step ends, "
        f"{wrong} Reduce the sum in the step "
        '(`armillary.all_reduce("sum", value)`), or divide it by the number of '
        "examples."
    )


def _explain_sums(found: MeanOfSums, num_replicas: int) -> str:
    return (
        f"The mean over replicas at {found.line} is of gradients of a sum over the "
        f"{found.num_examples} examples of one replica, so it is {num_replicas} times "
        "smaller than on one device. Divide the loss by the number of examples "
        '(`loss.mean()`), or take `armillary.all_reduce("sum", gradients)`.'
    )


def _explain_equal(found: SumOfEqual, num_replicas: int) -> str:
    return (
        f"The metric at {found.line} adds a number that is equal on all {num_replicas} "
        f"replicas, so the number counts {num_replicas} times. Return it as a plain "
        "number, or divide it by "
        "`armillary.get_replica_context().num_replicas_in_sync`."
    )


def _explain_means(found: SumOfMeans, num_replicas: int) -> str:
    return (
        f"The metric at {found.line} adds up the means of {num_replicas} replicas, so "
        f"it is {num_replicas} times larger than on one device. Give it the values of "
        "the examples, or return the mean as a plain number."
    )


_MEANINGS = {
    CauseKind.NONLINEAR: "`{operation}` of a number that is reduced over the "
    "examples of one replica",
    CauseKind.QUOTIENT: "a quotient of two sums over the examples of one replica",
    CauseKind.EXTREME: "`{operation}` over the examples of one replica",
    CauseKind.VARIANCE: "the spread of numbers around their mean over the examples "
    "of one replica",
    CauseKind.PAIRS: "a comparison of examples with other examples of the same replica",
    CauseKind.ORDER: "`{operation}` along the examples of one replica",
    CauseKind.WEIGHTS: "weights of examples that a sum over the examples of one "
    "replica has normalized",
    CauseKind.GRADIENT: "a gradient of one replica's examples that is used before its "
    "reduction",
    CauseKind.LOOP: "a loop that carries a value from one example to the next",
    CauseKind.LOSS: "the gradient of a loss that is a quotient, or another nonlinear "
    "function, of sums over the examples of one replica",
}


def _explain_cause(cause: Cause) -> str:
    meaning = _MEANINGS[cause.kind].format(operation=cause.operation)
    return f"{meaning} (at {cause.line})"


_NOT_TIME = (
    "The first axis of a batch must be the examples. If it is time, transpose the "
    "batch in the dataset (`np.swapaxes(batch, 0, 1)`), and back in the step."
)
_WEIGHTED = (
    "For a weighted mean, write `armillary.weighted_mean(values, weights)`. Otherwise, "
    'reduce these sums in the loss (`armillary.all_reduce("mean", value)`), and keep '
    "the mean of the gradients."
)
_GATHERED = (
    "To compare all examples of the batch, gather them first "
    "(`armillary.get_replica_context().all_gather(value, axis=0)`). The examples of "
    "this replica then begin at row "
    "`replica_id_in_sync_group * num_rows`, and so do labels that number the examples."
)
_VARIANCE = (
    "Return the mean of the squares and the mean, and subtract the square of the mean "
    "in `loop_end`."
)
_GRADIENT = (
    "Reduce the gradient where it is made "
    '(`armillary.all_reduce("mean", gradient)`), before anything uses it.'
)
_FIXES = {
    CauseKind.VARIANCE: _VARIANCE,
    CauseKind.PAIRS: _GATHERED,
    CauseKind.ORDER: _GATHERED,
    CauseKind.LOOP: _NOT_TIME,
    CauseKind.WEIGHTS: _WEIGHTED,
    CauseKind.GRADIENT: _GRADIENT,
    CauseKind.LOSS: _WEIGHTED,
}


def _extreme(cause: Cause) -> str:
    return '"min"' if cause.operation == "reduce_min" else '"max"'


def _explain_reduction(found: ReductionOfShare, num_replicas: int) -> str:
    fixes = {
        **_FIXES,
        CauseKind.NONLINEAR: "Reduce first, and apply the operation to the result, "
        "as where gradients are clipped after `armillary.all_reduce`.",
        CauseKind.QUOTIENT: "Reduce both sums before you divide.",
        CauseKind.EXTREME: "Reduce it by "
        f"`armillary.all_reduce({_extreme(found.cause)}, value)`.",
    }
    return (
        f"The reduction over {num_replicas} replicas at {found.line} is of a value "
        f"that depends on how replicas share a batch: {_explain_cause(found.cause)}. "
        f"So the result is not the one of a single device. {fixes[found.cause.kind]}"
    )


def _explain_metric(found: MetricOfShare, num_replicas: int) -> str:
    """Returns the warning about a metric that depends on the share."""
    is_plain = found.name.startswith("`")
    key = found.name.strip("`").rpartition("/")[2] if is_plain else "metric"
    fixes = {
        **_FIXES,
        CauseKind.NONLINEAR: "Return the number before this operation, and apply the "
        "operation in `loop_end`, or reduce the number first: "
        '`armillary.all_reduce("mean", value)`.',
        CauseKind.QUOTIENT: "Return "
        f'`"{key}": armillary.metrics.Ratio(sum, denominator)`, which divides '
        "the sums of all replicas.",
        CauseKind.EXTREME: f'Reduce it over replicas: `"{key}": '
        f"armillary.all_reduce({_extreme(found.cause)}, value)`.",
        CauseKind.WEIGHTS: "Return "
        f'`"{key}": armillary.metrics.Ratio(sum, denominator)`, which divides '
        "the sums of all replicas.",
    }
    return (
        f"The metric {found.name} depends on how {num_replicas} replicas share a "
        f"batch: it is made by {_explain_cause(found.cause)}. The mean over replicas "
        f"is not the number of a single device. {fixes[found.cause.kind]}"
    )
