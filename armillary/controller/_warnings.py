"""Warnings about evaluators without effect, and about values that are not finite."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import (
    counted,
    list_lines,
)
from armillary._logging import logger
from armillary.errors import StateStructureError
from armillary.state._slots import Role, Slot
from armillary.state._walk import slots_of
from armillary.trainer._standard_evaluator import StandardEvaluator

# The bytes of arrays that are checked when training has ended.
_MAX_BYTES = 64 * 2**20


def warn_of_evaluators(trainer: Any, evaluator: Any) -> None:
    """Warns of evaluators that return no numbers, or evaluate a different model."""
    several = evaluator if isinstance(evaluator, Mapping) else {"": evaluator}
    for evaluation in several.values():
        is_standard = isinstance(evaluation, StandardEvaluator)
        if is_standard and not _returns_numbers(evaluation):
            logger.warning(
                "`%s` has no `eval_end`, so its evaluations return no numbers. "
                "Add one: `def eval_end(self): return "
                '{"loss": self.loss.compute()}`.',
                type(evaluation).__name__,
            )
        if trainer is not None and evaluation is not None:
            _warn_of_a_copy(trainer, evaluation)


def _returns_numbers(evaluator: StandardEvaluator) -> bool:
    """Returns whether the class of an evaluator overrides a method with a result."""
    kind = type(evaluator)
    base = StandardEvaluator
    return kind.evaluate is not base.evaluate or kind.eval_end is not base.eval_end


def _warn_of_a_copy(trainer: Any, evaluator: Any) -> None:
    """Warns if an evaluator and a trainer have parameters, but share none."""
    try:
        trained = _find_parameters(trainer)
        held = _find_parameters(evaluator)
    except StateStructureError:  # The step raises it as well, with a better message.
        return
    shares_none = trained.keys().isdisjoint(held)
    if trained and held and shares_none:
        logger.warning(
            "`%s` evaluates parameters that `%s` does not train, so they never "
            "change:\n%s\nGive it the model of the trainer (`self.model = "
            "trainer.model`) or a view of it (`nnx.view`), and not a copy "
            "(`nnx.clone`).",
            type(evaluator).__name__,
            type(trainer).__name__,
            list_lines(sorted(held.values()), most=5),
        )


def _find_parameters(owner: Any) -> dict[Any, str]:
    """Returns the paths of the parameters that an object reaches, by slot."""
    slots = slots_of([(owner, "")])
    return {slot.key: slot.path for slot in slots if _is_learned(slot)}


def _is_learned(slot: Slot) -> bool:
    return slot.is_parameter() and slot.role is Role.PLAIN


def warn_of_bad_arrays(trainer: Any, step: int) -> None:
    """Warns if training left values that are not finite, for runs without outputs."""
    leaves: list[tuple[str, jax.Array]] = []
    for slot in slots_of([(trainer, "")]):
        if slot.role is not Role.PLAIN:
            continue
        for path, leaf in zip(slot.paths, slot.read(), strict=True):
            if _can_be_bad(leaf):
                leaves.append((path, leaf))

    bad: list[str] = []
    num_bytes = 0
    # Values that are not finite spread, so it is enough to check the small arrays.
    for path, leaf in sorted(leaves, key=lambda pair: pair[1].nbytes):
        num_bytes += leaf.nbytes
        if num_bytes > _MAX_BYTES:
            break
        copy = leaf.addressable_data(0) if leaf.is_fully_replicated else leaf
        values = np.asarray(copy).astype(np.float32)
        if not np.isfinite(values).all():
            bad.append(path)

    if bad:
        logger.warning(
            "At step %d, %s of the trainer %s values that are not finite, and the "
            "output of its loops has no number that would show it:\n%s\nTo find the "
            "first such step, and the operation that made the value, start again with "
            '`StandardTrainerOptions(on_non_finite="raise")`.',
            step,
            counted(len(bad), "array"),
            "has" if len(bad) == 1 else "have",
            list_lines(bad, most=5),
        )


def _can_be_bad(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or leaf.is_deleted():
        return False
    is_here = leaf.is_fully_replicated or leaf.is_fully_addressable
    return is_here and jnp.issubdtype(leaf.dtype, jnp.floating)
