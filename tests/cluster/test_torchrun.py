import pytest

from armillary.cluster import ClusterSpec, TorchrunClusterResolver
from armillary.errors import ClusterError

PROCESS = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def resolve(port=None, *, without=(), gpus_per_task=None, **changes):
    environ = {key: value for key, value in PROCESS.items() if key not in without}
    return TorchrunClusterResolver(
        port, gpus_per_task=gpus_per_task, environ={**environ, **changes}
    )


def find_coordinator(*arguments, **changes):
    return resolve(*arguments, **changes).process_plan().coordinator_address


def test_only_the_address_of_worker_0_is_known():
    resolver = resolve()
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["10.0.0.1:29500"]})
    plan = resolver.process_plan()
    assert (plan.process_id, plan.num_processes) == (5, 8)


def test_the_port_is_the_next_one_where_torchrun_keeps_its_own():
    assert find_coordinator() == "10.0.0.1:29500"
    assert find_coordinator(TORCHELASTIC_USE_AGENT_STORE="True") == "10.0.0.1:29501"
    assert find_coordinator(TORCHELASTIC_USE_AGENT_STORE="False") == "10.0.0.1:29500"
    assert find_coordinator(99, without=["MASTER_PORT"]) == "10.0.0.1:99"


def test_an_ipv6_address_gets_brackets():
    assert find_coordinator(MASTER_ADDR="2001:db8::1") == "[2001:db8::1]:29500"
    assert find_coordinator(MASTER_ADDR="[::1]") == "[::1]:29500"


def test_processes_of_one_machine_take_a_gpu_each():
    assert resolve().process_plan().local_device_ids == (1,)
    assert resolve(without=["LOCAL_WORLD_SIZE"]).process_plan().local_device_ids == (1,)
    assert resolve(gpus_per_task=2).process_plan().local_device_ids == (2, 3)


def test_a_process_with_a_machine_of_its_own_takes_all_gpus():
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert resolve(**alone).process_plan().local_device_ids is None
    assert resolve(gpus_per_task=2, **alone).process_plan().local_device_ids == (0, 1)
    assert resolve(without=["LOCAL_RANK"]).process_plan().local_device_ids is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_an_error(name):
    message = rf"`{name}` is not set\. Start the program with `torchrun`, which sets it"
    with pytest.raises(ClusterError, match=message):
        resolve(without=[name])


def test_a_rank_beyond_the_size_is_an_error():
    message = r"`RANK` is 8, but it must be below 8, the value of `WORLD_SIZE`\. Set it"
    with pytest.raises(ClusterError, match=message):
        resolve(RANK="8")
    message = r"`LOCAL_RANK` is 4, but it must be below 4, the value of `LOCAL_WORLD_"
    with pytest.raises(ClusterError, match=message):
        resolve(LOCAL_RANK="4")


@pytest.mark.parametrize(
    "change", [{"MASTER_ADDR": "tcp://a"}, {"MASTER_PORT": "65536"}]
)
def test_an_address_that_is_none_is_an_error(change):
    message = r"`MASTER_ADDR` and `MASTER_PORT` cannot be used to reach process 0"
    with pytest.raises(ClusterError, match=message):
        resolve(**change)


def test_the_port_after_the_last_one_is_an_error():
    message = r"is '10.0.0.1:65536', but it must be a host, a colon and a port from 1"
    with pytest.raises(ClusterError, match=message):
        resolve(MASTER_PORT="65535", TORCHELASTIC_USE_AGENT_STORE="True")


def test_sharing_gpus_without_a_local_rank_is_an_error():
    message = r"`gpus_per_task` is 2, but `LOCAL_RANK` is not set, so the processes of"
    with pytest.raises(ClusterError, match=message):
        resolve(gpus_per_task=2, without=["LOCAL_RANK"])


def test_arguments_of_another_kind_are_errors():
    with pytest.raises(ValueError, match=r"`port` is 0, but it must be a positive"):
        resolve(0)
    with pytest.raises(ValueError, match=r"`gpus_per_task` is 0, but it must be a pos"):
        resolve(gpus_per_task=0)
