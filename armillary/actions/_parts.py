"""What actions consist of, and what a controller asks of the parts."""

from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

from armillary.actions._conditional import ConditionalAction
from armillary.actions._periodic import PeriodicAction
from armillary.actions._step_action import StepAction


def find_parts(actions: Iterable[Any]) -> list[Any]:
    """Returns actions, those inside them, conditions, and the objects of methods."""
    return list({id(part): part for part in _walk(actions)}.values())


def _walk(actions: Iterable[Any]) -> Iterator[Any]:
    for action in actions:
        yield action
        if isinstance(action, ConditionalAction):
            yield from _walk((action.condition, *action.actions))
        elif isinstance(action, PeriodicAction):
            yield from _walk(action.actions)
        elif isinstance(action, MethodType):
            yield from _walk([action.__self__])


def begin_training(actions: Iterable[Any]) -> None:
    """Tells all parts of actions that a call that trains begins."""
    for part in find_parts(actions):
        if hasattr(part, "begin_training"):
            part.begin_training()


def resume_at(step: int, actions: Iterable[Any]) -> None:
    """Lets actions that count steps go on from their last call, at `step`."""
    for part in find_parts(actions):
        if isinstance(part, StepAction):
            part.last_step = step
