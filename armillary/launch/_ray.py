"""The machines of a Ray cluster: Ray finds the places, and reports lost machines."""

import asyncio
import io
import math
import os
import signal
import socket
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from armillary._checks import counted
from armillary._optional import import_ray
from armillary.launch import _process
from armillary.launch._environment import DevicePlan, can_use_gpus
from armillary.launch._machines import Machines, Say
from armillary.launch._process import LaunchedProcess, end_group, start_tied

_PROBE_SECONDS = 10.0
_CONNECT_SECONDS = 20.0
_START_SECONDS = 120.0
_OF_THE_MACHINE = ("CUDA_VISIBLE_DEVICES", "HOSTNAME")


class _TooLateError(BaseException):
    """The time is over. Ray catches every `Exception`, and tries again."""


def connect_to_ray(address: str) -> Any:
    """Connects to a cluster and returns the package `ray`."""
    host, _, port = address.rpartition(":")

    def end(*_: Any) -> None:
        raise _TooLateError(f"Nothing speaks as Ray does in {_CONNECT_SECONDS:g} s.")

    try:
        ray = import_ray()
        socket.create_connection((host, int(port)), _PROBE_SECONDS).close()
        # By itself, Ray would try for a quarter of an hour.
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, _CONNECT_SECONDS)
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (_TooLateError, Exception) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"`--ray` is {address!r}, but the launcher cannot join a cluster there: "
            f"{reason or type(error).__name__} Use HOST:PORT as `ray start --head` "
            "printed it, on a machine of the cluster, with its versions of Ray and "
            "Python, and its token (`RAY_AUTH_TOKEN`)."
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ray


# All methods run in the thread of the actor's event loop. This thread ends only with
# the actor, so the kernel ends the worker together with the actor.
class _WorkerActor:
    """The parent of a worker on its machine, where Ray sends this class as a value."""

    async def look(self) -> tuple[str, str, int]:
        """Returns an address, the name and a free port of the machine."""
        import ray

        address = ray.util.get_node_ip_address()
        # The socket stays open until the worker starts, to keep the port.
        self._socket = socket.socket()
        self._socket.bind((address, 0))
        return address, socket.gethostname(), self._socket.getsockname()[1]

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> None:
        """Starts the worker; a few of its variables come from the machine."""
        variables = dict(environment)
        for name in _OF_THE_MACHINE:
            variables.pop(name, None)
            if name in os.environ:
                variables[name] = os.environ[name]
        self._socket.close()
        self._since = time.monotonic()
        self._process, self._line = start_tied(command, variables, folder)

    async def read(self, name: str, size: int) -> bytes:
        """Returns the next bytes of a stream; none at its end."""
        stream = self._line if name == "line" else getattr(self._process, name)
        return await asyncio.to_thread(os.read, stream.fileno(), size)

    async def wait(self) -> tuple[int, float]:
        """Returns the exit code of the worker, as in Python, and its seconds."""
        flags = os.WEXITED | os.WNOWAIT
        await asyncio.to_thread(os.waitid, os.P_PID, self._process.pid, flags)
        return end_group(self._process), time.monotonic() - self._since

    async def send_signal(self, number: int) -> None:
        """Sends a signal to the worker alone, if it runs."""
        if self._process.returncode is None:
            os.kill(self._process.pid, number)


class _Place(NamedTuple):
    """The machine and the port reserved for a worker."""

    address: str
    machine: str
    port: int
    actor: Any


class _RayWorker(LaunchedProcess):
    """A worker on a machine of the cluster, as the launcher sees it."""

    def __init__(
        self,
        ray: Any,
        label: str,
        place: _Place,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(label)
        self._ray = ray
        self._place = place
        actor = place.actor
        command = [sys.executable, *arguments]
        started = actor.start.remote(command, environment, os.getcwd())
        self.stdout = io.BufferedReader(_Stream(ray, actor, started, "stdout"))
        self.stderr = io.BufferedReader(_Stream(ray, actor, started, "stderr"))
        self.line = io.BufferedReader(_Stream(ray, actor, started, "line"))
        self._watching = asyncio.create_task(self._watch(started))

    def kill(self) -> None:
        if not self.ended.done():
            self._ray.kill(self._place.actor)
            self._end(-signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        # `_watch` reports a lost worker, so the answer is not needed.
        self._place.actor.send_signal.remote(number)

    async def _watch(self, started: Any) -> None:
        """Waits for the end of the worker, or for the loss of its machine."""
        try:
            await started
            code, seconds = await self._place.actor.wait.remote()
        except self._ray.exceptions.RayError as error:
            where = f"on {self._place.machine} ({self._place.address})"
            self._end(-signal.SIGKILL, f"{where}: {_shorten(error)}")
        else:
            self._end(code, seconds=seconds)


class _Stream(io.RawIOBase):
    """One output stream of a worker, read by a thread."""

    def __init__(self, ray: Any, actor: Any, started: Any, name: str) -> None:
        self._ray = ray
        self._actor = actor
        self._started = started
        self._name = name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            self._ray.get(self._started)  # Ray may begin a call before an earlier one.
            data = self._ray.get(self._actor.read.remote(self._name, len(buffer)))
        except self._ray.exceptions.RayError:
            return 0
        buffer[: len(data)] = data
        return len(data)


class RayMachines(Machines):
    """The machines of a Ray cluster; every attempt takes as many as there are."""

    def __init__(
        self,
        ray: Any,
        fewest: int,
        most: int,
        share: int | None,
        wait_seconds: float,
    ) -> None:
        super().__init__(most, DevicePlan(virtual_cpus=share), fewest, wait_seconds)
        self._ray = ray
        # The class is sent by value, so that the machines need not have this library.
        for module in (_process, sys.modules[__name__]):
            ray.cloudpickle.register_pickle_by_value(module)
        self._group: Any = None
        self._found: list[_Place] = []
        self._needs = {"CPU": 1}
        has_gpus = any(machine.get("GPU") for machine in self._find_machines())
        if has_gpus and can_use_gpus(os.environ):
            self._needs["GPU"] = share or 1
            self.devices = DevicePlan(num_gpus=self._needs["GPU"])

    async def reserve(self, say: Say) -> tuple[list[str], str]:
        """Reserves as many places as there are; waits for the fewest allowed."""
        while True:
            await self._reserve_group(say)
            try:
                work = self._start_actors()
                self._found = await asyncio.wait_for(work, _START_SECONDS)
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                self.release()
                say(f"a machine was lost before it had a worker: {_shorten(error)}")
                continue

            addresses = [f"{place.address}:{place.port}" for place in self._found]
            workers_on = Counter(place.machine for place in self._found)
            shown = [f"{machine} ({count})" for machine, count in workers_on.items()]
            return addresses, f" on {', '.join(shown)}"

    def start(
        self,
        label: str,
        index: int | None,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> LaunchedProcess:
        assert index is not None
        place = self._found[index]
        return _RayWorker(self._ray, label, place, arguments, environment)

    def note_missing(self, indices: Collection[int]) -> str:
        """Does nothing, because Ray knows the machines that are missing."""
        return ""

    def note_present(self, index: int) -> None:
        """Does nothing, because Ray knows the machines that are present."""

    def release(self) -> None:
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._group = None
        self._found = []

    def close(self) -> None:
        self._ray.shutdown()

    async def _reserve_group(self, say: Say) -> None:
        """Reserves as many places as the cluster has room for, at least the fewest."""
        # Workers with GPUs run on few machines, which connects them best. Other workers
        # run on many machines, because each computes on all cores of its machine.
        strategy = "PACK" if "GPU" in self._needs else "SPREAD"
        count = 0
        has_said = False
        wanted = self._count_room(self._find_machines())
        while True:
            wanted = min(self._num_workers, max(self._fewest, wanted))
            if count != wanted:
                self.release()
                count = wanted
                bundles = [self._needs] * count
                self._group = self._ray.util.placement_group(bundles, strategy=strategy)
            for _ in range(max(1, math.ceil(self._wait_seconds))):
                # Ray takes only whole seconds.
                if await asyncio.to_thread(self._group.wait, 1):
                    return
            if count > self._fewest:
                free = self._count_room([self._ray.available_resources()])
                wanted = min(count - 1, free)
                continue
            # The group is kept meanwhile, so that Ray may start machines for it.
            wanted = self._count_room(self._find_machines())
            if not has_said:
                has_said = True
                needs = " and ".join(f"{n} {name}" for name, n in self._needs.items())
                say(
                    f"waits for room for {counted(count, 'worker')} with {needs} each: "
                    f"the whole cluster has room for {wanted}."
                )

    def _find_machines(self) -> list[dict[str, float]]:
        """Returns the resources of each live machine, used ones included."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _count_room(self, machines: Iterable[Mapping[str, float]]) -> int:
        """Returns the number of workers for which some machines have resources."""
        room = 0
        for resources in machines:
            counts: list[float] = []
            for name, need in self._needs.items():
                has = resources.get(name, 0)
                counts.append(has // need)
            room += int(min(counts))
        return room

    async def _start_actors(self) -> list[_Place]:
        """Starts an actor at each place, and looks at its machine."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = self._ray.remote(_WorkerActor)
        actors: list[Any] = []
        for index in range(self._group.bundle_count):
            scheduling = PlacementGroupSchedulingStrategy(self._group, index)
            actor = actor_class.options(
                num_cpus=1,
                num_gpus=self._needs.get("GPU", 0),
                scheduling_strategy=scheduling,
            )
            actors.append(actor.remote())

        # All actors look at the same time.
        found = await asyncio.gather(*(actor.look.remote() for actor in actors))
        places: list[_Place] = []
        for (address, machine, port), actor in zip(found, actors, strict=True):
            places.append(_Place(address, machine, port, actor))
        # Neighboring workers are on one machine. Actors cannot be compared.
        return sorted(places, key=lambda place: (place.address, place.machine))


def _shorten(error: BaseException) -> str:
    """Returns Ray's description of an error, in one line."""
    # The lines before the last one hold the names that Ray gave to the actor.
    last = str(error).strip().rpartition("\n")[2]
    return f"Ray says: {textwrap.shorten(last, 240)}" if last else "no answer."
