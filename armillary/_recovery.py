"""Decides whether to go back to a checkpoint when the state is no longer finite.

For trainers with `on_non_finite="restore"`. The data is not taken back: with the same
batches, the same steps would fail again. A checkpoint that was restored several times
leads nowhere, so that the error is then raised.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from armillary._logging import logger
from armillary._runner import AbstractTrainer
from armillary._saving import Saving
from armillary._standard_runner import StandardTrainer
from armillary.errors import CheckpointDamageError, NonFiniteError

_MOST_RESTORES = 3


class Recovery:
    """Counts the restores of one controller.

    Args:
        trainer: The trainer, if there is one.
        saving: Restores.
    """

    def __init__(self, trainer: AbstractTrainer | None, saving: Saving) -> None:
        self._trainer, self._saving = trainer, saving
        self._restores: Counter[str] = Counter()

    def restore_after(self, error: NonFiniteError) -> bool:
        """Goes back to the latest good checkpoint, but not to its position of the data.

        Checkpoints of later steps, which are there if the program restored an older one
        by hand, are passed over.

        Args:
            error: Why; it gets a note if there is nothing to restore.

        Returns:
            Whether training may go on; `False` if the trainer does not ask for it, or
            there is no such checkpoint, or this one was restored too often.
        """
        trainer, manager = self._trainer, self._saving.manager
        if not isinstance(trainer, StandardTrainer):
            return False
        if trainer._train_options.on_non_finite != "restore":
            return False
        if manager is None:
            error.add_note(
                "There is nothing to restore: the controller has no "
                "`checkpoint_manager`."
            )
            return False
        self._saving.sync()
        step = self._saving.read_step()
        paths = _find_up_to(step, manager.checkpoints)
        if not paths:
            error.add_note(
                f"There is nothing to restore: {manager.directory} holds no checkpoint "
                f"of step {step} or before. Set a smaller `checkpoint_interval`."
            )
            return False
        path = paths[0]
        if self._restores[path] == _MOST_RESTORES:
            error.add_note(
                f"{path} was restored {_MOST_RESTORES} times, and no later checkpoint "
                "was reached. Restore an earlier one."
            )
            return False
        self._restores[path] += 1
        times = f"{self._restores[path]} of {_MOST_RESTORES} times"
        reason = str(error).partition("\nThe state is")[0]
        note = f" ({times}), and went on with the data that follows, because {reason}"
        with _kept_positions(trainer):
            return any(self._restore_if_good(path, note) for path in paths)

    def _restore_if_good(self, path: str, note: str) -> bool:
        try:
            self._saving.restore(path, note=note)
        except CheckpointDamageError as error:
            logger.warning("`%s` is damaged and was skipped: %s.", path, error.damage)
            return False
        return True


def _find_up_to(step: int, paths: Sequence[str]) -> list[str]:
    """Returns the checkpoints of `step` or before, the one saved last first."""
    from etils import epath

    from armillary.checkpoint._folder import read_header

    headers = [(path, read_header(epath.Path(path))) for path in reversed(paths)]
    return [path for path, header in headers if header and header.number <= step]


@contextlib.contextmanager
def _kept_positions(trainer: StandardTrainer) -> Iterator[None]:
    """Keeps the training data where it is while a checkpoint is restored."""
    loop = trainer._train_loop
    datasets = [] if loop is None else loop.datasets
    states = [(d, d.get_state()) for d in datasets if d.is_repositionable]
    yield
    for dataset, state in states:
        dataset.set_state(state)
