"""The reports of the processes about themselves, and the conclusions from them."""

from collections.abc import Mapping
from typing import NamedTuple

_FRESH_SECONDS = 10.0
_SILENT_SECONDS = 3.0
"""Three reports that did not come: less than any sensible `hang_timeout_seconds`."""


class Place(NamedTuple):
    """Where a program is, as far as its loops tell.

    Attributes:
        phase: What it does, such as `"data"` or `"step"`.
        moves: A number that changes whenever it goes on.
    """

    phase: str
    moves: int


class Report(NamedTuple):
    """The report that a process sends every second.

    Attributes:
        phase: What it does.
        line: The line of the user's program that it is at.
        quiet_seconds: How long it has not gone on.
        limit_seconds: How long it may, or `None` if it is in no loop that is watched.
        is_compiling: Whether it compiles, which may take any time.
        has_ended: Whether it has reached the end of its program.
    """

    phase: str
    line: str
    quiet_seconds: float
    limit_seconds: float | None = None
    is_compiling: bool = False
    has_ended: bool = False


class Sighting(NamedTuple):
    """A report, and when it arrived, by the clock of this process."""

    report: Report
    time: float

    def quiet_seconds(self, now: float) -> float:
        """Returns how long the process has not gone on, as far as is known."""
        return self.report.quiet_seconds + now - self.time


def see_start(now: float) -> Sighting:
    """Returns what is known of a process that has just joined."""
    return Sighting(Report("start", "a line that it has not told", 0.0), now)


def find_hang(sightings: Mapping[int, Sighting], count: int, now: float) -> str | None:
    """Returns what to say if no process has gone on for too long, else `None`.

    While one process goes on, or compiles, or is in no loop that is watched, the others
    wait for it with good reason.
    """
    running = [seen for seen in sightings.values() if not seen.report.has_ended]
    limits = [seen.report.limit_seconds for seen in running]
    limits = [limit for limit in limits if limit is not None]
    if not limits:
        return None
    for seen in running:
        # One that is silent is stopped, whatever it was about to do.
        if now - seen.time >= min(limits):
            continue
        limit = seen.report.limit_seconds
        if limit is None or seen.quiet_seconds(now) < limit:
            return None
        if seen.report.is_compiling and now - seen.time < _FRESH_SECONDS:
            return None
    who = "No process has" if count > 1 else "The program has not"
    if count > 1:
        advice = "Look at the one that does not wait for another one"
    else:
        advice = "Look at this line"
    places = "\n".join(
        f"  process {index} of {count}: {_describe(seen, now)}"
        for index, seen in sightings.items()
    )
    return (
        f"{who} gone on for {min(limits):g} seconds (`hang_timeout_seconds`):\n"
        f"{places}\n"
        f"{advice}, or allow more time with a larger `hang_timeout_seconds`: it must "
        "exceed the longest loop, evaluation, save and action."
    )


def _describe(seen: Sighting, now: float) -> str:
    if seen.report.has_ended:
        return "has reached the end of its program"
    phase = "compiling" if seen.report.is_compiling else seen.report.phase
    text = f"{phase} for {seen.quiet_seconds(now):.0f} s, at {seen.report.line}"
    silent = now - seen.time
    if silent > _SILENT_SECONDS:
        text += f"; it has not answered for {silent:.0f} s (stopped?)"
    return text
