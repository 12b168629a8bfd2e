import pytest

from armillary.cluster import ClusterSpec, SlurmClusterResolver
from armillary.errors import ClusterError

STEP = {
    "SLURM_STEP_NODELIST": "node[001-002],big",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}


def resolve(jobs=None, port_base=8888, *, environ=STEP, **options):
    return SlurmClusterResolver(jobs, port_base, environ=environ, **options)


def test_a_task_meets_the_others_at_the_first_node():
    resolver = resolve()
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["node001:8888"]})
    plan = resolver.process_plan()
    assert (plan.process_id, plan.num_processes) == (3, 4)
    assert plan.coordinator_address == "node001:8888"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("big", "big"),
        ("big.net,node[1-2]", "big.net"),
        ("node[001-003,7],big", "node001"),
        ("node[7,1-3]", "node7"),
        ("node[5]", "node5"),
        ("rack[1-2]-node[08-10].net,big", "rack1-node08.net"),
    ],
)
def test_the_first_node_of_a_list_is_read(nodes, first):
    plan = resolve(environ={**STEP, "SLURM_STEP_NODELIST": nodes}).process_plan()
    assert plan.coordinator_address == f"{first}:8888"


def test_jobs_take_the_tasks_with_the_chief_and_the_workers_first():
    jobs = {"evaluator": 1, "worker": 2, "chief": 1}

    def find_task(rank):
        resolver = resolve(jobs, environ={**STEP, "SLURM_PROCID": rank})
        return resolver, (resolver.task_type, resolver.task_id)

    evaluator, task = find_task("3")
    assert task == ("evaluator", 0)
    assert not evaluator.process_plan().is_training
    assert not evaluator.process_plan().is_distributed
    worker, task = find_task("2")
    assert task == ("worker", 1)
    plan = worker.process_plan()
    assert (plan.process_id, plan.num_processes) == (2, 3)
    assert worker.cluster_spec() == ClusterSpec({"chief": ["node001:8888"]})
    chief, task = find_task("0")
    assert task == ("chief", 0)
    assert chief.process_plan().is_chief


def test_the_step_comes_before_the_job():
    job = {
        "SLURM_JOB_NODELIST": "a,b,c",
        "SLURM_NODELIST": "a,b,c",
        "SLURM_NTASKS": "3",
        "SLURM_PROCID": "0",
        "SLURM_JOB_ID": "1",
    }
    assert resolve(environ={**job, **STEP}).process_plan() == resolve().process_plan()
    plan = resolve(environ=job).process_plan()
    assert (plan.coordinator_address, plan.num_processes) == ("a:8888", 3)


def test_the_port_is_made_from_the_job_and_the_step():
    def find_port(**changes):
        resolver = resolve(port_base=None, environ={**STEP, **changes})
        address = resolver.process_plan().coordinator_address
        return int(address.partition(":")[2])

    port = find_port()
    assert port == find_port(SLURM_PROCID="0")
    assert port != find_port(SLURM_JOB_ID="123457")
    assert port != find_port(SLURM_STEP_ID="1")
    assert find_port(SLURM_STEP_ID="") == port
    ports = {find_port(SLURM_JOB_ID=str(job_id)) for job_id in range(5000)}
    assert min(ports) >= 61_440
    assert max(ports) <= 65_535


def test_gpus_are_shared_out_by_the_number_on_the_node():
    assert resolve().process_plan().local_device_ids is None
    assert resolve(gpus_per_task=1).process_plan().local_device_ids == (1,)
    assert resolve(gpus_per_task=2).process_plan().local_device_ids == (2, 3)


def test_slurm_is_there_only_in_a_step():
    assert SlurmClusterResolver.is_present(STEP)
    batch = {**STEP, "SLURM_STEP_NODELIST": ""}
    assert not SlurmClusterResolver.is_present(batch)
    assert not SlurmClusterResolver.is_present({**STEP, "TORCHELASTIC_RUN_ID": "x"})


SRUN = r"`%s` is not set\. Start the program with `srun`"
NODES = r"`SLURM_STEP_NODELIST` cannot be used to reach process 0\. .*Start the"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_STEP_NODELIST": ""}, r"NODELIST` and .* are not set\. Start"),
        ({"SLURM_STEP_NUM_TASKS": ""}, r"`SLURM_NTASKS` are not set\. Start the pro"),
        *[
            ({name: ""}, SRUN % name)
            for name in ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_LOCALID")
        ],
        *[
            ({"SLURM_STEP_NODELIST": nodes}, NODES)
            for nodes in ("node[", "a b", ",a", "node[x-y]", "http://a")
        ],
        (
            {"SLURM_PROCID": "4"},
            r"`SLURM_PROCID` is 4, but it must be below 4, the value of `SLURM_STEP_N",
        ),
    ],
)
def test_variables_that_describe_no_task_are_errors(changes, message):
    with pytest.raises(ClusterError, match=message):
        resolve(port_base=None, gpus_per_task=1, environ={**STEP, **changes})


NO_PORT = r"`port_base` is .*(positive|ports go up to)"
NO_COUNT = r'`jobs\["worker"\]` is .*positive integer'


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"jobs": {"worker": 3}},
            ClusterError,
            r"`jobs` is \{'worker': 3\}, which is 3 tasks, but Slurm started 4\. Cha",
        ),
        ({"jobs": {"chief": 2, "worker": 2}}, ClusterError, "`jobs` has 2 'chief' tas"),
        ({"jobs": {"evaluator": 2, "worker": 2}}, ClusterError, "has 2 'evaluator' t"),
        ({"jobs": {"master": 4}}, ValueError, "`jobs` is 'master', but it must be one"),
        *[({"jobs": {"worker": n}}, ValueError, NO_COUNT) for n in (0, 4.0, "4")],
        *[({"port_base": n}, ValueError, NO_PORT) for n in (0, -1, "8888", 65_536)],
        (
            {"gpus_per_task": 0},
            ValueError,
            "`gpus_per_task` is 0, but it must be a po",
        ),
    ],
)
def test_wrong_arguments_are_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        resolve(**arguments)
