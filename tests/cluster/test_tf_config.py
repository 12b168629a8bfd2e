import json
import re

import pytest

from armillary.cluster import ClusterSpec, ProcessPlan, TFConfigClusterResolver
from armillary.errors import ClusterError

CLUSTER = {"chief": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}
EXAMPLE = (
    """TF_CONFIG='{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, """
    """"task": {"type": "worker", "index": 0}}'"""
)


def resolve(config, **options):
    text = config if isinstance(config, str) else json.dumps(config)
    return TFConfigClusterResolver(environ={"TF_CONFIG": text}, **options)


def make_config(task_type="worker", index=0, **more):
    return {"cluster": CLUSTER, "task": {"type": task_type, "index": index}, **more}


def expect(config, message, **options):
    """Asserts an error with `message` that shows the example."""
    with pytest.raises(ClusterError, match=message) as raised:
        resolve(config, **options)
    assert str(raised.value).endswith(f"\n{EXAMPLE}")


def test_the_example_in_the_messages_is_correct():
    text = EXAMPLE.removeprefix("TF_CONFIG='").removesuffix("'")
    assert resolve(text).process_plan().num_processes == 2


def test_the_chief_and_the_workers_train_together():
    resolver = resolve(make_config("worker", 1))
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    plan = resolver.process_plan()
    assert (plan.process_id, plan.num_processes) == (2, 3)
    assert plan.coordinator_address == "10.0.0.1:2222"


def test_an_index_in_a_string_is_an_index():
    assert resolve(make_config(index="1")).task_id == 1


def test_an_evaluator_need_not_be_in_the_cluster():
    plan = resolve(make_config("evaluator")).process_plan()
    assert plan == ProcessPlan(task_type="evaluator")


def test_keys_of_other_programs_are_left_alone():
    resolver = resolve(
        make_config(environment="cloud", job={"region": "x"}, rpc_layer="grpc")
    )
    assert resolver.task_type == "worker"


@pytest.mark.parametrize("config", ["{}", '{"cluster": {}}', '{"environment": "x"}'])
def test_no_cluster_is_a_single_process(config):
    resolver = resolve(config)
    assert not resolver.cluster_spec()
    assert resolver.process_plan() == ProcessPlan()


@pytest.mark.parametrize("task", [("worker", 0), ("evaluator", 0)])
def test_a_task_of_a_process_alone_needs_no_cluster(task):
    resolver = resolve({"task": {"type": task[0], "index": task[1]}})
    assert (resolver.task_type, resolver.task_id) == task


@pytest.mark.parametrize("task", [("chief", 0), ("worker", 1), ("ps", 0)])
def test_a_task_among_others_needs_a_cluster(task):
    message = rf"this process is {task[0]} {task[1]}, but not .* it has no `cluster`"
    expect({"task": {"type": task[0], "index": task[1]}}, message)
    expect({}, message, task_type=task[0], task_id=task[1])


def test_there_is_one_evaluator():
    message = r'`TF_CONFIG\["task"\]\["index"\]` is 1, but there is one evaluator'
    expect(make_config("evaluator", 1), message)


def test_arguments_come_before_the_variable():
    resolver = resolve(make_config(), task_type="chief", task_id=0)
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    assert resolve(make_config(), task_id=1).task_id == 1
    expect(make_config(), r"`task_id` is 2, but the 'worker' tasks", task_id=2)


def test_a_variable_that_is_not_set_is_an_error():
    with pytest.raises(ClusterError, match=r"`TF_CONFIG` is not set\. It describes"):
        TFConfigClusterResolver(environ={})


def test_broken_json_is_shown_where_it_breaks():
    text = json.dumps(make_config()).replace('], "', '] "')
    expect(
        text,
        r"`TF_CONFIG` is not valid JSON: Expecting ',' delimiter at line 1, column \d+,"
        r" near '.*\"worker\"",
    )
    expect("{'cluster': {}}", r"at line 1, column 2, near \"\{'cluster'")


@pytest.mark.parametrize("text", ["3", "[1]", '"worker"', "null"])
def test_json_that_is_no_object_is_an_error(text):
    expect(text, r"`TF_CONFIG` is .*, but it must be a JSON object, in braces")


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (3, r'`TF_CONFIG\["cluster"\]` is 3 of type int, but it must be a mapping'),
        ({"worker": "a:1"}, r'`TF_CONFIG\["cluster"\]\["worker"\]` is \'a:1\' of type'),
        ({"worker": ["a"]}, r'`TF_CONFIG\["cluster"\]\["worker"\]\[0\]` is \'a\', but'),
        (
            {"worker": [1]},
            r'`TF_CONFIG\["cluster"\]\["worker"\]\[0\]` is 1 of type int',
        ),
        (
            {"": ["a:1"]},
            r'`TF_CONFIG\["cluster"\]` has the job \'\', but a job is named',
        ),
        ({"worker": ["a:1", "a:1"]}, r'`TF_CONFIG\["cluster"\]` gives \'a:1\' to both'),
    ],
)
def test_a_malformed_cluster_is_an_error_that_names_the_key(cluster, message):
    expect({**make_config(), "cluster": cluster}, message)


def test_a_missing_task_is_an_error():
    expect({"cluster": CLUSTER}, r"`TF_CONFIG` has no key `task`, which says which")


@pytest.mark.parametrize("key", ["type", "index"])
def test_a_missing_key_of_the_task_is_an_error(key):
    config = make_config()
    del config["task"][key]
    expect(config, rf'`TF_CONFIG\["task"\]` has no key `{key}`: it is {{')


@pytest.mark.parametrize("task", ["worker", 0, ["worker", 0], None])
def test_a_task_that_is_no_object_is_an_error(task):
    config = {"cluster": CLUSTER, "task": task}
    expect(config, r'`TF_CONFIG\["task"\]` is .*, but it must be a JSON object')


@pytest.mark.parametrize("task_type", ["master", "Worker", 0, None, []])
def test_a_type_without_a_meaning_is_an_error(task_type):
    expect(make_config(task_type), r'`TF_CONFIG\["task"\]\["type"\]` is .* one of \'ch')


@pytest.mark.parametrize("index", [-1, 1.0, "-1", "one", "", True, None, [0]])
def test_an_index_that_is_no_index_is_an_error(index):
    message = r'`TF_CONFIG\["task"\]\["index"\]` is .* an integer that is not negative'
    expect(make_config(index=index), message)


def test_an_index_outside_the_job_is_an_error():
    name = re.escape('`TF_CONFIG["task"]["index"]`')
    expect(make_config(index=2), rf"{name} is 2, but the 'worker' tasks .* are 0, 1\.")


def test_a_type_outside_the_cluster_is_an_error():
    name = re.escape('`TF_CONFIG["task"]["type"]`')
    message = rf"{name} is 'ps', but the cluster has no such job: its jobs are 'chief',"
    expect(make_config("ps"), message)


def test_a_protocol_that_jax_does_not_speak_is_an_error():
    message = r'`TF_CONFIG\["rpc_layer"\]` is \'grpc\+verbs\', but JAX'
    expect(make_config(rpc_layer="grpc+verbs"), message)


def test_a_cluster_that_cannot_train_is_an_error():
    config = make_config()
    config["cluster"] = {**CLUSTER, "chief": ["10.0.0.1:2222", "10.0.0.4:2222"]}
    resolver = resolve(config)
    message = r"`TF_CONFIG` describes a cluster that cannot train\. .* 2 'chief' tasks"
    with pytest.raises(ClusterError, match=message):
        resolver.process_plan()
