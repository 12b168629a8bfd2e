"""What the variable of `tf.distribute` says, and what each mistake in it does."""

import json

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


def with_task(task):
    return {"cluster": CLUSTER, "task": task}


def test_the_example_in_the_messages_is_correct():
    text = EXAMPLE.removeprefix("TF_CONFIG='").removesuffix("'")
    assert resolve(text).process_plan().num_processes == 2


def test_the_chief_and_the_workers_train_together():
    # An index in a string is an index, and keys of other programs are left alone.
    config = make_config("worker", "1", environment="cloud", rpc_layer="grpc")
    resolver = resolve(config)
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    plan = resolver.process_plan()
    assert (plan.process_id, plan.num_processes) == (2, 3)
    assert plan.coordinator_address == "10.0.0.1:2222"


def test_an_evaluator_need_not_be_in_the_cluster():
    plan = resolve(make_config("evaluator")).process_plan()
    assert plan == ProcessPlan(task_type="evaluator")


@pytest.mark.parametrize("config", ["{}", '{"cluster": {}}', '{"environment": "x"}'])
def test_no_cluster_is_a_single_process(config):
    resolver = resolve(config)
    assert not resolver.cluster_spec()
    assert resolver.process_plan() == ProcessPlan()


@pytest.mark.parametrize("task", [("worker", 0), ("evaluator", 0)])
def test_a_task_of_a_process_alone_needs_no_cluster(task):
    resolver = resolve({"task": {"type": task[0], "index": task[1]}})
    assert (resolver.task_type, resolver.task_id) == task


def test_arguments_come_before_the_variable():
    resolver = resolve(make_config(), task_type="chief", task_id=0)
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    assert resolve(make_config(), task_id=1).task_id == 1
    with pytest.raises(ClusterError, match=r"`task_id` is 2, .* one of 0, 1"):
        resolve(make_config(), task_id=2)
    with pytest.raises(ClusterError, match=r"process is ps 0, .* it has no `cluster`"):
        resolve({}, task_type="ps", task_id=0)


TYPE, INDEX = r'`TF_CONFIG\["task"\]\["type"\]`', r'`TF_CONFIG\["task"\]\["index"\]`'
WORKER = r'`TF_CONFIG\["cluster"\]\["worker"\]'


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", r"`TF_CONFIG` is not set\. It describes"),
        ("{'cluster': {}}", r"is not valid JSON: .* line 1 column 2 .*, near \"\{'cl"),
        *[
            (text, "`TF_CONFIG` is .*, but it must be a `dict`.* a JSON object")
            for text in ("3", "[1]", '"worker"', "null")
        ],
        *[
            ({"task": {"type": kind, "index": index}}, f"{kind} {index}, but not .* no")
            for kind, index in (("chief", 0), ("worker", 1), ("ps", 0))
        ],
        *[
            ({**make_config(), "cluster": cluster}, message)
            for cluster, message in (
                (3, r'`TF_CONFIG\["cluster"\]` is 3 of type int, but it must be a'),
                ({"worker": "a:1"}, rf"{WORKER}` is 'a:1' of type"),
                ({"worker": ["a"]}, rf"{WORKER}\[0\]` is 'a', but"),
                ({"worker": [1]}, rf"{WORKER}\[0\]` is 1 of type int"),
                (
                    {"": ["a:1"]},
                    r"`TF_CONFIG\[\"cluster\"\]` has the job '', but a job",
                ),
                ({"worker": ["a:1", "a:1"]}, "gives 'a:1' to both"),
            )
        ],
        ({"cluster": CLUSTER}, r'`TF_CONFIG\["task"\]` is None .* which task of the'),
        (with_task({"index": 0}), r'`TF_CONFIG\["task"\]` is \{.* must have `type`'),
        (with_task({"type": "ps"}), r'`TF_CONFIG\["task"\]` is \{.* must have `index`'),
        *[
            (with_task(task), r'`TF_CONFIG\["task"\]` is .*, but it must be a `dict`')
            for task in ("worker", 0, ["worker", 0], None)
        ],
        *[
            (make_config(kind), f"{TYPE} is .* one of 'ch")
            for kind in ("master", "Worker", 0, None, [])
        ],
        *[
            (make_config(index=index), f"{INDEX} is .* integer that is not negative")
            for index in (-1, 1.0, "-1", "one", "", True, None, [0])
        ],
        (make_config(index=2), rf"{INDEX} is 2, but it must be one of 0, 1\."),
        (
            make_config("ps"),
            rf"{TYPE} is 'ps', but it must be one of 'chief', 'worker'\.",
        ),
        (make_config(rpc_layer="grpc+verbs"), "rpc_layer.*is 'grpc.verbs', but JAX"),
        (make_config("evaluator", 1), f"{INDEX} is 1, .* There is one evaluator"),
        (
            {**make_config(), "cluster": {**CLUSTER, "chief": ["a:1", "b:1"]}},
            "a cluster that cannot train: `chief` has 2 tasks",
        ),
    ],
)
def test_a_mistake_is_an_error_that_names_the_key_and_shows_an_example(config, message):
    with pytest.raises(ClusterError, match=message) as raised:
        resolve(config).process_plan()
    assert str(raised.value).endswith(f"\n{EXAMPLE}")
