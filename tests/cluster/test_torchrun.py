import pytest

from armillary.cluster import ClusterSpec, TorchrunClusterResolver
from armillary.errors import ClusterError
from tests.mistakes import mistakes

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


ADDRESS = "`MASTER_ADDR` and `MASTER_PORT` cannot be used to reach process 0"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_an_error(name):
    message = rf"`{name}` is not set\. Start the program with `torchrun`, which sets it"
    with pytest.raises(ClusterError, match=message):
        resolve(without=[name])


@mistakes(
    {
        ClusterError: {
            r"`RANK` is 8, but it must be below 8, the value of `WORLD_SIZE`\. Set i": (
                lambda: resolve(RANK="8")
            ),
            "`LOCAL_RANK` is 4, but it must be below 4, the value of `LOCAL_WORLD_": (
                lambda: resolve(LOCAL_RANK="4")
            ),
            rf"{ADDRESS}.*tcp": lambda: resolve(MASTER_ADDR="tcp://a"),
            rf"{ADDRESS}.*65536": lambda: resolve(MASTER_PORT="65536"),
            "is '10.0.0.1:65536', but it must be a host, a colon and a port from 1": (
                lambda: resolve(
                    MASTER_PORT="65535", TORCHELASTIC_USE_AGENT_STORE="True"
                )
            ),
            "`gpus_per_task` is 2, but `LOCAL_RANK` is not set, so the processes of": (
                lambda: resolve(gpus_per_task=2, without=["LOCAL_RANK"])
            ),
        },
        ValueError: {
            "`port` is 0, but it must be a positive": lambda: resolve(0),
            "`gpus_per_task` is 0, but it must be a pos": (
                lambda: resolve(gpus_per_task=0)
            ),
        },
    }
)
def test_what_describes_no_process_is_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
