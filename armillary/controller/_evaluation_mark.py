"""How far the evaluation of a step is: what each checkpoint says of it.

A checkpoint may be saved before the evaluation that follows its step, or within it.
What the evaluation and its actions change is not in it then. It says so, and a run that
resumes there does what is left first, before it trains on.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from armillary.actions._save_if_preempted import SaveCheckpointIfPreempted
from armillary.typing import Action


class EvaluationMark:
    """The evaluations of one controller that belong to its training.

    Attributes:
        evaluated: The step that was evaluated last, with all actions, or `None`.
    """

    def __init__(self, read_step: Callable[[], int], trainer: Any) -> None:
        self._read_step, self._trainer = read_step, trainer
        self.evaluated: int | None = None
        # The step at which an evaluation follows, -1 for where the data ends.
        self._due: int | None = None
        # Actions that have had the output of the evaluation that is due.
        self._num_actions = 0

    def expect(self, step: int | None) -> None:
        """Says where the next evaluation is to be: -1 where the data ends, or nowhere.

        If data ends before, it is there.
        """
        if step != self._due:
            self._due, self._num_actions = step, 0

    @property
    def is_expecting(self) -> bool:
        """Whether an evaluation follows at all."""
        return self._due is not None

    @property
    def is_due(self) -> bool:
        """Whether an evaluation follows at this step, as far as is known."""
        step = self._read_step()
        if self._due is None or step == self.evaluated:
            return False
        return step == self._due or bool(
            getattr(self._trainer, "data_exhausted", False)
        )

    def take(self, actions: Sequence[Action]) -> Iterator[Action]:
        """Yields the actions that lack the output of this evaluation, and counts them.

        A save within an action finds that one to be done again, and nothing before it.
        """
        step = self._read_step()
        for index in range(self._num_actions, len(actions)):
            action = actions[index]
            # What only saves has nothing left to do.
            only_saves = isinstance(action, SaveCheckpointIfPreempted)
            self._num_actions = index + only_saves
            if self._num_actions == len(actions):
                self.evaluated = step
            yield action
        self.evaluated, self._num_actions = step, 0

    def get_state(self) -> dict[str, Any]:
        """Returns what a checkpoint of this moment says."""
        actions_done = self._num_actions if self.is_due else None
        return {"evaluated": self.evaluated, "actions_done": actions_done}

    def set_state(self, state: dict[str, Any] | None) -> None:
        """Takes over what a checkpoint says; nothing, if it was saved without."""
        state = state or {"evaluated": None, "actions_done": None}
        self.evaluated, num_actions = state["evaluated"], state["actions_done"]
        self._due = None if num_actions is None else self._read_step()
        self._num_actions = num_actions or 0
