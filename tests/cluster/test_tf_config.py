"""Tests of reading `TF_CONFIG`, and of the error for each mistake in it."""

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


@pytest.mark.parametrize(
    ("config", "task"),
    [
        *[(text, None) for text in ("{}", '{"cluster": {}}', '{"environment": "x"}')],
        *[
            ({"task": {"type": kind, "index": 0}}, kind)
            for kind in ("worker", "evaluator")
        ],
        # An evaluator need not be in the cluster.
        (make_config("evaluator"), "evaluator"),
    ],
)
def test_a_process_on_its_own(config, task):
    plan = resolve(config).process_plan()
    assert plan == ProcessPlan(task_type=task or "worker")


def test_arguments_come_before_the_variable():
    resolver = resolve(make_config(), task_type="chief", task_id=0)
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    assert resolve(make_config(), task_id=1).task_id == 1
    with pytest.raises(ClusterError, match=r"`task_id` is 2, .* one of 0, 1"):
        resolve(make_config(), task_id=2)
    with pytest.raises(ClusterError, match=r"`task_type` is 'ps', .* 'worker'"):
        resolve({}, task_type="ps", task_id=0)


WORKER = r'`cluster\["worker"\]'
TASK = r'`TF_CONFIG\["task"\]` is .*, but it must be a `dict`'


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "`TF_CONFIG` is '', and describes no task .*: Expecting value"),
        ("{'cluster': {}}", r"no task .*: Expecting .* line 1 column 2"),
        ("[1]", r"`TF_CONFIG` is \[1\] .*must be a `dict`.* a JSON object"),
        # It would train alone.
        *[
            ({"task": {"type": kind, "index": index}}, message)
            for kind, index, message in (
                ("chief", 0, "`task_type` is 'chief', .* 'worker'"),
                ("worker", 1, "`task_id` is 1, .* one of 0"),
            )
        ],
        *[
            ({**make_config(), "cluster": cluster}, message)
            for cluster, message in (
                (3, "`cluster` is 3 of type int, but it must be a"),
                ({"worker": "a:1"}, f"{WORKER}` is 'a:1' of type"),
                ({"worker": ["a"]}, rf"{WORKER}\[0\]` is 'a', but"),
                ({"": ["a:1"]}, "`cluster` has the job '', which"),
                ({**CLUSTER, "chief": ["a:1", "b:1"]}, "`chief` has 2 tasks"),
            )
        ],
        *[(with_task(task), TASK) for task in ("worker", ["worker", 0], None)],
        ({"cluster": CLUSTER}, TASK),
        (with_task({"index": 0}), "`task_type` is None"),
        (with_task({"type": "ps"}), "`task_id` is None"),
        (make_config("master"), "`task_type` is 'master', .* one of 'chief'"),
        (make_config("ps"), "`task_type` is 'ps', .* one of 'evaluator', 'chief', 'wo"),
        *[
            (make_config(index=index), "`task_id` is .* not")
            for index in (-1, 1.5, "-1")
        ],
        (make_config(index="one"), "`task_id` is 'one', .* not negative"),
        (make_config(index=2), r"`task_id` is 2, but it must be one of 0, 1\."),
        (make_config("evaluator", 1), r"`task_id` is 1, but it must be one of 0\."),
    ],
)
def test_a_mistake_is_an_error_that_names_it_and_shows_an_example(config, message):
    with pytest.raises(ClusterError, match=message) as raised:
        resolve(config)
    assert str(raised.value).endswith(f"\n{EXAMPLE}")
