"""Messages of the errors that `_proof` finds in a step."""

import re
from collections.abc import Iterable, Sequence

from armillary._checks import list_lines
from armillary.distribute.analysis._labels import Facts, Label, LabelKind
from armillary.errors import DoubleReductionError, ReplicaMismatchError

_MAX_PATTERNS = 4
_MEAN = '`armillary.all_reduce("mean", gradients)`'
# Every text takes `where`, `origin` and `count`; the text about keys takes `as_meant`.
_WRONG = {
    LabelKind.REDUCED: (
        "The sum over replicas at {where} adds up a value that was already reduced at "
        "{origin}, so it would be {count} times too large. Use the value as it is."
    ),
    LabelKind.OF_REDUCED: (
        "The sum over replicas at {where} adds up gradients of a loss that was reduced "
        "before it was differentiated (at {origin}), so each replica's part counts "
        f"{{count}} times. Take the mean of the gradients ({_MEAN})."
    ),
    LabelKind.WEIGHED: (
        "The sum over replicas at {where} adds up values of `weighted_mean` (at "
        "{origin}), so it would be {count} times too large. Take the mean "
        f"({_MEAN})."
    ),
    LabelKind.AVERAGED: (
        "The sum over replicas at {where} adds up gradients of a loss that Keras has "
        "averaged over the examples of one replica (at {origin}), so it would be "
        f"{{count}} times too large. Take the mean ({_MEAN}), or make the loss object "
        "with `reduction=None` and write "
        "`armillary.compute_average_loss(loss_object(labels, predictions))`."
    ),
    LabelKind.DIVIDED: (
        "The mean over replicas at {where} averages values that were already divided "
        "by the size of the global batch, or by the number of replicas (at {origin}), "
        "so it would be {count} times too small. Take the sum "
        '(`armillary.all_reduce("sum", gradients)`), or let the loss be the plain mean '
        "over this replica's examples."
    ),
    LabelKind.NOISED: (
        "The sum over replicas at {where} adds up gradients to which each replica has "
        "added the same random numbers (at {origin}), so these numbers would count "
        "{count} times. Reduce the gradients first, and add random numbers to the "
        f"result, or take the mean ({_MEAN})."
    ),
    LabelKind.KEY: (
        "`{origin}` holds a key of `jax.random.PRNGKey`, from which all replicas would "
        "draw the same numbers (at {where}). Hold a key of `jax.random.key`. If equal "
        "numbers are intended, {as_meant}."
    ),
}
_SAME_KEY = "`nnx.Variable(key, aggregation=VariableAggregation.NONE)`"

_REDUCE = (
    'Reduce first (`armillary.all_reduce("mean", value)`, or "sum" for sums and counts '
    "of examples)"
)
_GATHER = (
    "If its rows belong to single examples, as in a queue or a carried hidden state, "
    "a reduction would mix them: collect the rows of all replicas instead "
    "(`armillary.get_replica_context().all_gather(value, axis=0)`)."
)


def explain_label(label: Label, where: str, num_replicas: int) -> Exception:
    """Returns the error for a value whose label does not fit an operation.

    Args:
        label: The label.
        where: The line of the operation.
        num_replicas: The number of replicas that run the step.
    """
    as_meant = _SAME_KEY
    if label.pure_path is not None:
        as_meant = f"name it in `StepTrainer(..., {_as_kinds([label.pure_path])})`"
    message = _WRONG[label.kind].format(
        origin=label.origin, where=where, count=num_replicas, as_meant=as_meant
    )
    if label.kind is LabelKind.KEY:
        return ValueError(message)
    return DoubleReductionError(message)


def explain_summed_twice(where: str, origin: str, num_replicas: int) -> Exception:
    """Returns the error for a metric whose value was reduced at `origin`."""
    return DoubleReductionError(
        f"The metric at {where} adds up the values of all replicas, but its value was "
        f"reduced over replicas already (at {origin}), so it would be {num_replicas} "
        "times too large. Give it the numbers of this replica, without the reduction."
    )


def explain_half_reduced(where: str, origin: str, num_replicas: int) -> Exception:
    """Returns the error for a quotient, of which one sum was reduced at `origin`."""
    return DoubleReductionError(
        f"The metric at {where} divides one sum by another, and only one of them was "
        f"reduced over replicas (at {origin}), so the quotient would be off by a "
        f"factor of {num_replicas}. Give it both sums over the examples of this "
        "replica."
    )


def explain_noise(where: str, num_replicas: int) -> Exception:
    """Returns the error for noise of Optax that counts once for each replica."""
    return DoubleReductionError(
        f"`optax.contrib.differentially_private_aggregate` (or `dpsgd`) at {where} "
        "gets the gradients of one replica's examples, so each of "
        f"{num_replicas} replicas would add the noise of a whole batch. Give it the "
        "gradients of all examples: `gradients = armillary.get_replica_context()."
        "all_gather(gradients, axis=0)` before `update`."
    )


def explain_divisor(where: str, divisor: Facts) -> Exception:
    """Returns the error for a size of the batch that may differ between replicas."""
    return ReplicaMismatchError(
        "`global_batch_size` of `compute_average_loss` may differ between replicas "
        f"at {where} ({divisor.explain()}), so their losses would not add up to an "
        "average. Reduce it first: "
        '`global_batch_size=armillary.all_reduce("sum", num_examples)`.'
    )


def explain_wait(operation: str, where: str, decides: Facts) -> Exception:
    """Returns the error for a branch or loop in which some replicas would wait."""
    return ReplicaMismatchError(
        f"`{operation}` at {where} is decided by a value that differs between "
        f"replicas ({decides.explain()}), and reduces over replicas inside, so some "
        "replicas would wait there forever. Reduce the value that decides first "
        "(`armillary.all_reduce`), reduce outside, or choose with `jnp.where`."
    )


def explain_difference(
    lines: Sequence[str],
    num_slots: int,
    facts: Facts,
    pure_paths: Sequence[str],
) -> Exception:
    """Returns the error for mirrored state whose new values may differ.

    Args:
        lines: A line for each array, with its place in the state.
        num_slots: The number of arrays in the state.
        facts: The facts about the new values.
        pure_paths: The paths of those that are leaves of a pure step's state.
    """
    return ReplicaMismatchError(
        f"`strategy.run` left different values on the replicas in {len(lines)} of "
        f"{num_slots} arrays of the state. Mirrored arrays must be equal on all "
        f"replicas:\n{list_lines(sorted(lines), most=10)}\n"
        f"They were {facts.explain()}{_way_out(facts, pure_paths)}"
    )


def _way_out(facts: Facts, pure_paths: Sequence[str]) -> str:
    """Returns the end of the error for state that differs: the fix."""
    where = facts.find(LabelKind.GRADIENT)
    if where is None and pure_paths:
        return (
            f". {_REDUCE}, or let replicas differ during a step: "
            f'`StepTrainer(..., {_as_kinds(pure_paths, "mean")})`, or "sum" or '
            f'"only_first_replica". {_GATHER}'
        )
    if where is None:
        return (
            f". {_REDUCE}, or make the variable with `aggregation="
            "armillary.distribute.VariableAggregation.MEAN`, `SUM` or "
            f"`ONLY_FIRST_REPLICA`. {_GATHER}"
        )
    op = "mean" if facts.find(LabelKind.DIVIDED) is None else "sum"
    return (
        f", through the gradient of a loss of one replica (at {where}). Write this "
        f'before the update:\n  gradients = armillary.all_reduce("{op}", gradients)\n'
        '"mean" fits a loss that is a mean over the examples of its replica. "sum" '
        "fits a loss that `compute_average_loss` (or you) divided by the global batch "
        "size."
    )


def _as_kinds(paths: Iterable[str], kind: str = "none") -> str:
    """Returns the argument that gives a kind to the leaves with these paths."""
    names: dict[str, list[str]] = {}
    for path in paths:
        parent, _, name = path.rpartition("/")
        names.setdefault(parent, []).append(re.escape(name))
    entries = [
        f'r"{_pattern_of(parent, children)}": "{kind}"'
        for parent, children in names.items()
    ]
    if len(entries) > _MAX_PATTERNS:
        entries = [*entries[:_MAX_PATTERNS], "..."]
    return f"kinds={{{', '.join(entries)}}}"


def _pattern_of(parent: str, names: list[str]) -> str:
    last = names[0] if len(names) == 1 else f"({'|'.join(names)})"
    return f"{re.escape(parent)}/{last}$" if parent else f"{last}$"
