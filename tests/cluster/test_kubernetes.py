from pathlib import Path

import pytest

from armillary.cluster import ClusterSpec, KubernetesClusterResolver
from armillary.errors import ClusterError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"
POD = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-1",
    "ARMILLARY_NUM_PROCESSES": "2",
    "ARMILLARY_SERVICE_NAME": "pods",
}
FIRST = ClusterSpec({"worker": ["train-0.pods:2222"]})


def resolve(without=(), environ=None):
    kept = {key: value for key, value in POD.items() if key not in without}
    return KubernetesClusterResolver(environ={**kept, **(environ or {})})


def test_pods_are_called_by_the_job_and_their_index():
    assert resolve().cluster_spec() == FIRST
    assert resolve().process_plan().process_id == 1


def test_a_host_name_may_have_a_domain():
    resolver = resolve(environ={"HOSTNAME": "train-1.pods.default.svc"})
    assert resolver.cluster_spec() == FIRST


def test_the_port_can_be_set():
    resolver = resolve(environ={"ARMILLARY_PORT": "99"})
    assert resolver.process_plan().coordinator_address == "train-0.pods:99"


def test_an_index_alone_is_no_cluster():
    assert KubernetesClusterResolver.is_present(POD)
    index = {"JOB_COMPLETION_INDEX": "1"}
    assert not KubernetesClusterResolver.is_present(index)
    inner = {**POD, "TORCHELASTIC_RUN_ID": "x"}
    assert not KubernetesClusterResolver.is_present(inner)


def test_the_example_describes_a_cluster():
    yaml = pytest.importorskip("yaml")
    text = (EXAMPLES / "kubernetes.yaml").read_text()
    service, job = yaml.safe_load_all(text)
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
    resolver = KubernetesClusterResolver(
        environ={
            "JOB_COMPLETION_INDEX": str(last),
            "HOSTNAME": f"{name}-{last}",
            **environ,
        }
    )
    plan = resolver.process_plan()
    assert plan.num_processes == spec["completions"]
    assert plan.coordinator_address == f"{name}-0.{pod['subdomain']}:2222"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("JOB_COMPLETION_INDEX", r"Kubernetes sets it in the pods of a Job with"),
        ("ARMILLARY_NUM_PROCESSES", r"It is the number of pods that train together"),
        ("ARMILLARY_SERVICE_NAME", r"It is the name of a headless Service"),
        ("HOSTNAME", r"It is the name of this pod, which"),
    ],
)
def test_a_missing_variable_is_an_error(name, fix):
    with pytest.raises(ClusterError, match=rf"`{name}` is not set\. {fix}"):
        resolve(without=[name])


@pytest.mark.parametrize("hostname", ["train", "train-2", "train-01", "-1"])
def test_a_host_name_that_does_not_end_in_the_index_is_an_error(hostname):
    message = rf"`HOSTNAME` is '{hostname}', but pod 1 of an indexed Job is called by"
    with pytest.raises(ClusterError, match=message):
        resolve(environ={"HOSTNAME": hostname})


def test_an_index_beyond_the_pods_is_an_error():
    with pytest.raises(ClusterError, match=r"value of `ARMILLARY_NUM_PROCESSES`\. Set"):
        resolve(environ={"ARMILLARY_NUM_PROCESSES": "1"})


@pytest.mark.parametrize("count", ["0", "two"])
def test_a_number_of_pods_that_is_no_number_is_an_error(count):
    message = (
        r"`ARMILLARY_NUM_PROCESSES` is .*, but it must be an integer of at least 1"
    )
    with pytest.raises(ClusterError, match=message):
        resolve(environ={"ARMILLARY_NUM_PROCESSES": count})


def test_a_port_that_is_no_port_is_an_error():
    with pytest.raises(ClusterError, match=r"`ARMILLARY_PORT` is '0', but it must be"):
        resolve(environ={"ARMILLARY_PORT": "0"})
    with pytest.raises(
        ClusterError, match=r"`ARMILLARY_PORT` is 65536, .* below 65536"
    ):
        resolve(environ={"ARMILLARY_PORT": "65536"})


def test_a_service_that_is_no_name_is_an_error():
    message = r"`ARMILLARY_SERVICE_NAME` cannot be used to reach process 0"
    with pytest.raises(ClusterError, match=message):
        resolve(environ={"ARMILLARY_SERVICE_NAME": "http://pods"})
