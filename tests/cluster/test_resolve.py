import json
import logging

import pytest

from armillary.cluster import (
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    TPUClusterResolver,
    resolve_cluster,
)
from armillary.errors import ClusterError

CLUSTER = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}
TF_CONFIG = {
    "TF_CONFIG": json.dumps(
        {
            "cluster": CLUSTER,
            "task": {"type": "worker", "index": 1},
        }
    )
}
SLURM = {
    "SLURM_STEP_NODELIST": "a,b",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_JOB_ID": "1",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "2222",
}
TPU = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}


@pytest.fixture
def read_line(caplog):
    """Returns a function that chooses a resolver and returns it with its line."""
    caplog.set_level(logging.INFO, logger="armillary")

    def read(environ):
        caplog.clear()
        resolver = resolve_cluster(environ)
        (record,) = caplog.records
        return resolver, record.getMessage()

    return read


def test_nothing_is_a_single_process(read_line):
    resolver, line = read_line({"HOME": "x"})
    assert isinstance(resolver, SimpleClusterResolver)
    assert not resolver.process_plan().is_distributed
    assert resolver.process_plan().is_chief
    assert line == (
        "cluster | a single process: the environment tells nothing of TF_CONFIG, "
        "Slurm, Kubernetes, torchrun, a TPU slice"
    )


def test_the_line_says_what_was_chosen_and_why(read_line):
    _, line = read_line(TF_CONFIG)
    assert line == (
        "cluster | from TF_CONFIG: worker 1, process 1 of 2, coordinator 10.0.0.1:2222"
    )
    _, line = read_line({**TF_CONFIG, **SLURM, **TORCHRUN})
    assert line.endswith(" | comes before Slurm, torchrun")


def test_a_process_that_is_alone_is_told_so(read_line):
    task = {"type": "evaluator", "index": 0}
    text = json.dumps({"cluster": CLUSTER, "task": task})
    _, line = read_line({"TF_CONFIG": text})
    assert line == "cluster | from TF_CONFIG: evaluator 0, a single process"


def test_the_first_one_is_taken():
    environ = {**TF_CONFIG, **SLURM, **TORCHRUN, **TPU}
    assert type(resolve_cluster(environ)) is TFConfigClusterResolver
    environ["TF_CONFIG"] = ""
    assert type(resolve_cluster(environ)) is SlurmClusterResolver
    del environ["SLURM_STEP_NODELIST"]
    assert type(resolve_cluster(environ)) is TorchrunClusterResolver
    del environ["RANK"]
    assert type(resolve_cluster(environ)) is TPUClusterResolver


def test_torchrun_in_a_step_of_slurm_is_torchrun():
    environ = {**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}
    assert type(resolve_cluster(environ)) is TorchrunClusterResolver


def test_a_malformed_description_is_not_passed_over():
    with pytest.raises(ClusterError, match=r"`TF_CONFIG` is not valid JSON"):
        resolve_cluster({"TF_CONFIG": "{", **SLURM})
    with pytest.raises(ClusterError, match=r"`MASTER_ADDR` is not set"):
        resolve_cluster({"RANK": "0", "WORLD_SIZE": "2"})


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG["TF_CONFIG"])
    assert resolve_cluster().task_id == 1


def test_the_line_is_seen_where_no_logging_is_set_up(monkeypatch, capsys):
    own = logging.getLogger("armillary")
    for logger in (logging.root, own):
        monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    before = own.level, own.propagate
    try:
        resolve_cluster({})
    finally:
        own.setLevel(before[0])
        own.propagate = before[1]
    assert capsys.readouterr().err.startswith("cluster | a single process")
