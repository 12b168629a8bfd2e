"""The page of TensorFlow's names leaves none out, and each name on the right exists."""

import importlib
import inspect
import re

import pytest

from armillary.advice._foreign_names import NAMES
from tests.meta.test_site import load

names = load("tensorflow_names")
PAGE = names.PAGE.read_text()
LIBRARIES = {"nnx": "flax.nnx"}
ROOTS = r"armillary|jax|keras|nnx|optax"

# `dir(...)` of Orbit 2.20 and TensorFlow 2.20; packages have sections of their own.
PUBLIC = {
    "orbit": """AbstractEvaluator AbstractTrainer Action Controller StandardEvaluator
        StandardEvaluatorOptions StandardTrainer StandardTrainerOptions""",
    "orbit.actions": """ConditionalAction ExportFileManager ExportSavedModel
        JSONPersistedValue NewBestMetric SaveCheckpointIfPreempted""",
    "orbit.utils": """EpochHelper LoopFnWithSummaries OptionalSummariesFunction
        SummaryManager SummaryManagerInterface create_global_step create_loop_fn
        create_tf_while_loop_fn get_value make_distributed_dataset""",
    "tf.distribute": """CrossDeviceOps DistributedDataset DistributedIterator
        DistributedValues HierarchicalCopyAllReduce InputContext InputOptions
        InputReplicationMode MirroredStrategy MultiWorkerMirroredStrategy NcclAllReduce
        OneDeviceStrategy ParameterServerStrategy ReduceOp ReductionToOneDevice
        ReplicaContext RunOptions Server Strategy StrategyExtended TPUStrategy
        experimental_set_strategy get_replica_context get_strategy has_strategy
        in_cross_replica_context""",
    "tf.distribute.Strategy": """cluster_resolver colocate_vars_with configure
        distribute_datasets_from_function experimental_distribute_dataset
        experimental_distribute_datasets_from_function
        experimental_distribute_values_from_function experimental_local_results
        experimental_run extended gather group make_dataset_iterator
        make_input_fn_iterator num_replicas_in_sync reduce run scope unwrap
        update_config_proto""",
    "tf.distribute.ReplicaContext": """all_gather all_reduce devices merge_call
        num_replicas_in_sync replica_id_in_sync_group strategy""",
    "tf.distribute.experimental": """CentralStorageStrategy CollectiveCommunication
        CollectiveHints CommunicationImplementation CommunicationOptions
        MultiWorkerMirroredStrategy ParameterServerStrategy PreemptionCheckpointHandler
        PreemptionWatcher TPUStrategy TerminationConfig ValueContext coordinator
        partitioners rpc""",
    "tf.distribute.cluster_resolver": """ClusterResolver GCEClusterResolver
        KubernetesClusterResolver KubernetesExecutableLocation SimpleClusterResolver
        SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver
        UnionResolver""",
    "tf.distribute.coordinator": """ClusterCoordinator PerWorkerValue RemoteValue
        experimental_get_current_worker_index""",
}


def test_the_page_is_up_to_date():
    page = names.make_page()
    assert page == PAGE, "Run `python docs/site/tensorflow_names.py`."


def test_the_page_has_the_answer_of_each_error():
    _, *rows = find_rows(PAGE.partition("\n## Names that errors answer\n")[2])
    assert {name.strip("`"): answer for name, answer in rows} == NAMES


def read_section(title: str) -> str:
    """Returns what is below the heading of a module, up to the next heading."""
    return PAGE.partition(f"\n## `{title}`\n")[2].partition("\n#")[0]


def find_rows(section: str) -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in section.splitlines()]
    return [
        row for row in rows if len(row) > 1 and not row[0].startswith(("-", "there"))
    ]


def exists(name: str) -> bool:
    """Returns whether a dotted name means something, at its end also a parameter."""
    root, *parts = name.split(".")
    value = importlib.import_module(LIBRARIES.get(root, root))
    for part in parts:
        if not hasattr(value, part):
            return callable(value) and part in inspect.signature(value).parameters
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("title", PUBLIC)
def test_no_public_name_is_missing(title):
    rows = find_rows(read_section(title))
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(PUBLIC[title].split())


@pytest.mark.slow
def test_names_on_the_right_exist():
    cells = " ".join(cell for row in find_rows(PAGE) for cell in row[1:])
    shown = re.findall(rf"`((?:{ROOTS})(?:\.\w+)*)[`(]", cells)
    assert len(shown) > 90
    assert [name for name in shown if not exists(name)] == []
