import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.cluster import ClusterSpec
from armillary.cluster.resolvers._spec import split_address

ADDRESSES = ["10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"]

hosts = st.from_regex(r"[a-z][a-z0-9.-]{0,10}", fullmatch=True)
addresses = st.builds("{}:{}".format, hosts, st.integers(1, 65_535))


@st.composite
def clusters(draw):
    jobs = draw(st.lists(st.text(min_size=1), unique=True, max_size=4))
    pool = draw(st.lists(addresses, unique=True, min_size=len(jobs), max_size=12))
    # Every job gets at least one of the addresses.
    return {job: pool[number :: len(jobs)] for number, job in enumerate(jobs)}


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(clusters())
def test_a_spec_survives_the_round_trip_through_a_dict(cluster):
    spec = ClusterSpec(cluster)
    again = ClusterSpec(spec.as_dict())
    assert again == spec == ClusterSpec(spec)
    assert hash(again) == hash(spec)
    assert again.as_dict() == spec.as_dict()


@settings(deadline=None, max_examples=50)
@given(clusters())
def test_a_spec_tells_what_it_was_given(cluster):
    spec = ClusterSpec(cluster)
    assert spec.jobs == list(cluster)
    assert spec.as_dict() == cluster
    for job, tasks in cluster.items():
        indices = spec.task_indices(job)
        assert indices == list(range(len(tasks)))
        assert [spec.task_address(job, index) for index in indices] == tasks


def test_jobs_without_tasks_are_left_out():
    assert ClusterSpec({"chief": ADDRESSES[:1], "worker": []}).jobs == ["chief"]
    assert not ClusterSpec({"worker": []})
    assert ClusterSpec({"chief": ADDRESSES[:1]})


def test_specs_differ_by_any_address_and_from_other_types():
    spec = ClusterSpec({"worker": ADDRESSES[:2]})
    assert spec != ClusterSpec({"worker": ADDRESSES[1:]})
    assert spec != ClusterSpec({"chief": ADDRESSES[:2]})
    assert spec != {"worker": ADDRESSES[:2]}


def test_the_text_of_a_spec_can_be_pasted():
    spec = ClusterSpec({"worker": ADDRESSES[:1]})
    assert repr(spec) == "ClusterSpec({'worker': ['10.0.0.1:2222']})"


@pytest.mark.parametrize(
    "address", ["localhost:1", "[::1]:65535", "[fe80::1%eth0]:22", "a-1.b_c:80"]
)
def test_hosts_have_many_forms(address):
    assert ClusterSpec({"worker": [address]}).task_address("worker", 0) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "10.0.0.1",
        "10.0.0.1:",
        ":2222",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:port",
        "grpc://10.0.0.1:2222",
        "::1:2222",
        "10.0.0.1:2222 ",
        "10.0.0.1:2222\n",
    ],
)
def test_a_malformed_address_is_an_error(address):
    rule = re.escape(repr(address)) + ", but it must be a host, a colon and a port"
    with pytest.raises(ValueError, match=rf'`cluster\["worker"\]\[1\]` is {rule}'):
        ClusterSpec({"worker": ["10.0.0.1:2222", address]})


def test_a_host_is_told_as_a_socket_takes_it():
    assert split_address("[fe80::1%eth0]:22") == ("fe80::1%eth0", 22)
    assert split_address("localhost:1") == ("localhost", 1)


def test_an_address_that_is_no_string_is_an_error():
    with pytest.raises(TypeError, match=r'`cluster\["worker"\]\[0\]` is 2222 of type'):
        ClusterSpec({"worker": [2222]})


@pytest.mark.parametrize("tasks", ["10.0.0.1:2222", {0: "10.0.0.1:2222"}, 3, None])
def test_a_job_that_is_no_list_is_an_error(tasks):
    with pytest.raises(TypeError, match=r"it must be a list of addresses\. Use"):
        ClusterSpec({"worker": tasks})


@pytest.mark.parametrize("cluster", [["10.0.0.1:2222"], "worker", None])
def test_a_cluster_that_is_no_mapping_is_an_error(cluster):
    with pytest.raises(TypeError, match=r"`cluster` is .*it must be a mapping from"):
        ClusterSpec(cluster)


@pytest.mark.parametrize("job", ["", 3, None])
def test_a_job_without_a_name_is_an_error(job):
    with pytest.raises(ValueError, match=r"a job is named by a string that is not"):
        ClusterSpec({job: ADDRESSES})


def test_two_tasks_with_one_address_are_an_error():
    message = r"gives '10.0.0.1:2222' to both chief 0 and worker 1, but each task is a"
    with pytest.raises(ValueError, match=message):
        ClusterSpec({"chief": ADDRESSES[:1], "worker": [ADDRESSES[1], ADDRESSES[0]]})


def test_a_job_that_is_not_there_is_an_error():
    spec = ClusterSpec({"worker": ADDRESSES})
    message = r"`job_name` is 'ps', but the jobs of this cluster are 'worker'\. Use"
    with pytest.raises(ValueError, match=message):
        spec.task_indices("ps")
    with pytest.raises(ValueError, match=r"jobs of this cluster are none at all\. Use"):
        ClusterSpec({}).task_indices("ps")


def test_a_task_that_is_not_there_is_an_error():
    spec = ClusterSpec({"worker": ADDRESSES[:2]})
    message = r"`task_index` is 2, but the tasks of job 'worker' are 0, 1\. Use one"
    with pytest.raises(ValueError, match=message):
        spec.task_address("worker", 2)
    with pytest.raises(ValueError, match=r"`job_name` is 'ps'"):
        spec.task_address("ps", 0)
