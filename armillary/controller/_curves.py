"""Where the curves of a controller go: to summaries, and to the file beside them."""

from collections.abc import Mapping
from typing import Any

from armillary._numbers import find_numbers
from armillary.summary._metrics_file import MetricsFile
from armillary.summary._summary_manager import NoopSummaryManager, SummaryManager


class Curves:
    """The outputs of loops or of evaluations.

    Attributes:
        summary_manager: Writes them as summaries.
        summary_dir: Where, if that is known.
        file: Takes their scalars. It is beside the summaries, or else in `directory`.
    """

    def __init__(
        self, summary_manager: SummaryManager | NoopSummaryManager, directory: Any
    ) -> None:
        self.summary_manager = summary_manager
        self.summary_dir = getattr(summary_manager, "summary_dir", None)
        # Who evaluates the checkpoints of another job writes nothing beside them.
        self.file = (
            MetricsFile(directory, is_of_training=True)
            if self.summary_dir is None
            else MetricsFile(self.summary_dir)
        )

    def write_loop(
        self,
        step: int,
        output: Mapping[str, Any],
        scalars: Mapping[str, float],
        speed: float,
    ) -> None:
        """Writes the output of a loop of training, and the scalars among it."""
        values = {**output, "steps_per_second": speed}
        self.summary_manager.write_summaries(values, step=step)
        self.file.write("train", step, steps_per_second=speed, values=scalars)

    def write_evaluation(
        self, step: int, output: dict[str, Any], *, name: str, seconds: float
    ) -> None:
        """Writes the output of an evaluation, below its name if it has one."""
        named = {name: output} if name else output
        self.summary_manager.write_summaries(named, step=step)
        values = find_numbers(output)
        self.file.write("eval", step, name=name, seconds=seconds, values=values)
        self.flush()

    def flush(self) -> None:
        """Leaves nothing unwritten."""
        self.summary_manager.flush()
        self.file.flush()
