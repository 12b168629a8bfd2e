"""The contestants of a task: two references written by hand, Armillary, and the peers.

A contestant is a class with `setup(task, options)` and `run(num_steps)`. Modules are
imported when a contestant is made, so that each process holds one framework only.
"""

import importlib
from typing import Protocol

from benchmarks.protocol import Options
from benchmarks.tasks import Task

CONTESTANTS = {
    "reference-step": "benchmarks.contestants.reference:ReferenceStep",
    "reference-scan": "benchmarks.contestants.reference:ReferenceScan",
    "armillary": "benchmarks.contestants.controller:ControllerContestant",
    "armillary-saving": "benchmarks.contestants.controller:SavingContestant",
    "armillary-step": "benchmarks.contestants.controller:StepContestant",
    "armillary-keras": (
        "benchmarks.contestants.keras_controller:KerasControllerContestant"
    ),
    "keras": "benchmarks.peers.keras:KerasContestant",
    "orbit": "benchmarks.peers.orbit:OrbitContestant",
    "lightning": "benchmarks.peers.lightning:LightningContestant",
    "kauldron": "benchmarks.peers.kauldron:KauldronContestant",
    "levanter": "benchmarks.peers.levanter:LevanterContestant",
    "tunix": "benchmarks.peers.tunix:TunixContestant",
}
REFERENCES = ("reference-step", "reference-scan")
SAVE_INTERVAL = 100
"""The interval of the saves of `armillary-saving`."""
PEERS = ("keras", "orbit", "lightning", "kauldron", "tunix")


class Contestant(Protocol):
    """Trains on one task.

    It may also have `facts`, a dictionary that the report keeps.
    """

    def setup(self, task: Task, options: Options) -> None:
        """Builds model, optimizer and data.

        Raises:
            UnsupportedError: If this contestant cannot run the case.
        """
        ...

    def run(self, num_steps: int) -> float:
        """Runs steps to their end; returns the mean loss of the last loop.

        Args:
            num_steps: Steps to run, a multiple of `steps_per_loop`.
        """
        ...


def make_contestant(name: str) -> Contestant:
    """Returns a new contestant."""
    module, _, attribute = CONTESTANTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()
