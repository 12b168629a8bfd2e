import pytest

from armillary.cluster import ClusterResolver, ClusterSpec, SimpleClusterResolver

WORKERS = ["10.0.0.1:2222", "10.0.0.2:2222"]


class OwnResolver(ClusterResolver):
    """The least that a resolver of a user's own can be."""

    def cluster_spec(self):
        return ClusterSpec({"worker": WORKERS})

    @property
    def task_type(self):
        return "worker"

    @property
    def task_id(self):
        return 1


def test_a_resolver_of_your_own_makes_a_plan():
    assert OwnResolver().process_plan().process_id == 1


def test_a_resolver_that_knows_no_task_is_alone():
    class Empty(ClusterResolver):
        def cluster_spec(self):
            return ClusterSpec({})

    assert (Empty().task_type, Empty().task_id) == (None, None)
    assert not Empty().process_plan().is_distributed


def test_a_simple_resolver_tells_what_it_was_told():
    resolver = SimpleClusterResolver(
        ClusterSpec({"worker": WORKERS}),
        task_type="worker",
        task_id=0,
    )
    assert resolver.cluster_spec() == ClusterSpec({"worker": WORKERS})
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


def test_an_evaluator_need_not_be_in_the_cluster():
    resolver = SimpleClusterResolver({"worker": WORKERS}, "evaluator", 0)
    assert resolver.process_plan().task_type == "evaluator"


def test_an_evaluator_that_is_in_the_cluster_is_checked():
    cluster = {"worker": WORKERS, "evaluator": ["10.0.0.3:2222"]}
    with pytest.raises(ValueError, match=r"the 'evaluator' tasks of the cluster are 0"):
        SimpleClusterResolver(cluster, "evaluator", 1)


@pytest.mark.parametrize("cluster", [{}, {"worker": WORKERS}])
def test_there_is_one_evaluator(cluster):
    with pytest.raises(ValueError, match=r"`task_id` is 1, but there is one evaluator"):
        SimpleClusterResolver(cluster, "evaluator", 1)


@pytest.mark.parametrize("task_type", ["master", "", 3, None])
def test_a_job_without_a_meaning_is_an_error(task_type):
    with pytest.raises(ValueError, match=r"`task_type` is .* must be one of 'chief'"):
        SimpleClusterResolver({"worker": WORKERS}, task_type, 0)


@pytest.mark.parametrize("task_id", [-1, 0.0, "0", True, None])
def test_an_id_that_is_no_index_is_an_error(task_id):
    message = r"`task_id` is .* must be an integer that is not negative"
    with pytest.raises(ValueError, match=message):
        SimpleClusterResolver({"worker": WORKERS}, "worker", task_id)


def test_a_job_outside_the_cluster_is_an_error():
    message = (
        r"`task_type` is 'ps', but the cluster has no such job: its jobs are 'worker'\."
        r" Use one of these, or add the addresses of the 'ps' tasks"
    )
    with pytest.raises(ValueError, match=message):
        SimpleClusterResolver({"worker": WORKERS}, "ps", 0)


def test_an_id_outside_the_job_is_an_error():
    message = (
        r"`task_id` is 2, but the 'worker' tasks of the cluster are 0, 1\. Use one of "
        r"these, or add the address of worker 2"
    )
    with pytest.raises(ValueError, match=message):
        SimpleClusterResolver({"worker": WORKERS}, "worker", 2)


def test_a_cluster_of_the_wrong_type_is_an_error():
    with pytest.raises(TypeError, match=r"`cluster` is \['10.0.0.1:2222', "):
        SimpleClusterResolver(WORKERS)
