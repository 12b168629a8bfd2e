"""Hooks, saving listeners and exporters: functions that run between loops."""

import inspect
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from armillary.actions._combined import find_parts, notify
from armillary.checkpoint._checkpoint import Checkpoint, has_position
from armillary.checkpoint._manager import CheckpointManager
from armillary.checkpoint._writer import agree_on
from armillary.cluster._join import get_peers
from armillary.data.sources._source import may_be_missing
from armillary.errors import EstimatorError
from armillary.estimator._answers import HOOKS
from armillary.typing import Action, Output

_KINDS = {
    "saving_listeners": "the path of a checkpoint",
    "exporters": "the output of an evaluation",
}


def as_hooks(name: str, hooks: Any) -> tuple[Callable[..., Any], ...]:
    """Returns a user's hooks, listeners or exporters as a tuple of functions.

    Args:
        name: The name of the argument.
        hooks: One function or several; `None` for an empty tuple.
    """
    if hooks is None:
        return ()
    is_several = isinstance(hooks, list | tuple)
    found = tuple(hooks) if is_several else (hooks,)
    for index, hook in enumerate(found):
        if callable(hook) and not isinstance(hook, type):
            continue
        place = f"{name}[{index}]" if is_several else name
        classes = [kind.__name__ for kind in inspect.getmro(type(hook))]
        answers = [HOOKS[class_name] for class_name in classes if class_name in HOOKS]
        argument = _KINDS.get(name, "the output of a loop or an evaluation")
        fix = f"Write `{name}=[print]`, or an action of `armillary.actions`."
        raise EstimatorError(
            f"`{place}` is {hook!r:.80} of type {type(hook).__name__}, but it must be "
            f"a function of {argument}: there is no session here. "
            f"{answers[0] if answers else fix}"
        )
    return found


class HookAction:
    """The hooks of one call, as one action with a state.

    So a checkpoint always has the same entry for hooks, whatever the hooks of a call
    are.
    """

    def __init__(self, hooks: Sequence[Action]) -> None:
        self._hooks = tuple(hooks)

    def __call__(self, output: Output) -> None:
        for hook in self._hooks:
            hook(output)

    def bind_step_counter(self, counter: Any) -> None:
        """Passes on the step counter."""
        notify(self._hooks, "bind_step_counter", counter)

    def resume_at(self, step: int) -> None:
        """Passes on the step from which training continues."""
        notify(self._hooks, "resume_at", step)

    def begin_training(self) -> None:
        """Passes on that training begins."""
        notify(self._hooks, "begin_training")

    def end_training(self) -> None:
        """Passes on that training has ended."""
        notify(self._hooks, "end_training")

    @property
    def _with_state(self) -> list[Any]:
        return [part for part in find_parts(self._hooks) if has_position(part)]

    @may_be_missing
    def get_state(self) -> dict[str, Any]:
        """Returns the states of the hooks that have one, such as `EarlyStopping`."""
        return {
            "states": [
                {"kind": type(part).__name__, "state": part.get_state()}
                for part in self._with_state
            ]
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the states, if this call has hooks of the same types."""
        parts = self._with_state
        kinds = [type(part).__name__ for part in parts]
        if kinds == [saved["kind"] for saved in state["states"]]:
            for part, saved in zip(parts, state["states"], strict=True):
                part.set_state(saved["state"])


class PeriodicCall:
    """Calls a function after a loop, if some time has passed since the last call.

    Args:
        seconds: The time between two calls.
        call: The function. In a job of several processes, the clock of the first one
            counts.
    """

    def __init__(self, seconds: float, call: Callable[[], Any]) -> None:
        self._seconds = seconds
        self._call = call
        self._last_at = time.monotonic()

    def __call__(self, output: Output) -> None:
        del output
        if agree_on("whether a checkpoint is due", self._is_due, get_peers()):
            self._last_at = time.monotonic()
            self._call()

    def _is_due(self) -> bool:
        return time.monotonic() - self._last_at >= self._seconds


class ListenedManager(CheckpointManager):
    """A manager that calls saving listeners when a checkpoint is on disk."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        listeners: Sequence[Callable[[str], Any]],
        **options: Any,
    ) -> None:
        super().__init__(checkpoint, directory, **options)
        self._listeners = tuple(listeners)

    def save(
        self, checkpoint_number: int | None = None, check_interval: bool = False
    ) -> str | None:
        path = super().save(checkpoint_number, check_interval)
        if path is not None and self._listeners:
            self.sync()
            for listener in self._listeners:
                listener(path)
        return path


class Exports:
    """Calls exporters with each evaluation; keeps the results of the last calls."""

    def __init__(self, exporters: Sequence[Callable[[Output], Any]]) -> None:
        self._exporters = tuple(exporters)
        self.results: list[Any] = []

    def __call__(self, output: Output) -> None:
        self.results = [export(output) for export in self._exporters]
