"""The parameter servers of a coordinator: their start, and the loss of one."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from armillary._logging import logger
from armillary._optional import import_ray
from armillary.errors import PSUnavailableError
from armillary.parameter_server._node import first_line
from armillary.parameter_server._server import ParameterServer
from armillary.parameter_server._strategy import ParameterServerStrategy

_GREETING_SECONDS = 10


class ServerGroup:
    """The actors of all parameter servers, and whether one of them is gone."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = strategy
        self.actors = [self._make(index) for index in range(strategy.num_ps)]
        self._is_broken = False

    def _make(self, index: int) -> Any:
        actor = import_ray().remote(ParameterServer)
        return actor.options(**self._strategy.actor_options("ps", index)).remote()

    def watch(self, is_stopped: Callable[[], bool]) -> None:
        """Warns about parameter servers that have not started in time.

        Calls that need a server wait for it without a limit.
        """
        ray = import_ray()
        seconds = self._strategy.report_seconds
        greetings = [server.greet.remote() for server in self.actors]
        ray.wait(greetings, num_returns=len(greetings), timeout=seconds)
        up, _ = ray.wait(greetings, num_returns=len(greetings), timeout=0)
        for index, greeting in enumerate(greetings):
            if greeting not in up and not is_stopped():
                logger.warning(
                    "%s is not up after %.0f s: %s.",
                    self._strategy.name_task("ps", index),
                    seconds,
                    self._strategy.describe_absent("ps", index),
                )

    def revive(self, fill: Callable[[Sequence[Any]], None]) -> None:
        """Replaces parameter servers that are gone, and fills all servers again."""
        if not self._is_broken:
            return
        ray = import_ray()
        # Threads of workers see a change by the identity of this list.
        actors = [*self.actors]
        for index, server in enumerate(actors):
            try:
                ray.get(server.greet.remote(), timeout=_GREETING_SECONDS)
            except ray.exceptions.RayError:
                actors[index] = self._make(index)
        self._is_broken = False
        self.actors = actors
        fill(actors)

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Raises `PSUnavailableError` if a server is lost in the code inside it."""
        try:
            yield
        except import_ray().exceptions.RayActorError as error:
            raise self.note_lost(error) from error

    def note_lost(
        self, error: BaseException, which: int | str = "(one)"
    ) -> PSUnavailableError:
        """Notes that a server is gone; returns the error to raise."""
        self._is_broken = True
        return PSUnavailableError(
            f"Parameter server {which} is gone ({first_line(error)}), and with it "
            "the changes of its variables since the last `join`. Restore the last "
            "checkpoint and schedule further calls: the next one starts a new server, "
            "and fills all servers from the coordinator's objects."
        )
