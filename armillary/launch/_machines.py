"""The places of the workers on the machine of the launcher, attempt after attempt."""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from tempfile import TemporaryDirectory

from armillary.launch._environment import DevicePlan, find_addresses
from armillary.launch._process import Child, LaunchedProcess

Say = Callable[[str], None]


class Machines:
    """The machine of the launcher, which has a place for every worker."""

    def __init__(
        self,
        num_workers: int,
        devices: DevicePlan,
        fewest: int | None = None,
        wait_seconds: float = 0.0,
    ) -> None:
        self._num_workers = num_workers
        self.devices = devices
        self._fewest = fewest or num_workers
        self._wait_seconds = wait_seconds
        self._all_gpus = devices.gpus
        # The places whose worker did not come, with the time when that began.
        self._away: dict[int, float] = {}
        self._places: list[int] = []
        self._has_waited_enough = False
        self._cache: TemporaryDirectory[str] | None = None

    async def reserve(self, say: Say) -> tuple[list[str], str]:
        """Finds a place for each worker of an attempt.

        Returns:
            Their addresses, and the end of the message about the start.
        """
        # After an attempt without some of the places, the next one uses all again.
        away = self._away if self._has_waited_enough else {}
        self._has_waited_enough = False
        self._places = [i for i in range(self._num_workers) if i not in away]
        if self._all_gpus:
            chosen = [self._all_gpus[place] for place in self._places]
            # The evaluator has the GPUs that come after the GPUs of all workers.
            chosen += self._all_gpus[self._num_workers :]
            self.devices = dataclasses.replace(self.devices, gpus=tuple(chosen))
        return find_addresses(len(self._places)), ""

    def note_missing(self, indices: Collection[int]) -> str:
        """Notes that workers did not come; returns a message about the next attempt.

        The message is empty if the job cannot continue without them.
        """
        now = time.monotonic()
        for index in indices:
            self._away.setdefault(self._places[index], now)
        left = self._num_workers - len(self._away)
        if left < self._fewest:
            self._away.clear()
            return ""
        who = f"{len(self._away)} of {self._num_workers} workers did not come"
        waited_seconds = now - min(self._away.values(), default=now)
        seconds_left = self._wait_seconds - waited_seconds
        self._has_waited_enough = seconds_left <= 0
        if self._has_waited_enough:
            return f"{who}, so it continues with {left}"
        return f"{who}, and may for {seconds_left:.0f} s more"

    def note_present(self, index: int) -> None:
        """Notes that a worker has come."""
        self._away.pop(self._places[index], None)

    def start(
        self,
        label: str,
        index: int | None,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> LaunchedProcess:
        """Starts worker `index`, or the evaluator."""
        return Child(label, arguments, self._with_cache(environment))

    def release(self) -> None:
        """Gives the machines back, with everything that runs there."""

    def _with_cache(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        """Adds a folder for compiled programs that all attempts share.

        A folder that the user has chosen stays.
        """
        if environment.get("JAX_COMPILATION_CACHE_DIR"):
            return environment
        if self._cache is None:
            prefix = "armillary-compiled-"
            self._cache = TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        return {
            **environment,
            "JAX_COMPILATION_CACHE_DIR": self._cache.name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def close(self) -> None:
        """Ends all use of the machines, after the last attempt."""
        if self._cache is not None:
            self._cache.cleanup()
