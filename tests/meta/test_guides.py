"""Every name in the five guides resolves here, or its error has the line to write.

`from_tensorflow.md`, `custom_training.md` and `from_orbit.md` of `docs/migrate/` follow
these guides: Orbit with `tf.distribute`, Orbit's tutorial of BERT, TensorFlow's guide
to distributed training, its tutorial of custom training, and the template of a
program. A name is
looked up where a reader would write it: `tf.distribute.X` is `armillary.distribute.X`,
and `tf.X` and `orbit.X` are `armillary.X`.
"""

import inspect
import operator
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary._traceback import hides_frames
from armillary.advice._foreign_keywords import ANSWERS

GUIDES = {
    "Orbit with tf.distribute": """
        orbit.AbstractEvaluator orbit.AbstractTrainer orbit.Action orbit.Controller
        orbit.StandardEvaluator orbit.StandardEvaluatorOptions orbit.StandardTrainer
        orbit.StandardTrainerOptions orbit.actions orbit.controller orbit.utils
        orbit.actions.ConditionalAction orbit.actions.ExportFileManager
        orbit.actions.ExportSavedModel orbit.actions.JSONPersistedValue
        orbit.actions.NewBestMetric orbit.actions.SaveCheckpointIfPreempted
        orbit.utils.EpochHelper orbit.utils.LoopFnWithSummaries
        orbit.utils.OptionalSummariesFunction orbit.utils.SummaryManager
        orbit.utils.SummaryManagerInterface orbit.utils.create_global_step
        orbit.utils.create_loop_fn orbit.utils.create_tf_while_loop_fn
        orbit.utils.get_value orbit.utils.make_distributed_dataset
        tf.Variable tf.VariableAggregation tf.VariableAggregation.ONLY_FIRST_REPLICA
        tf.Module tf.function tf.GradientTape tf.summary.scalar tf.data.Dataset
        tf.distribute.InputContext tf.distribute.InputOptions tf.distribute.ReduceOp
        tf.distribute.Strategy tf.distribute.get_strategy
        tf.distribute.has_strategy tf.distribute.experimental_set_strategy
        tf.keras.Sequential tf.keras.layers tf.keras.metrics.Mean
        tf.keras.optimizers tf.keras.losses
        controller.train controller.evaluate controller.train_and_evaluate
        controller.evaluate_continuously controller.save_checkpoint
        controller.restore_checkpoint controller.steps_per_loop
        trainer.train trainer.train_loop_begin trainer.train_loop_end
        trainer.train_dataset strategy.scope strategy.run strategy.reduce
        strategy.num_replicas_in_sync strategy.distribute_datasets_from_function
        """,
    "Orbit's tutorial of BERT": """
        tf.config.experimental_connect_to_cluster experimental_connect_to_cluster
        tf.config.list_physical_devices tf.config.list_logical_devices
        tf.tpu.experimental.initialize_tpu_system initialize_tpu_system
        tf.distribute.TPUStrategy tf.distribute.experimental.TPUStrategy
        tf.distribute.cluster_resolver.TPUClusterResolver
        tf.distribute.MirroredStrategy tf.distribute.OneDeviceStrategy
        tf.data.TFRecordDataset tf.data.experimental tf.data.AUTOTUNE
        tf.io.FixedLenFeature tf.io.parse_single_example tf.cast
        tf.keras.utils.plot_model tf.keras.metrics.SparseCategoricalAccuracy
        tf.train.Checkpoint tf.train.CheckpointManager
        checkpoint.read checkpoint.restore checkpoint.save checkpoint.write
        checkpoint.save_counter status.expect_partial status.assert_consumed
        status.assert_existing_objects_matched
        manager.save manager.restore_or_initialize manager.latest_checkpoint
        manager.checkpoints manager.checkpoint_interval
        optimizer.iterations optimizer.apply_gradients
        metric.reset_states metric.result metric.update_state
        """,
    "The guide to distributed training": """
        tf.distribute.CentralStorageStrategy tf.distribute.ParameterServerStrategy
        tf.distribute.MultiWorkerMirroredStrategy
        tf.distribute.experimental.CentralStorageStrategy
        tf.distribute.experimental.CollectiveCommunication
        tf.distribute.experimental.CollectiveCommunication.NCCL
        tf.distribute.experimental.CollectiveHints
        tf.distribute.experimental.CommunicationImplementation.RING
        tf.distribute.experimental.CommunicationOptions
        tf.distribute.experimental.MultiWorkerMirroredStrategy
        tf.distribute.experimental.ParameterServerStrategy
        tf.distribute.experimental.PreemptionCheckpointHandler
        tf.distribute.experimental.PreemptionWatcher
        tf.distribute.experimental.TerminationConfig
        tf.distribute.experimental.ValueContext tf.distribute.experimental.coordinator
        tf.distribute.experimental.partitioners tf.distribute.experimental.rpc
        tf.distribute.cluster_resolver.ClusterResolver
        tf.distribute.cluster_resolver.GCEClusterResolver
        tf.distribute.cluster_resolver.KubernetesClusterResolver
        tf.distribute.cluster_resolver.KubernetesExecutableLocation
        tf.distribute.cluster_resolver.SimpleClusterResolver
        tf.distribute.cluster_resolver.SlurmClusterResolver
        tf.distribute.cluster_resolver.TFConfigClusterResolver
        tf.distribute.cluster_resolver.UnionResolver
        tf.distribute.coordinator.ClusterCoordinator
        tf.distribute.coordinator.PerWorkerValue tf.distribute.coordinator.RemoteValue
        tf.distribute.coordinator.experimental_get_current_worker_index
        tf.distribute.DistributedDataset tf.distribute.DistributedIterator
        tf.distribute.DistributedValues tf.distribute.InputReplicationMode
        tf.distribute.ReplicaContext tf.distribute.RunOptions tf.distribute.Server
        tf.distribute.StrategyExtended tf.distribute.get_replica_context
        tf.distribute.in_cross_replica_context tf.distribute.make_numpy_dataset
        tf.keras.Model tf.keras.Input tf.keras.callbacks tf.keras.datasets
        tf.keras.estimator.model_to_estimator tf.estimator.model_to_estimator
        tf.distribute.CrossDeviceOps tf.distribute.HierarchicalCopyAllReduce
        tf.distribute.NcclAllReduce tf.distribute.ReductionToOneDevice
        tf.VariableSynchronization tf.VariableSynchronization.ON_READ
        tf.estimator.LinearRegressor tf.estimator.LinearClassifier
        tf.estimator.DNNRegressor tf.estimator.DNNClassifier
        tf.estimator.BaselineRegressor tf.estimator.BaselineClassifier
        tf.feature_column.numeric_column feature_column
        tf.estimator.Estimator tf.estimator.EstimatorSpec tf.estimator.EvalSpec
        tf.estimator.RunConfig tf.estimator.TrainSpec tf.estimator.train_and_evaluate
        tf.config.experimental_functions_run_eagerly tf.config.run_functions_eagerly
        tf.config.experimental_run_functions_eagerly experimental_functions_run_eagerly
        tf.config.set_logical_device_configuration
        tf.nn.compute_average_loss tf.nn.scale_regularization_loss tf.random.Generator
        strategy.experimental_distribute_dataset
        strategy.experimental_distribute_datasets_from_function
        strategy.experimental_distribute_values_from_function
        strategy.experimental_local_results strategy.experimental_make_numpy_dataset
        strategy.make_experimental_numpy_dataset strategy.make_numpy_dataset
        strategy.gather strategy.cluster_resolver strategy.extended strategy.group
        strategy.colocate_vars_with strategy.configure strategy.update_config_proto
        strategy.experimental_assign_to_logical_device
        dataset.reduce dataset.batch dataset.repeat dataset.map
        context.all_reduce context.all_gather context.devices context.merge_call
        context.replica_id_in_sync_group context.num_replicas_in_sync context.strategy
        """,
    "The tutorial of custom training": """
        strategy.make_dataset_iterator strategy.make_input_fn_iterator
        strategy.experimental_run strategy.experimental_run_v2 strategy.unwrap
        iterator.initialize iterator.get_next iterator.get_next_as_optional
        optional.has_value optional.get_value
        tf.reduce_sum tf.reduce_mean tf.constant tf.train.latest_checkpoint
        tf.saved_model.save optimizer.minimize variable.assign variable.assign_add
        value.numpy value.values value.shape
        """,
    "The template": """
        tf.data.Dataset.from_generator tf.data.Options tf.data.Dataset.from_tensors
        tf.summary.histogram tf.summary.image tf.summary.text
        tf.summary.create_file_writer tf.summary.trace_on tf.debugging
        controller.fit trainer.fit trainer.compile metric.reset_state
        """,
}
NAMES = sorted({name for names in GUIDES.values() for name in names.split()})

KEYWORDS = {
    "Controller": """global_step trainer evaluator strategy train_actions eval_actions
        steps_per_loop checkpoint_manager enable_async_checkpointing summary_interval
        summary_dir eval_summary_dir summary_manager eval_summary_manager""",
    "StandardTrainerOptions": """use_tf_function use_tf_while_loop
        use_tpu_summary_optimization""",
    "StandardEvaluatorOptions": """use_tf_function use_tf_while_loop
        recreate_iterator_for_each_eval""",
    "CheckpointManager": """checkpoint directory max_to_keep
        keep_checkpoint_every_n_hours checkpoint_name step_counter checkpoint_interval
        init_fn""",
    "MirroredStrategy": "devices cross_device_ops",
    "MultiWorkerMirroredStrategy": """cluster_resolver communication_options
        communication""",
    "TPUStrategy": "tpu_cluster_resolver experimental_device_assignment",
    "OneDeviceStrategy": "device",
    "distribute.CentralStorageStrategy": "compute_devices parameter_device",
    "InputContext": "num_input_pipelines input_pipeline_id num_replicas_in_sync",
    "InputOptions": """experimental_fetch_to_device experimental_place_dataset_on_device
        experimental_per_replica_buffer_size""",
    "actions.NewBestMetric": "metric higher_is_better filename write_metric",
    "utils.EpochHelper": "epoch_steps global_step",
    "utils.SummaryManager": "summary_dir summary_fn global_step",
    "compute_average_loss": "per_example_loss sample_weight global_batch_size",
    "utils.make_distributed_dataset": "strategy dataset_or_fn",
}


class Trainer(armillary.StandardTrainer):
    def train_step(self, iterator):
        next(iterator)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The objects of a program, under the names that the guides give them."""
    strategy = armillary.MirroredStrategy(jax.devices()[:2])
    dataset = strategy.distribute_dataset([np.ones(4, np.float32)])
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    checkpoint = armillary.Checkpoint(model=model)
    folder = tmp_path_factory.mktemp("guides")
    trainer = Trainer(dataset)
    iterator = iter(dataset)
    return SimpleNamespace(
        orbit=armillary,
        tf=armillary,
        strategy=strategy,
        dataset=dataset,
        iterator=iterator,
        optional=iterator.get_next_as_optional(),
        value=strategy.run(lambda: jnp.ones(())),
        context=armillary.get_replica_context(),
        checkpoint=checkpoint,
        status=checkpoint.restore(None),
        manager=armillary.CheckpointManager(checkpoint, folder),
        trainer=trainer,
        controller=armillary.Controller(
            trainer=trainer, global_step=lambda: 0, steps_per_loop=1
        ),
        optimizer=nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param),
        metric=nnx.metrics.Average("loss"),
        variable=model.bias,
    )


def find_answer(error: AttributeError) -> str:
    """Returns what an error says when it leaves the library, with its notes."""

    @hides_frames
    def leave():
        raise error

    with pytest.raises(AttributeError) as caught:
        leave()
    return " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_guides_resolves_or_has_the_line_to_write(name, here):
    root, _, rest = name.partition(".")
    value = getattr(here, root) if rest else armillary
    try:
        operator.attrgetter(rest or name)(value)
    except AttributeError as error:
        answer = find_answer(error).partition("has no attribute")[2]
        answer = answer or str(error)
        line = r"`[^`]*[\w\]]\(.*`|`[\w.]+\.[\w.]+`|`variable\[...\]|Leave it out"
        assert re.search(line, answer), str(error)


CALLS = [(kind, name) for kind, names in KEYWORDS.items() for name in names.split()]


@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_a_keyword_of_the_guides_is_taken_or_has_the_line_to_write(kind, name):
    function = operator.attrgetter(kind)(armillary)
    if name not in inspect.signature(function).parameters:
        owner = kind.rpartition(".")[2]
        assert f"{owner}.{name}" in ANSWERS or name in ANSWERS
