"""Tests of the cluster resolvers of schedulers, and of the choice between them."""

import json
import logging
from pathlib import Path

import pytest

from armillary.cluster import (
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
from armillary.errors import ClusterError
from tests.mistakes import mistakes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"
HOSTS = ["node-0.net", "node-1.net", "node-2.net"]
WORKERS = [f"{host}:2222" for host in HOSTS]
TASK = {"type": "worker", "index": 1}
# Task 1 of 3, as each scheduler describes it.
TF_CONFIG = {"TF_CONFIG": json.dumps({"cluster": {"worker": WORKERS}, "task": TASK})}
SLURM = {
    "SLURM_STEP_NODELIST": "node-[0-2].net",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "node-1",
    "ARMILLARY_NUM_PROCESSES": "3",
    "ARMILLARY_SERVICE_NAME": "net",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": HOSTS[0],
    "MASTER_PORT": "2222",
}
TPU = {"TPU_WORKER_HOSTNAMES": ",".join(HOSTS), "TPU_WORKER_ID": "1"}
SLICES = {
    "TPU_WORKER_HOSTNAMES": "b-0,b-1",
    "TPU_WORKER_ID": "1",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "a-0:8080",
}
KINDS = {
    "TF_CONFIG": (TFConfigClusterResolver, TF_CONFIG),
    "Slurm": (SlurmClusterResolver, SLURM),
    "Kubernetes": (KubernetesClusterResolver, KUBERNETES),
    "torchrun": (TorchrunClusterResolver, TORCHRUN),
    "a TPU slice": (TPUClusterResolver, TPU),
}
SLURM_PORT = 61_440 + 31 * 7


def make(name, without=(), **changes):
    """Returns a resolver, without some variables and with others."""
    kind, environ = KINDS[name]
    environ = {key: value for key, value in environ.items() if key not in without}
    variables = {key: value for key, value in changes.items() if key.isupper()}
    arguments = {key: value for key, value in changes.items() if not key.isupper()}
    return kind(environ={**environ, **variables}, **arguments)


def plan(name, without=(), **changes):
    return make(name, without, **changes).process_plan()


@pytest.mark.parametrize(
    ("name", "port"),
    list(zip(KINDS, (2222, SLURM_PORT, 2222, 2222, 8482), strict=True)),
)
def test_every_description_of_one_cluster_is_the_same_plan(name, port, monkeypatch):
    resolver = make(name)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    address = f"node-0.net:{port}"
    found = resolver.process_plan()
    assert found == ProcessPlan(
        task_id=1, num_processes=3, process_id=1, coordinator_address=address
    )
    assert not found.is_chief
    assert found.is_training
    assert found.is_distributed
    # A scheduler tells the address of process 0 only.
    known = WORKERS if name == "TF_CONFIG" else [address]
    assert resolver.cluster_spec() == ClusterSpec({"worker": known})
    # The environment of the process is the default, and chooses its resolver.
    kind, environ = KINDS[name]
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    assert kind().task_id == 1
    assert type(resolve_cluster()) is kind


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("Slurm", "SLURM_PROCID"),
        ("Kubernetes", "JOB_COMPLETION_INDEX"),
        ("torchrun", "RANK"),
        ("a TPU slice", "TPU_WORKER_ID"),
    ],
)
@pytest.mark.parametrize("value", ["", "-1", "one", "3"])
def test_an_index_that_is_none_is_an_error_that_names_it(name, index, value):
    rule = "must be an integer of at least 0 and below 3" if value else "is not set"
    with pytest.raises(ClusterError, match=rf"`{index}` .*{rule}"):
        make(name, **{index: value})


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        *[("Kubernetes", variable) for variable in KUBERNETES],
        *[
            ("Slurm", f"SLURM_{name}")
            for name in ("STEP_NODELIST", "STEP_NUM_TASKS", "JOB_ID")
        ],
        *[("torchrun", name) for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")],
    ],
)
def test_a_missing_variable_is_an_error_that_names_it(name, variable):
    with pytest.raises(ClusterError, match=rf"`{variable}`.* is not set\. \w+"):
        make(name, without=[variable])


def slices(**changes):
    return TPUClusterResolver(environ={**SLICES, **changes})


NO_ADDRESS = "but it must be a host, a colon and a port"


@mistakes(
    {
        ClusterError: {
            r"`SLURM_LOCALID` is not set\. Start the program with `srun`": (
                lambda: make("Slurm", ["SLURM_LOCALID"], gpus_per_task=1)
            ),
            r"`jobs` is \{'worker': 4\}, but Slurm started 3 tasks\. Cha": (
                lambda: make("Slurm", jobs={"worker": 4})
            ),
            f"is 'a b:61657', {NO_ADDRESS}.* Start": (
                lambda: make("Slurm", SLURM_STEP_NODELIST="a b")
            ),
            f"is 'node-0.net:65536', {NO_ADDRESS}": (
                lambda: make("Kubernetes", ARMILLARY_PORT="65536")
            ),
            f"http://pods.*, {NO_ADDRESS}": (
                lambda: make("Kubernetes", ARMILLARY_SERVICE_NAME="http://pods")
            ),
            f"tcp://a.* {NO_ADDRESS}": lambda: make("torchrun", MASTER_ADDR="tcp://a"),
            "`MEGASCALE_SLICE_ID` is '3', .* below 3": (
                lambda: slices(MEGASCALE_SLICE_ID="3")
            ),
            "`MEGASCALE_SLICE_ID` is not set": lambda: slices(MEGASCALE_SLICE_ID=""),
            "`MEGASCALE_COORDINATOR_ADDRESS` is not set": (
                lambda: slices(MEGASCALE_COORDINATOR_ADDRESS="")
            ),
        },
        ValueError: {
            "`chief` has 2 tasks.*Keep one": (
                lambda: make("Slurm", jobs={"chief": 2, "worker": 1})
            ),
            "`jobs` is 'master', but it must be one of": (
                lambda: make("Slurm", jobs={"master": 3})
            ),
            r'`jobs\["worker"\]` is 3.0.*positive integer': (
                lambda: make("Slurm", jobs={"worker": 3.0})
            ),
            "`port_base` is 65536, .*at most 65,535": (
                lambda: make("Slurm", port_base=65_536)
            ),
            "`gpus_per_task` is 0, but it must be a": (
                lambda: make("Slurm", gpus_per_task=0)
            ),
            "`tpu` is 'mine', but .* Start it on every machine of that TPU, and": (
                lambda: make("a TPU slice", tpu="mine")
            ),
        },
    }
)
def test_variables_that_describe_no_process_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("hostname", ["node", "node-2", "node-01", "-1"])
def test_a_host_name_that_does_not_end_in_the_index_is_an_error(hostname):
    message = rf"`HOSTNAME` is '{hostname}', but pod 1 of an indexed Job is called by"
    with pytest.raises(ClusterError, match=message):
        make("Kubernetes", HOSTNAME=hostname)


def test_jobs_take_the_tasks_with_the_chief_and_the_workers_first():
    jobs = {"evaluator": 1, "worker": 1, "chief": 1}
    chief, worker, evaluator = (
        make("Slurm", jobs=jobs, SLURM_PROCID=rank) for rank in "012"
    )
    assert (evaluator.task_type, evaluator.task_id) == ("evaluator", 0)
    assert not evaluator.process_plan().is_training
    assert not evaluator.process_plan().is_distributed
    assert (worker.task_type, worker.task_id) == ("worker", 0)
    found = worker.process_plan()
    assert (found.process_id, found.num_processes) == (1, 2)
    address = found.coordinator_address
    assert worker.cluster_spec() == ClusterSpec({"chief": [address]})
    assert chief.process_plan().is_chief


def test_the_step_of_slurm_comes_before_the_job():
    job = {"SLURM_JOB_NODELIST": "a,b", "SLURM_NODELIST": "a,b", "SLURM_NTASKS": "2"}
    assert plan("Slurm", **job) == plan("Slurm")
    found = plan("Slurm", ["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"], **job)
    assert found.coordinator_address == f"a:{SLURM_PORT}"
    assert found.num_processes == 2


def test_the_port_is_made_from_the_job_and_the_step():
    def find_port(**changes):
        address = plan("Slurm", **changes).coordinator_address
        return int(address.partition(":")[2])

    port = find_port()
    assert port == find_port(SLURM_PROCID="0") == find_port(SLURM_STEP_ID="")
    assert port != find_port(SLURM_JOB_ID="8")
    assert port != find_port(SLURM_STEP_ID="1")
    ports = {find_port(SLURM_JOB_ID=str(job_id)) for job_id in range(5000)}
    assert min(ports) >= 61_440
    assert max(ports) <= 65_535


TWO = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("name", "without", "changes", "devices"),
    [
        ("Slurm", [], {}, None),
        ("Slurm", [], {"gpus_per_task": 1}, (1,)),
        ("Slurm", [], {"gpus_per_task": 2}, (2, 3)),
        ("torchrun", [], TWO, (1,)),
        ("torchrun", ["LOCAL_WORLD_SIZE"], {"LOCAL_RANK": "1"}, (1,)),
        ("torchrun", [], {}, None),
        ("torchrun", ["LOCAL_RANK"], {}, None),
    ],
)
def test_gpus_are_shared_out_by_the_number_on_the_machine(
    name, without, changes, devices
):
    assert plan(name, without, **changes).local_device_ids == devices


@pytest.mark.parametrize(
    ("name", "changes", "address"),
    [
        *[
            ("Slurm", {"SLURM_STEP_NODELIST": nodes, "port_base": 9}, f"{first}:9")
            for nodes, first in (
                ("big.net,node[1-2]", "big.net"),
                ("node[001-003,7],big", "node001"),
                ("rack[1-2]-node[08-10].net,big", "rack1-node08.net"),
            )
        ],
        ("Kubernetes", {"HOSTNAME": "node-1.pods.default.svc"}, WORKERS[0]),
        ("Kubernetes", {"ARMILLARY_PORT": "99"}, "node-0.net:99"),
        ("torchrun", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "node-0.net:2223"),
        ("torchrun", {"MASTER_ADDR": "2001:db8::1"}, "[2001:db8::1]:2222"),
        ("torchrun", {"MASTER_ADDR": "[::1]"}, "[::1]:2222"),
        *[
            ("a TPU slice", {"TPU_WORKER_HOSTNAMES": f"{host},b"}, "[fd00::1]:8482")
            for host in ("fd00::1", "[fd00::1]", "[fd00::1]:8476")
        ],
        ("a TPU slice", {"TPU_PROCESS_ADDRESSES": "own:8476,b:1"}, "own:8482"),
        *[("a TPU slice", {"tpu": tpu}, "node-0.net:8482") for tpu in ("", "local")],
    ],
)
def test_the_address_of_process_0_is_made_from_variables(name, changes, address):
    assert plan(name, **changes).coordinator_address == address


def test_workers_of_earlier_slices_come_first_and_all_agree_on_the_coordinator():
    found = slices().process_plan()
    assert found == ProcessPlan(
        task_id=3, num_processes=6, process_id=3, coordinator_address="a-0:8482"
    )
    first = slices(TPU_WORKER_ID="0", MEGASCALE_SLICE_ID="0").process_plan()
    assert first.is_chief
    assert first.coordinator_address == found.coordinator_address


def test_a_tpu_machine_on_its_own_needs_no_index_and_without_variables_jax_finds_out():
    found = plan("a TPU slice", ["TPU_WORKER_ID"], TPU_WORKER_HOSTNAMES="localhost")
    assert (found.num_processes, found.process_id) == (1, 0)
    resolver = TPUClusterResolver(environ={})
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert not resolver.cluster_spec()
    found = resolver.process_plan()
    assert found.is_distributed
    assert found.is_chief is None
    assert found.initialize_arguments() == {}


def test_the_example_describes_a_cluster():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    name, last = job["metadata"]["name"], spec["completions"] - 1
    pod_variables = {
        "JOB_COMPLETION_INDEX": str(last),
        "HOSTNAME": f"{name}-{last}",
    }
    found = KubernetesClusterResolver(environ=pod_variables | environ).process_plan()
    assert found.num_processes == spec["completions"]
    assert found.coordinator_address == f"{name}-0.{pod['subdomain']}:2222"


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({**TF_CONFIG, **SLURM, **TORCHRUN, **TPU}, TFConfigClusterResolver),
        ({"TF_CONFIG": "", **SLURM, **TORCHRUN}, SlurmClusterResolver),
        # A script in a batch job has some of the variables as well.
        ({**SLURM, "SLURM_STEP_NODELIST": "", **TPU}, TPUClusterResolver),
        # The pods may be independent runs.
        ({"JOB_COMPLETION_INDEX": "1"}, SimpleClusterResolver),
        # torchrun's processes, in a step of Slurm or in a pod.
        *[
            ({**outer, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, TorchrunClusterResolver)
            for outer in (SLURM, KUBERNETES)
        ],
    ],
)
def test_the_first_one_that_is_there_is_taken(environ, kind):
    assert type(resolve_cluster(environ)) is kind


def test_a_malformed_description_is_not_passed_over():
    with pytest.raises(ClusterError, match=r"`TF_CONFIG` is '\{', and"):
        resolve_cluster({"TF_CONFIG": "{", **SLURM})
    with pytest.raises(ClusterError, match=r"`MASTER_PORT` is not set"):
        resolve_cluster({"RANK": "0", "WORLD_SIZE": "2"})


EVALUATOR = {
    "cluster": {"worker": WORKERS},
    "task": {"type": "evaluator", "index": 0},
}


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (
            {"HOME": "x"},
            "a single process: the environment has no variables of TF_CONFIG, Slurm, "
            "Kubernetes, torchrun, a TPU slice",
        ),
        (
            TF_CONFIG,
            "from TF_CONFIG: worker 1, process 1 of 3, coordinator node-0.net:2222",
        ),
        (
            {**TF_CONFIG, **SLURM, **TORCHRUN},
            "from TF_CONFIG: worker 1, process 1 of 3, coordinator node-0.net:2222 | "
            "comes before Slurm, torchrun",
        ),
        (
            {"TF_CONFIG": json.dumps(EVALUATOR)},
            "from TF_CONFIG: evaluator 0, a single process",
        ),
    ],
)
def test_a_log_line_names_the_chosen_resolver_and_the_reason(environ, line, caplog):
    caplog.set_level(logging.INFO, logger="armillary")
    resolve_cluster(environ)
    (record,) = caplog.records
    assert record.getMessage() == f"cluster | {line}"


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
