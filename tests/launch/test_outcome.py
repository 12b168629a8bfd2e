"""What a worker finds, what its end means, and what comes of it: pure functions."""

import json
import re
import signal
from importlib.metadata import EntryPoint

import pytest

import armillary
from armillary.cluster import TFConfigClusterResolver
from armillary.launch import ExitCode, _process
from armillary.launch._process import (
    DevicePlan,
    Ending,
    find_addresses,
    find_gpus,
    make_environment,
    plan_devices,
)
from armillary.launch._supervisor import find_final_code, find_pause, find_stop_code
from tests.conftest import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "launch.md"
OK, SAVED, FAILED = ExitCode.OK, ExitCode.PREEMPTED, ExitCode.FAILED
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
        ({}, 1, GPUS, {"CUDA_VISIBLE_DEVICES": "2,3", "JAX_NUM_CPU_DEVICES": None}),
        ({}, None, GPUS, {"CUDA_VISIBLE_DEVICES": "4,5"}),
        ({"JAX_NUM_CPU_DEVICES": "5"}, 1, CPUS, {"JAX_NUM_CPU_DEVICES": "2"}),
        ({"JAX_NUM_CPU_DEVICES": "5"}, 1, None, {"JAX_NUM_CPU_DEVICES": "5"}),
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
            {"grpc_proxy": "p", "no_proxy": "a,b"},
            *(1, None),
            {"no_grpc_proxy": "a,b,127.0.0.1"},
        ),
    ],
)
def test_variables_are_set_and_those_of_the_user_kept(base, index, devices, expected):
    before = dict(base)
    environment = make(base, index, devices)
    assert {name: environment.get(name) for name in expected} == expected
    assert base == before


def test_addresses_are_different_and_on_loopback():
    addresses = find_addresses(50)
    assert len(set(addresses)) == 50
    assert {address.partition(":")[0] for address in addresses} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("gpus", "count", "share", "plan", "text"),
    [
        ("", 2, None, DevicePlan(), "devices as the script finds them"),
        ("", 2, 1, DevicePlan(virtual_cpus=1), "1 virtual CPU device each"),
        ("0123", 2, 2, DevicePlan(gpus=(("0", "1"), ("2", "3"))), "2 GPUs each"),
        ("0123", 2, None, DevicePlan(gpus=(("0", "1"), ("2", "3"))), "2 GPUs each"),
        ("0123", 2, 1, DevicePlan(gpus=(("0",), ("1",))), "1 GPU each"),
        ("0123", 3, None, DevicePlan(gpus=(("0",), ("1",), ("2",))), "1 GPU each"),
    ],
)
def test_processes_get_devices_of_their_own(gpus, count, share, plan, text):
    assert plan_devices(list(gpus), count, share) == plan
    assert str(plan) == text


@pytest.mark.parametrize(("count", "share"), [(2, 2), (4, None)])
def test_too_few_gpus_are_an_error(count, share):
    message = rf"{count} processes, .* offers 3 GPUs \(0, 1, 5\)"
    with pytest.raises(ValueError, match=message):
        plan_devices(["0", "1", "5"], count, share)


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, ["0", "2"]),
        ({"CUDA_VISIBLE_DEVICES": " GPU-8a , GPU-7b "}, ["GPU-8a", "GPU-7b"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "3,-1,4"}, ["3"]),
        ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cuda,cpu"}, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "gpu"}, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}, []),
        ({}, ["2", "10"]),
    ],
)
def test_gpus_are_found_as_jax_would_find_them(variables, names, tmp_path, monkeypatch):
    plugin = EntryPoint("xla_cuda13", "jax_plugins.xla_cuda13", "jax_plugins")
    monkeypatch.setattr(_process, "entry_points", lambda group: [plugin])
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(_process, "Path", lambda path: tmp_path)
    assert find_gpus(variables) == names
    monkeypatch.setattr(_process, "entry_points", lambda group: [])
    assert find_gpus(variables) == []


def test_the_documentation_lists_every_exit_code():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(str(code.value), code.name) for code in ExitCode]
    assert armillary.cluster.ExitCode is ExitCode


@pytest.mark.parametrize("cause", [FAILED, ExitCode.RESTART_REQUESTED, SAVED])
def test_restarts_end_when_they_are_used_up(cause):
    assert find_final_code(cause, 0, 0) is cause
    codes = [find_final_code(cause, count, 2) for count in range(3)]
    assert codes == [None, None, ExitCode.TOO_MANY_RESTARTS]


@pytest.mark.parametrize("cause", [OK, ExitCode.USAGE])
def test_what_a_restart_cannot_change_is_final(cause):
    assert find_final_code(cause, 0, 5) is cause


def test_pauses_double_up_to_a_bound_and_a_long_one_stays_as_it_is():
    assert [find_pause(count, 10.0) for count in range(5)] == [10, 20, 40, 60, 60]
    assert find_pause(1500, 10.0) == 60
    assert [find_pause(count, 300.0) for count in range(2)] == [300, 300]


@pytest.mark.parametrize(
    ("returncode", "loss", "cause", "text"),
    [
        (0, "", OK, "exit code 0 after 2.5 s"),
        (1, "", FAILED, "exit code 1 after 2.5 s"),
        (2, "", ExitCode.USAGE, "exit code 2 after 2.5 s"),
        (75, "", ExitCode.RESTART_REQUESTED, "exit code 75 (RESTART_REQUESTED) after"),
        (76, "", FAILED, "exit code 76 after"),
        (-45, "", FAILED, "killed by signal 45 after 2.5 s"),
        (77, "", SAVED, "exit code 77 (PREEMPTED) after"),
        (-9, "", FAILED, "killed by SIGKILL after 2.5 s"),
        (-9, "on vm: no answer.", FAILED, "lost after 2.5 s, on vm: no answer"),
    ],
)
def test_an_ending_says_how_and_what_it_means(returncode, loss, cause, text):
    ending = Ending(returncode=returncode, seconds=2.5, loss=loss)
    assert ending.cause is cause
    assert ending.is_reaction == (returncode in (75, 77))
    assert str(ending).startswith(text)
    assert not str(ending).endswith(".")


@pytest.mark.parametrize(
    ("number", "causes", "code"),
    [
        (signal.SIGTERM, [OK, OK], OK),
        (signal.SIGTERM, [SAVED, OK], SAVED),
        (signal.SIGINT, [SAVED, SAVED], SAVED),
        (signal.SIGTERM, [SAVED, FAILED], ExitCode.TERMINATED),
        (signal.SIGHUP, [FAILED], ExitCode.TERMINATED),
        (signal.SIGINT, [FAILED, OK], ExitCode.INTERRUPTED),
        (signal.SIGINT, [], ExitCode.INTERRUPTED),
    ],
)
def test_a_stopped_job_says_whether_it_saved(number, causes, code):
    assert find_stop_code(number, causes) is code
