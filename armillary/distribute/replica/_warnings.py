"""Warns of a step whose numbers are wrong, or depend on the number of replicas.

The analyses find certain causes in the program of one replica. Each finding gets one
warning, with the line of the step and the line to write.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jax.extend import core

from armillary._logging import logger
from armillary.distribute.analysis._draws import (
    MEANT,
    SHARED,
    Origin,
    SharedDraw,
    find_shared_draws,
    of_batch,
)
from armillary.distribute.analysis._idle_replicas import (
    IdleReplicas,
    find_idle_replicas,
)
from armillary.distribute.analysis._positions import PositionFinding, find_positions
from armillary.distribute.analysis._share_findings import ShareFinding, StateOfSum
from armillary.distribute.analysis._share_messages import explain, explain_position
from armillary.distribute.analysis._share_sizes import ShareCounter, find_counters
from armillary.distribute.analysis._shares import find_shares

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy
    from armillary.distribute.replica._replica import ReplicaContext


class ProgramInput(NamedTuple):
    """An input of the program of one replica.

    Attributes:
        is_split: Whether it is the replica's own part of an argument.
        is_meant: Whether it may be a key that is to be equal on all replicas.
    """

    is_split: bool = False
    is_meant: bool = False


Finding = SharedDraw | IdleReplicas | ShareCounter | PositionFinding | ShareFinding


def warn_of_step(
    program: core.ClosedJaxpr,
    inputs: Sequence[ProgramInput],
    strategy: "Strategy",
    context: "ReplicaContext",
    display_name: Callable[[int], str],
    kept: Mapping[int, tuple[int, bool]],
) -> None:
    """Warns of the findings in a step, once each for a strategy.

    Args:
        program: The program of one replica.
        inputs: Its inputs.
        strategy: The strategy, which knows the findings it has warned of.
        context: The replica, which knows how many replicas hold examples.
        display_name: Returns the name of an input that is a part of the state.
        kept: For the results that are new values of the state, by their number, the
            number of the old value, and whether the end of the step takes the mean.
    """
    num_replicas = context.num_replicas_in_sync
    if num_replicas == 1:
        return
    axis_name = strategy.axis_name
    findings = itertools.chain(
        _explain_draws(program, inputs, axis_name, num_replicas),
        _explain_idle(program, axis_name, num_replicas, context),
        _explain_counters(program, inputs, display_name, num_replicas),
        _explain_positions(program, inputs, axis_name, num_replicas),
        _explain_shares(program, inputs, axis_name, num_replicas, display_name, kept),
    )
    for finding, message in list(findings):
        if finding not in strategy.warned:
            strategy.warned.add(finding)
            logger.warning("%s", message)


def _explain_draws(
    program: core.ClosedJaxpr,
    inputs: Sequence[ProgramInput],
    axis_name: str,
    num_replicas: int,
) -> Iterator[tuple[Finding, str]]:
    """Yields equal random numbers that replicas use for different examples."""
    origins: list[Origin] = []
    for variable, program_input in zip(program.jaxpr.invars, inputs, strict=True):
        if program_input.is_split:
            origins.append(of_batch(variable.aval.ndim))
        else:
            origins.append(MEANT if program_input.is_meant else SHARED)
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
    num_active = len(context.active)
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
    inputs: Sequence[ProgramInput],
    display_name: Callable[[int], str],
    num_replicas: int,
) -> Iterator[tuple[Finding, str]]:
    """Yields numbers of the state that count the examples of one replica."""
    is_split = [program_input.is_split for program_input in inputs]
    for found in find_counters(program, is_split):
        name = display_name(found.slot)
        yield (
            found,
            f"`{name}` grows by {found.size} at {found.line}. That is "
            f"the size of the share of one of {num_replicas} replicas, so it counts "
            f"1 of {num_replicas} examples. To count the examples of all replicas, add "
            '`armillary.all_reduce("sum", size)` in place of `size`.',
        )


def _explain_positions(
    program: core.ClosedJaxpr,
    inputs: Sequence[ProgramInput],
    axis_name: str,
    num_replicas: int,
) -> Iterator[tuple[Finding, str]]:
    """Yields rows of one replica that stand for rows of the whole batch."""
    is_split = [program_input.is_split for program_input in inputs]
    for found in find_positions(program, is_split, axis_name):
        yield found, explain_position(found, num_replicas)


def _explain_shares(
    program: core.ClosedJaxpr,
    inputs: Sequence[ProgramInput],
    axis_name: str,
    num_replicas: int,
    display_name: Callable[[int], str],
    kept: Mapping[int, tuple[int, bool]],
) -> Iterator[tuple[Finding, str]]:
    """Yields numbers that depend on how replicas share the examples."""
    is_split = [program_input.is_split for program_input in inputs]
    is_averaged = {result: of_step for result, (_, of_step) in kept.items()}
    for found in find_shares(program, is_split, axis_name, is_averaged):
        place = ""
        if isinstance(found, StateOfSum):
            index, _ = kept[found.result]
            place = display_name(index)
        yield found, explain(found, num_replicas, place)
