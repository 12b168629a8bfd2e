import pytest

from armillary.cluster import ClusterSpec, ProcessPlan, TPUClusterResolver
from armillary.errors import ClusterError
from tests.mistakes import mistakes

SLICE = {"TPU_WORKER_HOSTNAMES": "t1v-0, t1v-1", "TPU_WORKER_ID": "1"}
SLICES = {
    "TPU_WORKER_HOSTNAMES": "b-0,b-1",
    "TPU_WORKER_ID": "1",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "a-0:8080",
}


def resolve(environ, **changes):
    return TPUClusterResolver(environ={**environ, **changes})


def test_the_machines_of_a_slice_are_the_workers():
    resolver = resolve(SLICE)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["t1v-0:8482"]})
    plan = resolver.process_plan()
    assert (plan.process_id, plan.num_processes) == (1, 2)


def test_process_addresses_come_first_and_lose_their_ports():
    addresses = "localhost:8476,localhost:8477"
    plan = resolve(SLICE, TPU_PROCESS_ADDRESSES=addresses).process_plan()
    assert (plan.coordinator_address, plan.num_processes) == ("localhost:8482", 2)


@pytest.mark.parametrize("host", ["fd00::1", "[fd00::1]", "[fd00::1]:8476"])
def test_an_ipv6_address_gets_brackets(host):
    plan = resolve({"TPU_WORKER_HOSTNAMES": host}).process_plan()
    assert plan.coordinator_address == "[fd00::1]:8482"


def test_a_machine_on_its_own_needs_no_index():
    plan = resolve({"TPU_WORKER_HOSTNAMES": "localhost"}).process_plan()
    assert (plan.num_processes, plan.process_id) == (1, 0)
    assert not plan.is_distributed


def test_workers_of_earlier_slices_come_first():
    resolver = resolve(SLICES)
    assert resolver.process_plan() == ProcessPlan(
        task_id=3, num_processes=6, process_id=3, coordinator_address="a-0:8482"
    )


def test_the_slices_agree_on_the_coordinator():
    first = {
        "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2",
        "TPU_WORKER_ID": "0",
        "MEGASCALE_SLICE_ID": "0",
    }
    plan = resolve({**SLICES, **first}).process_plan()
    assert plan.is_chief
    other = resolve(SLICES).process_plan()
    assert plan.coordinator_address == other.coordinator_address


@pytest.mark.parametrize("tpu", ["", "local", None])
def test_the_tpu_of_this_machine_may_be_named_as_in_tensorflow(tpu):
    resolver = TPUClusterResolver(tpu=tpu, environ=SLICE)
    assert resolver.process_plan() == resolve(SLICE).process_plan()


def test_without_variables_jax_finds_out():
    resolver = resolve({})
    assert not TPUClusterResolver.is_present({})
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert not resolver.cluster_spec()
    plan = resolver.process_plan()
    assert plan.is_distributed
    assert plan.is_chief is None
    assert plan.initialize_arguments() == {}


@pytest.mark.parametrize(
    "name", ["MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"]
)
def test_a_missing_variable_of_the_slices_is_an_error(name):
    message = rf"`{name}` is not set\. It is about the sl"
    with pytest.raises(ClusterError, match=message):
        resolve(SLICES, **{name: ""})


@pytest.mark.parametrize("hosts", [",b", "a b,c", "a/b,c"])
def test_a_first_machine_that_has_no_name_is_an_error(hosts):
    message = r"`TPU_WORKER_HOSTNAMES` cannot be used to reach process 0\. .* Set it to"
    with pytest.raises(ClusterError, match=message):
        resolve(SLICE, TPU_WORKER_HOSTNAMES=hosts)


@mistakes(
    {
        ClusterError: {
            r"`TPU_WORKER_ID` is not set\. It is the index of this machine in its sl": (
                lambda: resolve(SLICE, TPU_WORKER_ID="")
            ),
            "`TPU_WORKER_ID` is 2, but it must be below 2, the number of machines in "
            r"`TPU_WORKER_HOSTNAMES`\. Set it": (
                lambda: resolve(SLICE, TPU_WORKER_ID="2")
            ),
            "`MEGASCALE_SLICE_ID` is 3, but it must be below 3, the value of `MEGASC": (
                lambda: resolve(SLICES, MEGASCALE_SLICE_ID="3")
            ),
            "`MEGASCALE_COORDINATOR_ADDRESS` cannot be used to reach process 0": (
                lambda: resolve(SLICES, MEGASCALE_COORDINATOR_ADDRESS="a b")
            ),
        },
        ValueError: {
            "`port` is 70000, but ports go up to 65535": (
                lambda: TPUClusterResolver(70_000, environ=SLICE)
            ),
            "`tpu` is 'mine', but .* Start it on every machine of that TPU, and": (
                lambda: TPUClusterResolver(tpu="mine", environ=SLICE)
            ),
        },
        TypeError: {
            "`zone` is 'eu', but `TPUClusterResolver` has no such .* Leave it out": (
                lambda: TPUClusterResolver(tpu="", zone="eu")
            ),
        },
    }
)
def test_what_describes_no_machine_is_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
