"""What the time of a run is spent on."""

from enum import StrEnum


class Category(StrEnum):
    """What a second of a run was spent on. Every second is in exactly one category."""

    STEPPING = "stepping"
    """Training steps run on the device, or Python starts them or waits for them."""
    COMPILING = "compiling"
    """JAX traces or compiles, in whatever phase it has to."""
    DATA = "data"
    """A loop waits for data, and the device has no steps left to run."""
    SAVING = "saving"
    """Training waits for a save; what is written in the background is not counted."""
    RESTORING = "restoring"
    """A checkpoint is read."""
    EVALUATING = "evaluating"
    """An evaluation runs."""
    START_UP = "start_up"
    """From the start of the process to the start of training."""
    OTHER = "other"
    """Actions, summaries and log lines, as far as the device waits for them."""
    LOST = "lost"
    """Work after a checkpoint that the run went back to: it was done again."""
    DOWN = "down"
    """From the last sign of one attempt to the start of the next."""


LABELS = {
    Category.STEPPING: "stepping",
    Category.COMPILING: "compiling",
    Category.DATA: "waiting for data",
    Category.SAVING: "saving",
    Category.RESTORING: "restoring",
    Category.EVALUATING: "evaluating",
    Category.START_UP: "start-up",
    Category.OTHER: "actions, summaries, logging",
    Category.LOST: "lost: work done again",
    Category.DOWN: "lost: down between attempts",
}
"""What people call the categories."""
