"""Tests that a parameter server task is refused under other strategies."""

import json

import jax
import pytest

import armillary
from armillary.cluster import SimpleClusterResolver, SlurmClusterResolver
from armillary.errors import ClusterError
from tests.distribute.contract import TPUOnCPU

CLUSTER = {"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:4"]}
STRATEGIES = {
    "one device": lambda: armillary.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: armillary.MirroredStrategy(jax.devices()[:1]),
    "central": lambda: armillary.distribute.CentralStorageStrategy(jax.devices()[:1]),
    "multi worker": armillary.MultiWorkerMirroredStrategy,
    "tpu": TPUOnCPU,
    "sharded": armillary.ShardedStrategy,
    "parameter server": armillary.ParameterServerStrategy,
}
IS_SERVER = r"says that this process is (a )?ps.*Server\(resolver\)\.join\(\)"


def set_task(monkeypatch, task_type, index=0, cluster=CLUSTER):
    config = {"cluster": cluster, "task": {"type": task_type, "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_server_of_tf_config_makes_no_strategy(monkeypatch, name):
    set_task(monkeypatch, "ps")
    with pytest.raises(ClusterError, match=IS_SERVER):
        STRATEGIES[name]()


@pytest.mark.parametrize("kind", ["simple", "slurm"])
@pytest.mark.parametrize("name", ["multi worker", "tpu", "sharded"])
def test_a_server_of_any_resolver_makes_no_strategy(name, kind):
    if kind == "simple":
        resolver = SimpleClusterResolver(CLUSTER, task_type="ps", task_id=0)
    else:
        variables = {
            "SLURM_STEP_NODELIST": "node[1-4]",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_PROCID": "3",
            "SLURM_JOB_ID": "7",
        }
        jobs = {"chief": 1, "worker": 2, "ps": 1}
        resolver = SlurmClusterResolver(jobs, environ=variables)
    argument = "resolver" if name == "tpu" else "cluster_resolver"
    with pytest.raises(ClusterError, match=IS_SERVER):
        STRATEGIES[name](**{argument: resolver})


def test_other_tasks_make_strategies_of_their_own_devices(monkeypatch):
    """A chief of parameter servers may compare with one device."""
    for task_type in ("chief", "worker"):
        set_task(monkeypatch, task_type)
        assert armillary.OneDeviceStrategy("cpu:0").num_replicas_in_sync == 1
        assert STRATEGIES["mirrored"]().num_replicas_in_sync == 1


def test_a_malformed_variable_matters_to_strategies_that_join(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    assert STRATEGIES["mirrored"]().num_replicas_in_sync == 1
    with pytest.raises(ClusterError, match=r"`TF_CONFIG` is '\{'"):
        armillary.MultiWorkerMirroredStrategy()
