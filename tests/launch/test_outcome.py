"""Tests of worker environments, exit codes and restarts, as pure functions."""

import asyncio
import dataclasses
import json
import re
import signal
from importlib.metadata import EntryPoint

import pytest

import armillary
from armillary.cluster import TFConfigClusterResolver
from armillary.launch import ExitCode, _environment, _machines
from armillary.launch._environment import (
    DevicePlan,
    find_addresses,
    find_gpus,
    make_environment,
    plan_devices,
)
from armillary.launch._machines import Machines
from armillary.launch._process import Ending
from armillary.launch._restarts import (
    Attempt,
    Restarts,
    find_first,
    find_stop_code,
)
from tests.environment import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "machines" / "exit_codes.md"
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
def test_variables_are_set_and_variables_of_the_user_are_kept(
    base, index, devices, expected
):
    before = dict(base)
    environment = make(base, index, devices)
    assert {name: environment.get(name) for name in expected} == expected
    assert base == before


def test_addresses_are_different_and_on_loopback():
    addresses = find_addresses(50)
    assert len(set(addresses)) == 50
    assert {address.partition(":")[0] for address in addresses} == {"127.0.0.1"}


def test_a_job_does_without_a_worker_that_stays_away_and_tries_it_again(monkeypatch):
    now = 100.0
    monkeypatch.setattr(_machines.time, "monotonic", lambda: now)
    plan = plan_devices(list("01234"), 5, 1)
    machines = Machines(4, plan, fewest=2, wait_seconds=9.0)

    def reserve():
        addresses, _ = asyncio.run(machines.reserve(print))
        gpus = "".join(gpu for (gpu,) in machines.devices.gpus)
        assert len(addresses) + 1 == len(gpus)
        return gpus

    assert reserve() == "01234"
    assert (
        machines.note_missing([1])
        == "1 of 4 workers did not come, and may for 9 s more"
    )
    assert reserve() == "01234"
    now += 10
    assert (
        machines.note_missing([1])
        == "1 of 4 workers did not come, so it continues with 3"
    )
    # The evaluator keeps its own.
    assert reserve() == "0234"
    # Whatever ends that attempt, all are tried again, and waited for no longer.
    assert reserve() == "01234"
    assert machines.note_missing([1]).endswith("so it continues with 3")
    assert reserve() == "0234"
    assert reserve() == "01234"
    for index in range(4):
        machines.note_present(index)
    assert machines.note_missing([1, 3]).endswith("and may for 9 s more")
    # Fewer than allowed: it is a failure as any other.
    assert machines.note_missing([0, 1, 3]) == ""
    assert reserve() == "01234"


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
    monkeypatch.setattr(_environment, "entry_points", lambda group: [plugin])
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(_environment, "Path", lambda path: tmp_path)
    assert find_gpus(variables) == names
    monkeypatch.setattr(_environment, "entry_points", lambda group: [])
    assert find_gpus(variables) == []


def test_the_documentation_lists_every_exit_code():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(str(code.value), code.name) for code in ExitCode]
    assert armillary.cluster.ExitCode is ExitCode


def judge(restarts, code=1, words="boom", loss="", **others):
    ending = Ending(returncode=code, seconds=1.0, loss=loss)
    return restarts.judge(Attempt(ending.cause, ending, words, **others))


@pytest.mark.parametrize("code", [1, 75, 77, -9])
def test_restarts_end_when_they_are_used_up(code):
    assert judge(Restarts(0, 1.0), code)[0] is Ending(returncode=code, seconds=1).cause
    restarts = Restarts(2, 1.0)
    found = [judge(restarts, code, words=words)[:2] for words in "ab"]
    is_free = code == 77
    count = [(None, "restart")] * 2
    assert found == (
        count if is_free else [(None, f"restart {i} of 2") for i in (1, 2)]
    )
    last = None if is_free else ExitCode.TOO_MANY_RESTARTS
    assert judge(restarts, code, words="c")[0] is last
    assert restarts.count == (3 if is_free else 2)


@pytest.mark.parametrize("code", [0, 2])
def test_exit_codes_that_a_restart_cannot_change_are_final(code):
    assert judge(Restarts(5, 1.0), code)[0] is ExitCode(code)


def test_progress_renews_the_budget_and_a_lost_machine_costs_none():
    restarts = Restarts(1, 1.0)
    for number in range(4):
        restarts.receive("saved", number, f"/run/checkpoint_{number}")
        assert judge(restarts, -9)[:2] == (None, "restart 1 of 1")
        assert restarts.pause_seconds == 1.0
        assert judge(restarts, -9, loss="on vm: gone")[:2] == (None, "restart")
        assert judge(restarts, -9, absence="it waits")[:2] == (None, "restart")
        assert restarts.pause_seconds == 4.0
    assert restarts.count == 12
    # An older one, saved again, is no progress.
    restarts.receive("saved", 2, "/run/checkpoint_2.1")
    assert judge(restarts, -9)[0] is ExitCode.TOO_MANY_RESTARTS


def test_the_same_failure_three_times_ends_the_job_with_its_words():
    restarts = Restarts(10, 1.0)
    assert judge(restarts, words="boom at 0x7f1a, step 12")[0] is None
    assert judge(restarts, words="boom at 0x7f2b, step 13")[0] is None
    code, _, why = judge(restarts, words="boom at 0x7f3c, step 14")
    assert code is ExitCode.TOO_MANY_RESTARTS
    assert why == (
        "the same failure 3 times without a newer checkpoint: boom at 0x7f3c, step 14"
    )
    # Another one between them, another exit code, and kills by others are not.
    for codes, words in (
        ((1, 1, 1, 1), "abab"),
        ((1, 3, 1), "aaa"),
        ((-9,) * 4, "aaaa"),
    ):
        restarts = Restarts(10, 1.0)
        for code, word in zip(codes, words, strict=True):
            assert judge(restarts, code, words=word)[0] is None


def test_a_checkpoint_whose_first_steps_fail_twice_is_stepped_over_once():
    restarts = Restarts(10, 1.0)
    restarts.receive("saved", 8, "/run/checkpoint_8")
    assert judge(restarts)[0] is None
    # It trained well at first: not the checkpoint's doing.
    restarts.receive("restored", "/run/checkpoint_8")
    restarts.receive("trained")
    assert judge(restarts, words="other")[0] is None
    for num_crashes in (1, 2):
        restarts.receive("restored", "/run/checkpoint_8")
        code, _, why = judge(restarts)
        assert (code, restarts.skipped) == (
            None,
            ["", "/run/checkpoint_8"][num_crashes - 1],
        )
    assert why == "the first steps after `/run/checkpoint_8` failed twice: without it"
    # The one before fails in the same way: it is not the checkpoint.
    restarts.receive("restored", "/run/checkpoint_4")
    assert judge(restarts)[0] is ExitCode.TOO_MANY_RESTARTS
    restarts.receive("saved", 9, "/run/checkpoint_9")
    assert restarts.skipped == ""


def test_the_evaluator_continues_with_each_checkpoint_that_it_takes_up():
    restarts = Restarts(1, 1.0, is_evaluator=True)
    for number in range(3):
        restarts.receive("evaluating", f"/run/checkpoint_{number}")
        assert judge(restarts)[:2] == (None, "restart 1 of 1")
    restarts.receive("evaluating", "/run/checkpoint_2")
    # It restores the latest checkpoint when it starts, and then takes the oldest.
    restarts.receive("restored", "/run/checkpoint_9")
    assert judge(restarts)[0] is ExitCode.TOO_MANY_RESTARTS
    assert restarts.skipped == ""


@pytest.mark.parametrize(
    ("endings", "named", "first"),
    [
        # Workers in the order of their ends, their codes, and the worker that 0 names.
        ("0:0 1:0 2:0", None, None),
        ("1:-9 0:75 2:75", 1, 1),
        # A reaction may end before what it reacts to.
        ("0:75 2:75 1:1", 1, 1),
        ("0:75 2:75 1:1", None, 1),
        # It ended with 0, and others aborted before they could say so.
        ("1:0 0:75 2:75", 1, 1),
        ("1:0 2:-6 0:75", 1, 1),
        ("1:0 0:75 2:75", None, 1),
        # The job was done for it, and another one failed then.
        ("1:0 2:3 0:75", None, 2),
        # It was stopped, so that the launcher had to end it.
        ("0:75 2:75 1:-9!", None, 1),
        ("0:75 1:-9! 2:-9!", 1, 1),
        # One that never joined the others.
        ("2:0 0:-15! 1:-15!", None, 2),
        ("2:1 0:-15! 1:-15!", None, 2),
        # Preempted, and one did not manage to save in time.
        ("1:77 0:77 2:-9!", None, 1),
        # A connection between two that live: each names the other.
        ("0:75 1:75 2:75", 1, 0),
    ],
)
def test_the_first_failure_is_blamed(endings, named, first):
    found = {}
    for text in endings.split():
        index, _, code = text.partition(":")
        ending = Ending(returncode=int(code.rstrip("!")), seconds=1.0)
        found[int(index)] = dataclasses.replace(ending, is_asked="!" in code)
    assert find_first(found, [] if named is None else [named]) == first


@pytest.mark.parametrize(
    ("first", "pauses"), [(10.0, [10, 20, 40, 60, 60]), (300.0, [300, 300])]
)
def test_pauses_double_up_to_a_bound_and_a_long_one_stays_as_it_is(first, pauses):
    restarts = Restarts(2000, first)
    for seconds in pauses:
        judge(restarts, -9)
        assert restarts.pause_seconds == seconds
    for _ in range(1500):
        judge(restarts, -9)
    assert restarts.pause_seconds == pauses[-1]


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
def test_an_ending_has_its_cause_and_its_meaning(returncode, loss, cause, text):
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
def test_a_stopped_job_reports_whether_it_saved(number, causes, code):
    assert find_stop_code(number, causes) is code
