"""What a worker finds in its environment, as a pure function."""

import json

import pytest

from armillary.cluster import TFConfigClusterResolver
from armillary.launch._environment import (
    DevicePlan,
    check_environment,
    find_addresses,
    make_environment,
)

FLAG = "--xla_force_host_platform_device_count"
ADDRESSES = ("127.0.0.1:1001", "127.0.0.1:1002")


def make(base=None, index=1, devices=None, num_restarts=0):
    return make_environment(
        base or {},
        addresses=ADDRESSES,
        index=index,
        devices=devices or DevicePlan(),
        num_restarts=num_restarts,
    )


def test_a_worker_knows_the_cluster_and_its_place():
    environment = make({"HOME": "/h"}, index=1, num_restarts=3)
    assert json.loads(environment["TF_CONFIG"]) == {
        "cluster": {"worker": [*ADDRESSES]},
        "task": {"type": "worker", "index": 1},
    }
    assert environment["ARMILLARY_RESTART_COUNT"] == "3"
    assert environment["HOME"] == "/h"


def test_the_evaluator_knows_the_cluster_and_its_role():
    environment = make(index=None)
    assert json.loads(environment["TF_CONFIG"]) == {
        "cluster": {"worker": [*ADDRESSES]},
        "task": {"type": "evaluator", "index": 0},
    }
    resolver = TFConfigClusterResolver(environ=environment)
    assert resolver.task_type == "evaluator"
    assert not resolver.process_plan().is_distributed


def test_the_evaluator_has_the_last_gpus():
    plan = DevicePlan(gpus=(("0", "1"), ("2", "3"), ("4", "5")))
    assert make(index=1, devices=plan)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert make(index=None, devices=plan)["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_the_coordinator_listens_on_loopback_only():
    assert make(index=1)["JAX_COORDINATOR_BIND_ADDRESS"] == ADDRESSES[0]


def test_the_environment_of_the_launcher_is_not_changed():
    base = {"XLA_FLAGS": "--a", "JAX_NUM_CPU_DEVICES": "3"}
    make(base, devices=DevicePlan(virtual_cpus=2))
    assert base == {"XLA_FLAGS": "--a", "JAX_NUM_CPU_DEVICES": "3"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (None, f"{FLAG}=2"),
        ("--a=1 --b", f"--a=1 --b {FLAG}=2"),
        (f"{FLAG}=8 --b", f"--b {FLAG}=2"),
    ],
)
def test_virtual_devices_are_added_to_the_flags_of_the_user(flags, expected):
    base = {} if flags is None else {"XLA_FLAGS": flags}
    base["JAX_NUM_CPU_DEVICES"] = "5"
    environment = make(base, devices=DevicePlan(virtual_cpus=2))
    assert environment["XLA_FLAGS"] == expected
    assert "JAX_NUM_CPU_DEVICES" not in environment


def test_without_a_device_plan_the_flags_stay():
    base = {"XLA_FLAGS": f"{FLAG}=8", "CUDA_VISIBLE_DEVICES": "0"}
    environment = make(base)
    assert {name: environment[name] for name in base} == base


def test_a_worker_sees_its_own_gpus():
    plan = DevicePlan(gpus=(("0", "1"), ("2", "3")))
    assert make(index=1, devices=plan)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "XLA_FLAGS" not in make(index=1, devices=plan)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({}, None),
        ({"no_proxy": "a"}, None),
        ({"http_proxy": "p"}, "127.0.0.1"),
        ({"https_proxy": "p", "no_proxy": "a,b"}, "a,b,127.0.0.1"),
        ({"grpc_proxy": "p", "no_grpc_proxy": "c"}, "c,127.0.0.1"),
    ],
)
def test_a_proxy_is_not_asked_for_this_machine(base, expected):
    assert make(base).get("no_grpc_proxy") == expected


@pytest.mark.parametrize(("value", "expected"), [(None, "1"), ("x", "x")])
def test_output_is_not_held_back(value, expected):
    base = {} if value is None else {"PYTHONUNBUFFERED": value}
    assert make(base)["PYTHONUNBUFFERED"] == expected


def test_a_worker_cannot_launch():
    with pytest.raises(ValueError, match=r"`TF_CONFIG` is '\{\}'.*`unset TF_CONFIG`"):
        check_environment({"TF_CONFIG": "{}"})


def test_addresses_are_different_and_on_loopback():
    addresses = find_addresses(50)
    assert len(set(addresses)) == 50
    assert {address.partition(":")[0] for address in addresses} == {"127.0.0.1"}


def test_no_proxy_is_asked_for_workers_on_other_machines():
    environment = make_environment(
        {"http_proxy": "http://proxy:80", "no_proxy": "own"},
        addresses=["10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1"],
        index=1,
        devices=DevicePlan(),
        num_restarts=0,
    )
    assert environment["no_grpc_proxy"] == "own,10.0.0.1,10.0.0.2"
    assert environment["JAX_COORDINATOR_BIND_ADDRESS"] == "10.0.0.1:1"
