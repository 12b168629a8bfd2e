"""Tests of the tasks of a cluster, and of the facts that each needs to join."""

import re

import pytest

from armillary.cluster import (
    ClusterResolver,
    ClusterSpec,
    ProcessPlan,
    SimpleClusterResolver,
)
from armillary.cluster.resolvers._spec import split_address

ADDRESSES = ["10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"]
WORKERS = {"worker": ADDRESSES[:2]}
CLUSTER = ClusterSpec(
    {"worker": ADDRESSES[1:], "ps": ["10.0.0.4:2222"], "chief": ADDRESSES[:1]}
)


def plan(task_type, task_id, cluster=CLUSTER):
    return SimpleClusterResolver(cluster, task_type, task_id).process_plan()


def test_a_spec_has_the_jobs_it_was_given():
    spec = ClusterSpec({"worker": ADDRESSES[1:], "chief": ADDRESSES[:1], "ps": []})
    assert spec.jobs == ["worker", "chief"]
    assert spec.as_dict() == {"worker": ADDRESSES[1:], "chief": ADDRESSES[:1]}
    assert spec.task_indices("worker") == [0, 1]
    assert spec.task_address("worker", 1) == ADDRESSES[2]
    again = ClusterSpec(spec.as_dict())
    assert again == spec == ClusterSpec(spec)


def test_specs_are_compared_shown_and_may_be_empty():
    assert not ClusterSpec({"worker": []})
    spec = ClusterSpec({"worker": ADDRESSES[:1]})
    assert spec
    assert spec != ClusterSpec({"worker": ADDRESSES[1:]})
    assert spec != ClusterSpec({"chief": ADDRESSES[:1]})
    assert spec != {"worker": ADDRESSES[:1]}
    assert repr(spec) == "ClusterSpec({'worker': ['10.0.0.1:2222']})"


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("localhost:1", ("localhost", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:22", ("fe80::1%eth0", 22)),
        ("a-1.b_c:80", ("a-1.b_c", 80)),
    ],
)
def test_hosts_have_many_forms_and_are_returned_as_a_socket_takes_them(address, parts):
    assert ClusterSpec({"worker": [address]}).task_address("worker", 0) == address
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address",
    [
        *("", "10.0.0.1", ":2222", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:port"),
        *("grpc://10.0.0.1:2222", "::1:2222", "10.0.0.1:2222\n"),
    ],
)
def test_a_malformed_address_is_an_error(address):
    rule = re.escape(repr(address)) + ", but it must be a host, a colon and a port"
    with pytest.raises(ValueError, match=rf'`cluster\["worker"\]\[1\]` is {rule}'):
        ClusterSpec({"worker": ["10.0.0.1:2222", address]})


@pytest.mark.parametrize(
    ("cluster", "error", "message"),
    [
        (None, TypeError, r"`cluster` is .*it must be a `Mapping`\. Use"),
        *[
            ({"worker": tasks}, TypeError, r'`cluster\["worker"\]` is .* of type')
            for tasks in ("10.0.0.1:2222", {0: "10.0.0.1:2222"}, None)
        ],
        ({"worker": [2222]}, TypeError, r'`cluster\["worker"\]\[0\]` is 2222 of type'),
        *[({job: ADDRESSES}, ValueError, "which is not a name") for job in ("", 3)],
        (
            {"chief": ADDRESSES[:1], "worker": ADDRESSES[::-1]},
            ValueError,
            r'`cluster\["worker"\]\[2\]` is .*, as is `cluster\["chief"\]\[0\]`, but',
        ),
    ],
)
def test_a_wrong_cluster_is_an_error(cluster, error, message):
    with pytest.raises(error, match=message):
        SimpleClusterResolver(cluster)


def test_a_job_or_a_task_that_is_not_there_is_an_error():
    spec = ClusterSpec(WORKERS)
    with pytest.raises(ValueError, match=r"`job_name` is 'ps', .* one of 'worker'"):
        spec.task_indices("ps")
    with pytest.raises(ValueError, match="`job_name` is 'ps'"):
        spec.task_address("ps", 0)
    with pytest.raises(ValueError, match=r"`task_index` is 2, .* one of 0, 1"):
        spec.task_address("worker", 2)


@pytest.mark.parametrize(
    ("task_type", "task_id", "process_id"),
    [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)],
)
def test_the_chief_comes_first_then_the_workers(task_type, task_id, process_id):
    assert plan(task_type, task_id) == ProcessPlan(
        task_type=task_type,
        task_id=task_id,
        num_processes=3,
        process_id=process_id,
        coordinator_address="10.0.0.1:2222",
    )
    assert plan(task_type, task_id).is_chief == (task_type == "chief")


@pytest.mark.parametrize("task_type", ["ps", "evaluator"])
def test_other_jobs_are_no_training_processes(task_type):
    result = plan(task_type, 0)
    assert result == ProcessPlan(task_type=task_type, task_id=0)
    assert (result.num_processes, result.process_id) == (1, 0)
    assert not result.is_distributed
    assert not result.is_training
    assert result.is_chief is False


def test_an_empty_cluster_is_a_single_process():
    result = SimpleClusterResolver(ClusterSpec({})).process_plan()
    assert result == ProcessPlan()
    assert result.is_chief
    assert not result.is_distributed


def test_jax_gets_all_arguments_and_detects_nothing():
    assert plan("worker", 1).initialize_arguments() == {
        "coordinator_address": "10.0.0.1:2222",
        "num_processes": 3,
        "process_id": 2,
        "local_device_ids": None,
        "cluster_detection_method": "deactivate",
    }
    result = ProcessPlan(num_processes=None, process_id=None)
    assert result.initialize_arguments() == {}
    assert result.is_chief is None
    assert result.is_distributed


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        *[(host, True) for host in ("127.0.0.1", "127.1.2.3", "localhost", "[::1]")],
        *[(host, False) for host in ("10.0.0.1", "localhost.net", "[2001:db8::1]")],
    ],
)
def test_a_service_with_a_loopback_address_listens_there_only(host, is_loopback):
    addresses = [f"{host}:1234", f"{host}:1235"]
    arguments = plan("worker", 1, {"worker": addresses}).initialize_arguments()
    expected = addresses[0] if is_loopback else None
    assert arguments.get("coordinator_bind_address") == expected


class OwnResolver(ClusterResolver):
    """The least that a resolver of a user's own can be."""

    @property
    def task_type(self):
        return "worker"

    @property
    def task_id(self):
        return 1

    def cluster_spec(self):
        return ClusterSpec(WORKERS)


class Empty(ClusterResolver):
    def cluster_spec(self):
        return ClusterSpec({})


def test_a_resolver_of_your_own_makes_a_plan():
    assert OwnResolver().process_plan().process_id == 1
    assert (Empty().task_type, Empty().task_id) == (None, None)
    assert not Empty().process_plan().is_distributed
    resolver = SimpleClusterResolver(WORKERS, "worker", 0)
    assert resolver.cluster_spec() == ClusterSpec(WORKERS)
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


ONE_OF_TYPES = r"`task_type` is .* must be one of 'chief', 'worker', 'ps', 'evaluator'"


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "message"),
    [
        *[(WORKERS, kind, 0, ONE_OF_TYPES) for kind in ("master", "", 3)],
        (WORKERS, None, None, ONE_OF_TYPES),
        *[
            (WORKERS, "worker", index, "`task_id` is .* integer that is not negative")
            for index in (-1, 0.0, "0", True, None)
        ],
        (WORKERS, "worker", 2, r"`task_id` is 2, .* one of 0, 1\. .* or add the add"),
        (WORKERS, "ps", 0, r"`task_type` is 'ps', .* 'worker'\. .* or add the"),
        (WORKERS, "evaluator", 1, r"`task_id` is 1, .* one of 0\."),
        ({}, "evaluator", 1, r"`task_id` is 1, .* one of 0\."),
        ({}, "worker", 3, r"`task_id` is 3, .* one of 0\."),
        (
            {**WORKERS, "evaluator": ADDRESSES[2:]},
            *("evaluator", 1),
            r"`task_id` is 1, .* one of 0\.",
        ),
        ({**WORKERS, "chief": ["c:1", "d:1"]}, "worker", 0, "`chief` has 2 tasks, but"),
        (
            {**WORKERS, "evaluator": ["c:1", "d:1"]},
            "worker",
            0,
            "`evaluator` has 2 tasks",
        ),
        (
            {**WORKERS, "master": ["c:1"]},
            *("worker", 0),
            "`cluster_spec` is 'master', .* must be one of 'chief'",
        ),
    ],
)
def test_a_task_without_a_meaning_is_an_error(cluster, task_type, task_id, message):
    with pytest.raises(ValueError, match=message):
        SimpleClusterResolver(cluster, task_type, task_id).process_plan()
