"""The machines of a Ray cluster. Ray finds the places, and tells of lost ones.

A worker on a machine of a Ray cluster, as the launcher sees it.
"""

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from armillary.launch import _exec, _ray_cluster
from armillary.launch._child import Machines, Process, Say
from armillary.launch._environment import DevicePlan
from armillary.launch._ray_cluster import (
    Bundle,
    connect,
    find_machines,
    plan_bundle,
)


class Place(NamedTuple):
    """Where a worker will run."""

    address: str
    machine: str
    port: int
    host: Any


class RayChild(Process):
    """A worker on a machine of a Ray cluster, and the actor that is its parent."""

    def __init__(
        self,
        ray: Any,
        label: str,
        place: Place,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(label)
        self._ray, self._place = ray, place
        started = place.host.start.remote(
            _exec.__file__, [sys.executable, *arguments], environment, os.getcwd()
        )
        self.stdout = _RemoteStream(self, "stdout")
        self.stderr = _RemoteStream(self, "stderr")
        self._tasks = {asyncio.create_task(self._watch(started))}

    def look(self) -> None:
        """Does nothing: no SIGCHLD tells of this worker."""

    def kill(self) -> None:
        """Ends the worker, if it runs, with its actor."""
        if not self.ended.done():
            self._ray.kill(self._place.host)
            self._end(-signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if not self.ended.done():
            task = asyncio.create_task(self._send(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def read(self, stream: str) -> bytes:
        """Returns what the worker says next; nothing at the end."""
        try:
            return await self._place.host.read.remote(stream)
        except self._ray.exceptions.RayActorError:
            return b""

    async def _send(self, number: int) -> None:
        # `_watch` tells of a worker that is lost.
        with contextlib.suppress(self._ray.exceptions.RayError):
            await self._place.host.send_signal.remote(number)

    async def _watch(self, started: Any) -> None:
        try:
            await started
            returncode, seconds = await self._place.host.wait.remote()
        except self._ray.exceptions.RayError as error:
            is_silent = isinstance(error, self._ray.exceptions.ActorUnavailableError)
            why = "nothing answers there." if is_silent else shorten_error(error)
            where = f"{self._place.machine} ({self._place.address})"
            self._end(-signal.SIGKILL, f"on {where}: {why}")
        else:
            self._end(returncode, seconds=seconds)


class _RemoteStream:
    """What a worker writes to one of its streams."""

    def __init__(self, child: RayChild, name: str) -> None:
        self._child, self._name = child, name

    async def read(self) -> bytes:
        return await self._child.read(self._name)

    def close(self) -> None:
        """Does nothing: the stream is the actor's."""


def shorten_error(error: BaseException) -> str:
    """Returns what Ray says of an error, in a line."""
    # In front of the last line stand the names that Ray gave to the actor.
    last = str(error).strip().rpartition("\n")[2]
    return f"Ray says: {textwrap.shorten(last, 240)}" if last else "no answer."


_POLL_SECONDS = 1  # Ray takes whole ones only.
_PLACE_SECONDS = 5.0
_START_SECONDS = 120.0
_NOT_OF_THE_LAUNCHER = ("CUDA_VISIBLE_DEVICES", "HOSTNAME")


def join_machines(
    address: str,
    *,
    min_workers: int,
    max_workers: int,
    devices_per_worker: int | None,
    paths: Sequence[str],
) -> tuple["RayMachines", DevicePlan]:
    """Connects to a Ray cluster; returns machines, and devices of each worker."""
    ray = connect(address)
    bundle, devices = plan_bundle(find_machines(ray), devices_per_worker)
    machines = RayMachines(
        ray, bundle, min_workers=min_workers, max_workers=max_workers, paths=paths
    )
    return machines, devices


class RayMachines(Machines):
    """The machines of a Ray cluster, of which every attempt takes what there is.

    Args:
        ray: The package, connected to the cluster.
        bundle: What each worker takes of a machine.
        min_workers: Workers without which there is no attempt.
        max_workers: Workers of an attempt at most.
        paths: What must exist on each machine.
    """

    def __init__(
        self,
        ray: Any,
        bundle: Bundle,
        *,
        min_workers: int,
        max_workers: int,
        paths: Sequence[str],
    ) -> None:
        # Or the machines would have to import this library to find the class.
        ray.cloudpickle.register_pickle_by_value(_ray_cluster)
        self._ray, self._bundle = ray, bundle
        self._min_workers, self._max_workers = min_workers, max_workers
        self._paths = [os.getcwd(), sys.executable, _exec.__file__, *paths]
        self._group: Any = None
        self._places: list[Place] = []

    async def reserve(self, say: Say, is_ending: asyncio.Event) -> list[str]:
        """Reserves as many places as there are; waits for the fewest allowed."""
        while await self._reserve_group(say, is_ending):
            places = asyncio.create_task(self._prepare())
            end = asyncio.create_task(is_ending.wait())
            try:
                await asyncio.wait(
                    {places, end},
                    timeout=_START_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if places.done():
                    self._places = sorted(places.result(), key=lambda place: place[:2])
                    return [f"{place.address}:{place.port}" for place in self._places]
                error = TimeoutError()
            except self._ray.exceptions.RayError as found:
                error = found
            finally:
                places.cancel()
                end.cancel()
            if not is_ending.is_set():
                why = shorten_error(error)
                say(f"a machine was lost before it started a worker: {why}")
            self.release()
        return []

    def describe(self) -> str:
        """Returns how many workers each machine has."""
        counts = Counter(place.machine for place in self._places)
        return f" on {', '.join(f'{name} ({n})' for name, n in counts.items())}"

    def start(
        self,
        label: str,
        index: int | None,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> Process:
        """Starts a worker at its place."""
        assert index is not None
        environment = {
            name: value
            for name, value in environment.items()
            if name not in _NOT_OF_THE_LAUNCHER
        }
        return RayChild(self._ray, label, self._places[index], arguments, environment)

    def release(self) -> None:
        """Gives the places back; Ray kills what runs there."""
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._group, self._places = None, []

    def close(self) -> None:
        """Leaves the cluster."""
        self._ray.shutdown()

    async def _reserve_group(self, say: Say, is_ending: asyncio.Event) -> bool:
        """Reserves places; returns False if the job ended before there were any."""
        said, count = "", self._count_places()
        while not is_ending.is_set():
            self._group = self._ray.util.placement_group(
                [self._bundle.resources] * count, strategy=self._bundle.strategy
            )
            start = time.monotonic()
            while not await asyncio.to_thread(self._group.wait, _POLL_SECONDS):
                if is_ending.is_set():
                    break
                if time.monotonic() < start + _PLACE_SECONDS:
                    continue
                if count > self._min_workers:
                    count = max(self._min_workers, min(count - 1, self._count_free()))
                    break
                # The group is kept meanwhile, so that Ray may start machines for it.
                if said != (said := self._explain_wait()):
                    say(said)
                if count < (more := self._count_places()):
                    count = more
                    break
            else:
                return True
            self.release()
        return False

    def _explain_wait(self) -> str:
        num_machines = len(machines := find_machines(self._ray))
        room, need = self._bundle.count_in(machines), self._min_workers
        text = (
            f"waits for room for {need} worker{'s' if need > 1 else ''} with "
            f"{self._bundle} each: the {num_machines} machines of the cluster have "
            f"room for {room}"
        )
        return f"{text}, but it is in use." if room >= need else f"{text} in all."

    def _count_places(self) -> int:
        """Returns how many workers to try, by the machines that live."""
        return self._clamp(self._bundle.count_in(find_machines(self._ray)))

    def _count_free(self) -> int:
        """Returns for how many workers there is room now, at most."""
        return self._bundle.count_in([self._ray.available_resources()])

    def _clamp(self, count: int) -> int:
        return min(self._max_workers, max(self._min_workers, count))

    async def _prepare(self) -> list[Place]:
        """Starts a host at each place."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle, count = self._bundle, self._group.bundle_count
        host_class = self._ray.remote(_ray_cluster.Host)
        hosts = [
            host_class.options(
                num_cpus=1,
                num_gpus=bundle.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(count)
        ]
        places = []
        for host, found in zip(
            hosts,
            await asyncio.gather(*(host.prepare.remote(self._paths) for host in hosts)),
            strict=True,
        ):
            address, machine, port, missing = found
            if missing:
                raise OSError(
                    f"the machine {machine} ({address}) has no {missing!r}. Programs, "
                    "data and checkpoints must be at the same paths on all machines, "
                    "such as in a shared file system, and so must Python and its "
                    "packages"
                )
            places.append(Place(address, machine, port, host))
        return places
