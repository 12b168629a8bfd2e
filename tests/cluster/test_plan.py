import pytest

from armillary.cluster import ClusterSpec, ProcessPlan, SimpleClusterResolver

CLUSTER = ClusterSpec(
    {
        "worker": ["10.0.0.2:2222", "10.0.0.3:2222"],
        "ps": ["10.0.0.4:2222"],
        "chief": ["10.0.0.1:2222"],
    }
)


def plan(task_type, task_id, cluster=CLUSTER):
    return SimpleClusterResolver(cluster, task_type, task_id).process_plan()


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
    assert plan("worker", 3, ClusterSpec({})) == ProcessPlan(task_id=3)


def test_jax_gets_what_it_needs_and_detects_nothing_by_itself():
    assert plan("worker", 1).initialize_arguments() == {
        "coordinator_address": "10.0.0.1:2222",
        "num_processes": 3,
        "process_id": 2,
        "local_device_ids": None,
        "cluster_detection_method": "deactivate",
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_a_service_with_a_loopback_address_listens_there_only(host):
    addresses = [f"{host}:1234", f"{host}:1235"]
    arguments = plan("worker", 1, {"worker": addresses}).initialize_arguments()
    assert arguments["coordinator_bind_address"] == f"{host}:1234"


@pytest.mark.parametrize("host", ["10.0.0.1", "localhost.net", "[2001:db8::1]"])
def test_a_service_with_another_address_listens_where_jax_chooses(host):
    arguments = plan("worker", 0, {"worker": [f"{host}:1"]}).initialize_arguments()
    assert "coordinator_bind_address" not in arguments


def test_nothing_is_said_of_processes_that_jax_finds():
    result = ProcessPlan(num_processes=None, process_id=None)
    assert result.initialize_arguments() == {}
    assert result.is_chief is None
    assert result.is_distributed


def test_a_process_without_a_task_is_an_error():
    with pytest.raises(ValueError, match=r"`task_type` is None, but it must be one of"):
        SimpleClusterResolver(CLUSTER).process_plan()


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ({"chief": ["c:1", "d:1"]}, "has 2 'chief' tasks, but only one process may"),
        ({"evaluator": ["c:1", "d:1"]}, "has 2 'evaluator' tasks, but one process"),
        ({"master": ["c:1"]}, "has the job 'master', but the jobs with a meaning"),
    ],
)
@pytest.mark.parametrize("task_type", ["worker", "ps"])
def test_a_cluster_that_cannot_train_is_an_error(task_type, jobs, message):
    with pytest.raises(ValueError, match=f"`cluster_spec` {message}"):
        plan(task_type, 0, {"worker": ["a:1"], "ps": ["b:1"], **jobs})
