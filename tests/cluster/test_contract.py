"""One cluster, described in the way of each scheduler, is one and the same plan."""

import json

import pytest

from armillary.cluster import (
    ClusterResolver,
    ClusterSpec,
    KubernetesClusterResolver,
    ProcessPlan,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    TPUClusterResolver,
    resolve_cluster,
)

HOSTS = ["node-0.net", "node-1.net", "node-2.net"]
WORKERS = [f"{host}:2222" for host in HOSTS]
TASK_IDS = range(len(WORKERS))


def describe_in_tf_config(task_id):
    task = {"type": "worker", "index": task_id}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": WORKERS}, "task": task})}


def describe_in_slurm(task_id):
    return {
        "SLURM_STEP_NODELIST": "node-[0-2].net",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_PROCID": str(task_id),
        "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
    }


def describe_in_kubernetes(task_id):
    return {
        "JOB_COMPLETION_INDEX": str(task_id),
        "HOSTNAME": f"node-{task_id}",
        "ARMILLARY_NUM_PROCESSES": "3",
        "ARMILLARY_SERVICE_NAME": "net",
    }


def describe_in_torchrun(task_id):
    return {
        "RANK": str(task_id),
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": HOSTS[0],
        "MASTER_PORT": "2222",
    }


def describe_in_tpu(task_id):
    return {"TPU_WORKER_HOSTNAMES": ",".join(HOSTS), "TPU_WORKER_ID": str(task_id)}


def make_simple(task_id):
    return SimpleClusterResolver({"worker": WORKERS}, "worker", task_id)


RESOLVERS = {
    "simple": make_simple,
    "tf_config": lambda i: TFConfigClusterResolver(environ=describe_in_tf_config(i)),
    "slurm": lambda i: SlurmClusterResolver(
        port_base=2222, environ=describe_in_slurm(i)
    ),
    "kubernetes": lambda i: KubernetesClusterResolver(
        environ=describe_in_kubernetes(i)
    ),
    "torchrun": lambda i: TorchrunClusterResolver(environ=describe_in_torchrun(i)),
    "tpu": lambda i: TPUClusterResolver(port=2222, environ=describe_in_tpu(i)),
}
ENVIRONMENTS = {
    "tf_config": (describe_in_tf_config, TFConfigClusterResolver),
    "slurm": (describe_in_slurm, SlurmClusterResolver),
    "kubernetes": (describe_in_kubernetes, KubernetesClusterResolver),
    "torchrun": (describe_in_torchrun, TorchrunClusterResolver),
    "tpu": (describe_in_tpu, TPUClusterResolver),
}
# The others are told the address of worker 0, or need no other.
KNOWS_ALL = ["simple", "tf_config"]


@pytest.fixture(params=sorted(RESOLVERS))
def make_resolver(request):
    return RESOLVERS[request.param]


@pytest.mark.parametrize("task_id", TASK_IDS)
def test_every_description_makes_the_same_plan(make_resolver, task_id):
    plan = make_resolver(task_id).process_plan()
    assert plan == ProcessPlan(
        task_type="worker",
        task_id=task_id,
        num_processes=3,
        process_id=task_id,
        coordinator_address="node-0.net:2222",
        local_device_ids=None,
    )
    assert plan.is_chief == (task_id == 0)
    assert plan.is_training
    assert plan.is_distributed


def test_every_resolver_tells_the_task(make_resolver):
    resolver = make_resolver(1)
    assert isinstance(resolver, ClusterResolver)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def test_every_resolver_knows_where_worker_0_is(make_resolver):
    assert make_resolver(1).cluster_spec().task_address("worker", 0) == WORKERS[0]


@pytest.mark.parametrize("name", sorted(RESOLVERS))
def test_a_scheduler_tells_the_address_of_process_0_only(name):
    known = WORKERS if name in KNOWS_ALL else WORKERS[:1]
    assert RESOLVERS[name](1).cluster_spec() == ClusterSpec({"worker": known})


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_the_environment_of_the_process_is_the_default(name, monkeypatch):
    describe, kind = ENVIRONMENTS[name]
    for key, value in describe(2).items():
        monkeypatch.setenv(key, value)
    assert kind().task_id == 2


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_an_environment_chooses_its_resolver(name):
    describe, kind = ENVIRONMENTS[name]
    assert type(resolve_cluster(describe(1))) is kind


@pytest.mark.parametrize("name", sorted(set(ENVIRONMENTS) - {"tf_config", "tpu"}))
@pytest.mark.parametrize("value", ["", "-1", "one", "1.0", "٣"])
def test_an_index_that_is_no_number_is_an_error_that_names_it(name, value):
    describe, kind = ENVIRONMENTS[name]
    index = {
        "slurm": "SLURM_PROCID",
        "kubernetes": "JOB_COMPLETION_INDEX",
        "torchrun": "RANK",
    }[name]
    rule = "must be an integer of at least 0" if value else "is not set"
    with pytest.raises(ValueError, match=rf"`{index}` .*{rule}"):
        kind(environ={**describe(0), index: value})
