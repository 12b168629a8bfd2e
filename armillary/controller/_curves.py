"""Writes outputs to summaries and to the file of metrics."""

from collections.abc import Mapping
from typing import Any

from armillary._json_values import find_numbers
from armillary._logging import logger
from armillary._rising_clock import RisingClock
from armillary.summary._metrics_file import MetricsFile
from armillary.summary._summary_manager import SummaryManager
from armillary.typing import Output


class Curves:
    """Writes outputs to summaries, and to the file of metrics next to them."""

    def __init__(
        self, summary_manager: SummaryManager, directory: Any, clock: RisingClock
    ) -> None:
        self.summary_manager = summary_manager
        self.summary_dir = getattr(summary_manager, "summary_dir", None)
        # The file of a training job may be next to the checkpoints. A job that only
        # evaluates them writes nothing there.
        is_with_checkpoints = self.summary_dir is None
        folder = directory if is_with_checkpoints else self.summary_dir
        self.file = MetricsFile(folder, is_of_training=is_with_checkpoints, clock=clock)
        # For each kind of record, the names of its scalars.
        self._names: dict[str, set[str]] = {}
        self._has_warned = False

    def write(self, record: str, step: int, output: Output, **fields: Any) -> None:
        """Writes an output to the summaries, and `fields` to the file of metrics."""
        self.file.write(record, step, **fields)
        self.summary_manager.write_summaries(output, step=step)
        if self.summary_dir is not None and not self._has_warned:
            self._warn_of_shared_names(record, output or {})

    def _warn_of_shared_names(self, record: str, output: Mapping[str, Any]) -> None:
        """Warns once if training and evaluations write points of one curve."""
        self._names.setdefault(record, set()).update(find_numbers(output))
        if len(self._names) < 2:
            return
        shared = sorted(set.intersection(*self._names.values()))
        if shared:
            self._has_warned = True
            logger.warning(
                "Training and evaluations both write `%s` to `%s`, so TensorBoard "
                "draws them as one curve. Give evaluations a directory of their own: "
                '`Controller(..., summary_dir="run/train", '
                'eval_summary_dir="run/eval")`.',
                shared[0],
                self.summary_dir,
            )

    def resume_at(self, step: int) -> None:
        """Notes the step at which a restored run continues, if the manager can."""
        # A user's own manager may have only the methods of Orbit's manager.
        resume_at = getattr(self.summary_manager, "resume_at", None)
        if resume_at is not None:
            resume_at(step)

    def flush(self) -> None:
        self.summary_manager.flush()
        self.file.flush()
