"""Warns of a step whose numbers are wrong, or depend on the number of replicas.

The analyses find certain causes in the program of one replica. Each finding gets one
warning, with the line of the step and the line to write.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jax.extend import core

from armillary._logging import logger
from armillary.distribute.replica._draws import (
    MEANT,
    SHARED,
    Origin,
    SharedDraw,
    find_shared_draws,
    of_batch,
)
from armillary.distribute.replica._idle_replicas import (
    IdleReplicas,
    find_idle_replicas,
)
from armillary.distribute.replica._share_sizes import ShareCounter, find_counters
from armillary.distribute.replica._shares import (
    Cause,
    MeanOfSums,
    MetricOfShare,
    ReductionOfShare,
    SumOfEqual,
    SumOfMeans,
    Way,
    find_shares,
)
from armillary.distribute.replica._shares import Finding as ShareFinding
from armillary.distribute.replica._values import count_active

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy
    from armillary.distribute.replica._context import ReplicaContext


class Input(NamedTuple):
    """An input of the program of one replica.

    Attributes:
        is_split: Whether it is the replica's own part of an argument.
        is_meant: Whether it may be a key that is to be equal on all replicas.
    """

    is_split: bool = False
    is_meant: bool = False


Finding = SharedDraw | IdleReplicas | ShareCounter | ShareFinding


def warn_of_step(
    program: core.ClosedJaxpr,
    inputs: Sequence[Input],
    strategy: "Strategy",
    context: "ReplicaContext",
    place_of: Callable[[int], str],
) -> None:
    """Warns of the findings in a step, once each for a strategy.

    Args:
        program: The program of one replica.
        inputs: Its inputs.
        strategy: The strategy, which knows the findings it has warned of.
        context: The replica, which knows how many replicas hold examples.
        place_of: Returns the name of an input that is a part of the state.
    """
    num_replicas = context.num_replicas_in_sync
    if num_replicas == 1:
        return
    for finding, message in (
        *_explain_draws(program, inputs, strategy.axis_name, num_replicas),
        *_explain_idle(program, strategy.axis_name, num_replicas, context),
        *_explain_counters(program, inputs, place_of, num_replicas),
        *_explain_shares(program, inputs, strategy.axis_name, num_replicas),
    ):
        if finding not in strategy.warned:
            strategy.warned.add(finding)
            logger.warning("%s", message)


def _explain_draws(
    program: core.ClosedJaxpr,
    inputs: Sequence[Input],
    axis_name: str,
    num_replicas: int,
) -> Iterator[tuple[Finding, str]]:
    """Yields equal random numbers that replicas use for different examples."""
    origins: list[Origin] = []
    for variable, each in zip(program.jaxpr.invars, inputs, strict=True):
        if each.is_split:
            origins.append(of_batch(variable.aval.ndim))
        else:
            origins.append(MEANT if each.is_meant else SHARED)
    for draw in find_shared_draws(program, origins, axis_name):
        yield (
            draw,
            f"The random numbers of {draw.drawn_at} are the same on all {num_replicas} "
            f"replicas, but each replica uses them for its own examples at "
            f"{draw.used_at}. Fold the number of the replica into the key "
            f'(`jax.random.fold_in(key, jax.lax.axis_index("{axis_name}"))`), or draw '
            "from a key in the state, such as an `nnx.Rngs` of the trainer.",
        )


def _explain_idle(
    program: core.ClosedJaxpr,
    axis_name: str,
    num_replicas: int,
    context: "ReplicaContext",
) -> Iterator[tuple[Finding, str]]:
    """Yields reductions of JAX that count replicas without examples."""
    num_active = count_active(context.active)
    if num_active == num_replicas:
        return
    for found in find_idle_replicas(program, axis_name):
        yield (
            found,
            f"`{found.name}` at {found.line} reduces over all {num_replicas} replicas, "
            f"but only {num_active} have examples of this batch, so the result counts "
            "replicas without examples and is wrong. Write "
            '`armillary.all_reduce("mean", value)`, or `"sum"`, which leaves them out.',
        )


def _explain_counters(
    program: core.ClosedJaxpr,
    inputs: Sequence[Input],
    place_of: Callable[[int], str],
    num_replicas: int,
) -> Iterator[tuple[Finding, str]]:
    """Yields numbers of the state that count the examples of one replica."""
    is_split = [each.is_split for each in inputs]
    for found in find_counters(program, is_split):
        yield (
            found,
            f"`{place_of(found.slot)}` grows by {found.size} at {found.line}. That is "
            f"the size of the share of one of {num_replicas} replicas, so it counts "
            f"1 of {num_replicas} examples. To count the examples of all replicas, add "
            '`armillary.all_reduce("sum", size)` in place of `size`.',
        )


def _explain_shares(
    program: core.ClosedJaxpr,
    inputs: Sequence[Input],
    axis_name: str,
    num_replicas: int,
) -> Iterator[tuple[Finding, str]]:
    """Yields numbers that depend on how replicas share the examples."""
    is_split = [each.is_split for each in inputs]
    for found in find_shares(program, is_split, axis_name):
        if isinstance(found, MeanOfSums):
            yield found, _explain_sums(found, num_replicas)
        elif isinstance(found, SumOfEqual):
            yield found, _explain_equal(found, num_replicas)
        elif isinstance(found, SumOfMeans):
            yield found, _explain_means(found, num_replicas)
        elif isinstance(found, ReductionOfShare):
            yield found, _explain_reduction(found, num_replicas)
        else:
            yield found, _explain_metric(found, num_replicas)


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
    Way.NONLINEAR: "`{operation}` of a number that is reduced over the examples of one "
    "replica",
    Way.QUOTIENT: "a quotient of two sums over the examples of one replica",
    Way.EXTREME: "`{operation}` over the examples of one replica",
    Way.PAIRS: "a comparison of examples with other examples of the same replica",
    Way.LOOP: "a loop that carries a value from one example to the next",
    Way.LOSS: "the gradient of a loss that is a quotient, or another nonlinear "
    "function, of sums over the examples of one replica",
}


def _explain_cause(cause: Cause) -> str:
    meaning = _MEANINGS[cause.way].format(operation=cause.operation)
    return f"{meaning} (at {cause.line})"


_NOT_TIME = (
    "The first axis of a batch must be the examples. If it is time, transpose the "
    "batch in the data set (`np.swapaxes(batch, 0, 1)`), and back in the step."
)
_WEIGHTED = (
    "For a weighted mean, write `armillary.weighted_mean(values, weights)`. Otherwise, "
    'reduce these sums in the loss (`armillary.all_reduce("mean", value)`), and keep '
    "the mean of the gradients."
)
_GATHERED = (
    "To compare all examples of the batch, gather them first "
    "(`armillary.get_replica_context().all_gather(value, axis=0)`)."
)


def _extreme(cause: Cause) -> str:
    return '"min"' if cause.operation == "reduce_min" else '"max"'


def _explain_reduction(found: ReductionOfShare, num_replicas: int) -> str:
    fixes = {
        Way.NONLINEAR: "Reduce first, and apply the operation to the result, as where "
        "gradients are clipped after `armillary.all_reduce`.",
        Way.QUOTIENT: "Reduce both sums before you divide.",
        Way.EXTREME: f"Reduce it by `armillary.all_reduce({_extreme(found.cause)}, "
        "value)`.",
        Way.LOSS: _WEIGHTED,
        Way.PAIRS: _GATHERED,
        Way.LOOP: _NOT_TIME,
    }
    return (
        f"The reduction over {num_replicas} replicas at {found.line} is of a value "
        f"that depends on how replicas share a batch: {_explain_cause(found.cause)}. "
        f"So the result is not the one of a single device. {fixes[found.cause.way]}"
    )


def _explain_metric(found: MetricOfShare, num_replicas: int) -> str:
    is_plain = found.name.startswith("`")
    key = found.name.strip("`").rpartition("/")[2] if is_plain else "metric"
    fixes = {
        Way.NONLINEAR: "Return the number before this operation, and apply the "
        "operation in `loop_end`, or reduce the number first: "
        '`armillary.all_reduce("mean", value)`.',
        Way.QUOTIENT: f'Return `"{key}": armillary.metrics.Ratio(sum, denominator)`, '
        "which divides the sums of all replicas.",
        Way.EXTREME: f'Reduce it over replicas: `"{key}": '
        f"armillary.all_reduce({_extreme(found.cause)}, value)`.",
        Way.LOSS: _WEIGHTED,
        Way.PAIRS: _GATHERED,
        Way.LOOP: _NOT_TIME,
    }
    return (
        f"The metric {found.name} depends on how {num_replicas} replicas share a "
        f"batch: it is made by {_explain_cause(found.cause)}. The mean over replicas "
        f"is not the number of a single device. {fixes[found.cause.way]}"
    )
