"""Tests of how workers are placed on the machines of a Ray cluster, without Ray."""

import asyncio
import contextlib
import socket
import time
import types

import pytest

from armillary.launch import _ray
from armillary.launch._ray import RayMachines, connect_to_ray

GPUS = [{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 4}, {"CPU": 1}]


@pytest.mark.parametrize(
    ("machines", "is_usable", "share", "room", "needs", "messages"),
    [
        (GPUS, True, None, 12, {"CPU": 1, "GPU": 1}, "1 GPU each"),
        (GPUS, True, 4, 3, {"CPU": 1, "GPU": 4}, "4 GPUs each"),
        (GPUS, True, 8, 1, {"CPU": 1, "GPU": 8}, "8 GPUs each"),
        (GPUS, False, 8, 129, {"CPU": 1}, "8 virtual CPU devices each"),
        (GPUS[2:], True, None, 1, {"CPU": 1}, "devices as the script finds them"),
    ],
)
def test_gpus_are_taken_where_jax_can_use_them(
    monkeypatch, machines, is_usable, share, room, needs, messages
):
    monkeypatch.setattr(_ray, "can_use_gpus", lambda environment: is_usable)
    ray = FakeRay(0)
    ray.nodes = lambda: [{"Alive": True, "Resources": each} for each in machines]
    found = RayMachines(ray, 1, 99, share, 5.0)
    assert (found._needs, found._count_room(machines)) == (needs, room)
    assert str(found.devices) == messages


class FakeRay:
    """A cluster whose machines have room for one worker each, some of them in use."""

    def __init__(self, num_machines, in_use=0):
        self.num_machines, self.in_use = num_machines, in_use
        self.asked, self.open = [], 0
        self.cloudpickle = types.SimpleNamespace(register_pickle_by_value=len)
        self.cloudpickle.register_pickle_by_value = lambda module: None
        self.util = self

    def nodes(self):
        node = {"Alive": True, "Resources": {"CPU": 1.0}}
        dead = {"Alive": False, "Resources": {"CPU": 9.0}}
        return [node] * self.num_machines + [dead]

    def available_resources(self):
        return {"CPU": self.num_machines - self.in_use}

    def placement_group(self, bundles, strategy):
        assert strategy == "SPREAD"
        self.asked.append(len(bundles))
        self.open += 1
        is_ready = len(bundles) <= self.num_machines - self.in_use
        return types.SimpleNamespace(wait=lambda seconds: is_ready)

    def remove_placement_group(self, group):
        self.open -= 1


def reserve(ray, min_workers, max_workers, happen=lambda text: None):
    """Reserves places, unless `happen` cancels that; returns the messages."""
    machines = RayMachines(ray, min_workers, max_workers, None, 1.0)

    async def run():
        messages = []

        def say(text):
            messages.append(text)
            if happen(text):
                task.cancel()

        task = asyncio.create_task(machines._reserve_group(say))
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return messages

    messages = asyncio.run(run())
    return machines, messages


def test_as_many_workers_start_as_there_is_room_for():
    ray = FakeRay(5)
    assert reserve(ray, 2, 8)[1] == []
    assert reserve(ray, 2, 3)[1] == []
    assert ray.asked == [5, 3]


def test_room_that_others_use_is_done_without():
    ray = FakeRay(6, in_use=3)
    assert reserve(ray, 2, 8)[1] == []
    assert ray.asked == [6, 3]
    assert ray.open == 1


def test_machines_that_come_are_waited_for_and_taken():
    ray = FakeRay(1)

    def come(text):
        ray.num_machines = 4

    _, messages = reserve(ray, 2, 3, happen=come)
    assert messages == [
        "waits for room for 2 workers with 1 CPU each: the whole cluster has "
        "room for 1."
    ]
    assert ray.asked == [2, 3]
    assert ray.open == 1


def test_a_wait_ends_with_the_job():
    ray = FakeRay(4, in_use=2)
    machines, messages = reserve(ray, 3, 3, happen=lambda text: True)
    assert messages[0].endswith("the whole cluster has room for 4.")
    machines.release()
    assert ray.open == 0


def test_without_ray_the_error_names_the_package(monkeypatch):
    def import_ray():
        raise ImportError("Ray is not installed. Install it.")

    monkeypatch.setattr(_ray, "import_ray", import_ray)
    message = "cannot join a cluster there: Ray is not installed. Install it. Use"
    with pytest.raises(ValueError, match=message):
        connect_to_ray("h:1")


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_server_that_is_not_ray_is_an_error(monkeypatch, is_slow):
    def init(**options):
        if not is_slow:
            raise RuntimeError("Version mismatch: 1\nand more")
        while True:
            # As Ray does, which tries again after any error.
            with contextlib.suppress(Exception):
                time.sleep(60)

    ray = types.SimpleNamespace(init=init)
    monkeypatch.setattr(_ray, "import_ray", lambda: ray)
    monkeypatch.setattr(_ray, "_CONNECT_SECONDS", 0.1)
    reason = "Nothing speaks as Ray does in 0.1 s" if is_slow else "Version mism"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        message = f"cannot join a cluster there: {reason}.* Use HOST:PORT as "
        with pytest.raises(ValueError, match=message):
            connect_to_ray(address)
