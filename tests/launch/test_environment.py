"""What a worker finds: its devices, its place and its variables, as pure functions."""

import json
from importlib.metadata import EntryPoint

import pytest

from armillary.cluster import TFConfigClusterResolver
from armillary.launch import _environment
from armillary.launch._environment import (
    DevicePlan,
    find_addresses,
    find_gpus,
    make_environment,
    plan_devices,
)

FLAG = "--xla_force_host_platform_device_count"
ADDRESSES = ("127.0.0.1:1001", "127.0.0.1:1002")
CPUS = DevicePlan(virtual_cpus=2)
GPUS = DevicePlan(gpus=(("0", "1"), ("2", "3"), ("4", "5")))


def make(base=None, index=1, devices=None, num_restarts=0, addresses=ADDRESSES):
    return make_environment(
        base or {},
        addresses=addresses,
        index=index,
        devices=devices or DevicePlan(),
        num_restarts=num_restarts,
    )


@pytest.mark.parametrize(
    ("index", "task"),
    [
        (1, {"type": "worker", "index": 1}),
        (None, {"type": "evaluator", "index": 0}),
    ],
)
def test_a_process_knows_the_cluster_and_its_role(index, task):
    environment = make({"HOME": "/h"}, index=index, num_restarts=3)
    cluster = {"worker": [*ADDRESSES]}
    assert json.loads(environment["TF_CONFIG"]) == {"cluster": cluster, "task": task}
    assert environment["ARMILLARY_RESTART_COUNT"] == "3"
    assert environment["HOME"] == "/h"
    resolver = TFConfigClusterResolver(environ=environment)
    assert resolver.process_plan().is_distributed == (index is not None)


@pytest.mark.parametrize(
    ("base", "index", "devices", "expected"),
    [
        ({}, 1, GPUS, {"CUDA_VISIBLE_DEVICES": "2,3", "XLA_FLAGS": None}),
        ({}, None, GPUS, {"CUDA_VISIBLE_DEVICES": "4,5"}),
        ({"JAX_NUM_CPU_DEVICES": "5"}, 1, CPUS, {"XLA_FLAGS": f"{FLAG}=2"}),
        ({"JAX_NUM_CPU_DEVICES": "5"}, 1, CPUS, {"JAX_NUM_CPU_DEVICES": None}),
        ({"XLA_FLAGS": "--a=1 --b"}, 1, CPUS, {"XLA_FLAGS": f"--a=1 --b {FLAG}=2"}),
        ({"XLA_FLAGS": f"{FLAG}=8 --b"}, 1, CPUS, {"XLA_FLAGS": f"--b {FLAG}=2"}),
        ({"XLA_FLAGS": f"{FLAG}=8"}, 1, None, {"XLA_FLAGS": f"{FLAG}=8"}),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1, None, {"CUDA_VISIBLE_DEVICES": "0"}),
        # The coordinator listens there only.
        ({}, 1, None, {"JAX_COORDINATOR_BIND_ADDRESS": ADDRESSES[0]}),
        # Output is not held back.
        ({}, 1, None, {"PYTHONUNBUFFERED": "1"}),
        ({"PYTHONUNBUFFERED": "x"}, 1, None, {"PYTHONUNBUFFERED": "x"}),
        # A proxy is not asked for this machine.
        ({"no_proxy": "a"}, 1, None, {"no_grpc_proxy": None}),
        ({"http_proxy": "p"}, 1, None, {"no_grpc_proxy": "127.0.0.1"}),
        (
            {"https_proxy": "p", "no_proxy": "a,b"},
            *(1, None),
            {"no_grpc_proxy": "a,b,127.0.0.1"},
        ),
        (
            {"grpc_proxy": "p", "no_grpc_proxy": "c"},
            *(1, None),
            {"no_grpc_proxy": "c,127.0.0.1"},
        ),
    ],
)
def test_variables_are_set_and_those_of_the_user_kept(base, index, devices, expected):
    before = dict(base)
    environment = make(base, index, devices)
    assert {name: environment.get(name) for name in expected} == expected
    assert base == before


def test_no_proxy_is_asked_for_workers_on_other_machines():
    base = {"http_proxy": "http://proxy:80", "no_proxy": "own"}
    addresses = ["10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1"]
    environment = make(base, addresses=addresses)
    assert environment["no_grpc_proxy"] == "own,10.0.0.1,10.0.0.2"
    assert environment["JAX_COORDINATOR_BIND_ADDRESS"] == "10.0.0.1:1"


def test_addresses_are_different_and_on_loopback():
    addresses = find_addresses(50)
    assert len(set(addresses)) == 50
    assert {address.partition(":")[0] for address in addresses} == {"127.0.0.1"}


@pytest.mark.parametrize("count", [None, 1, 4])
def test_without_gpus_each_worker_has_virtual_cpus(count):
    plan = plan_devices([], num_workers=2, devices_per_worker=count)
    assert plan == DevicePlan(virtual_cpus=count)


@pytest.mark.parametrize(
    ("workers", "share", "has_evaluator", "expected"),
    [
        (2, 2, False, (("0", "1"), ("2", "3"))),
        (2, None, False, (("0", "1"), ("2", "3"))),
        (2, 1, False, (("0",), ("1",))),
        (3, None, False, (("0",), ("1",), ("2",))),
        (1, None, False, (("0", "1", "2", "3"),)),
        (1, None, True, (("0", "1"), ("2", "3"))),
        (1, 1, True, (("0",), ("1",))),
    ],
)
def test_processes_get_gpus_of_their_own(workers, share, has_evaluator, expected):
    plan = plan_devices(
        ["0", "1", "2", "3"],
        num_workers=workers,
        devices_per_worker=share,
        has_evaluator=has_evaluator,
    )
    assert plan == DevicePlan(gpus=expected)


@pytest.mark.parametrize(
    ("workers", "share", "has_evaluator"),
    [(2, 2, False), (4, None, False), (1, 4, False), (3, 1, True)],
)
def test_too_few_gpus_are_an_error(workers, share, has_evaluator):
    message = r"`--workers` is .* takes 4 GPUs, but this machine offers 3 \(0, 1, 5\)"
    with pytest.raises(ValueError, match=message) as raised:
        plan_devices(
            ["0", "1", "5"],
            num_workers=workers,
            devices_per_worker=share,
            has_evaluator=has_evaluator,
        )
    assert ("with an `--evaluator`" in str(raised.value)) == has_evaluator


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, ["0", "2"]),
        ({"CUDA_VISIBLE_DEVICES": " GPU-8a , GPU-7b "}, ["GPU-8a", "GPU-7b"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "3,-1,4"}, ["3"]),
        ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cuda,cpu"}, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "gpu"}, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}, []),
        ({}, ["2", "10"]),
    ],
)
def test_gpus_are_found_as_jax_would_find_them(variables, names, tmp_path, monkeypatch):
    plugin = EntryPoint("xla_cuda13", "jax_plugins.xla_cuda13", "jax_plugins")
    monkeypatch.setattr(_environment, "entry_points", lambda group: [plugin])
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(_environment, "Path", lambda path: tmp_path)
    assert find_gpus(variables) == names
    monkeypatch.setattr(_environment, "entry_points", lambda group: [])
    assert find_gpus(variables) == []


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (DevicePlan(), "devices as the script finds them"),
        (DevicePlan(virtual_cpus=1), "1 virtual CPU device each"),
        (GPUS, "2 GPUs each"),
    ],
)
def test_a_plan_is_described(plan, text):
    assert str(plan) == text
