"""Names of TensorFlow, Orbit, Keras and Lightning, and the line to write instead.

A package or an object without one of these names still raises `AttributeError`, so
`hasattr` and `getattr` with a default work as usual. The message ends with the answer.
"""

import dis
import inspect
import sys
from typing import Any, NoReturn

_JOINS = (
    "Leave it out, because a strategy joins the other processes when it is made: write "
    "`armillary.MultiWorkerMirroredStrategy()` or `armillary.TPUStrategy()`."
)
_COMMUNICATION = (
    "Write `communication_options=armillary.cluster.CommunicationOptions("
    'implementation="NCCL")`.'
)
_KERAS = (
    'Keras 3 runs on JAX: write `os.environ["KERAS_BACKEND"] = "jax"`, then `import '
    "keras`, and use `keras.{}`."
)
_DEVICES = "Write `jax.devices()`, or `jax.devices('cpu')` for one kind of device."
_EAGERLY = (
    "Write `armillary.StandardTrainerOptions(compile_step=False)`, or "
    "`with jax.disable_jit():` around your own loop."
)
_PREEMPTION = (
    "Write `armillary.actions.SaveCheckpointIfPreempted(checkpoint_manager, ...)`."
)
_LOOP = (
    "An `armillary.StandardTrainer` compiles its loops. For your own loop, "
    "override `armillary.AbstractTrainer.train`."
)
_RESOLVE = "Write `armillary.cluster.resolve_cluster()`."
_DESCRIBE = (
    "Describe the machines yourself: write "
    "`armillary.cluster.SimpleClusterResolver(...)`, or set `TF_CONFIG`."
)
_STEP_SUMMARY = (
    "Return the value from `train_loop_end`, as in "
    '`return {"loss": self.loss.compute()}`: a `Controller` writes it to its '
    "`summary_dir`."
)
_RECORDS = (
    "Write `armillary.data.from_tfrecords(paths, features, ...)`, with "
    "`armillary.data.FixedLenFeature(shape, dtype)`."
)
_VARIABLE = "Write `variable[...] {} x` for a variable of Flax."
_PLACED = "Leave it out: JAX and the strategy place operations and variables."
_LOGICAL = (
    "Write `jax.lax.with_sharding_constraint(x, ...)` under an "
    "`armillary.ShardedStrategy`."
)
_FIT = (
    "Write `armillary.Controller(trainer=trainer, global_step=..., steps_per_loop=...)"
    ".train(steps)`."
)
_LOG = (
    "Hold a metric (`self.loss = nnx.metrics.Average()`), update it in the step "
    "(`self.loss.update(values=loss)`), and return it from `{}`: "
    '`return {{"loss": self.loss.compute()}}`.'
)
_ACTIONS = (
    "The callbacks of a `Controller` are in `armillary.actions`, such as "
    "`armillary.actions.EarlyStopping(...)`."
)
_MADE = (
    "Write it as an argument of the function that makes the dataset: "
    "`armillary.data.from_arrays(arrays, batch_size=...{})`."
)
_OPTION = "Write `armillary.InputOptions(prefetch=..., place_on_device=...)`."

# A plain name is answered by every package. `owner.name` is answered by objects of that
# class, or by the package with that last name.
NAMES = {
    # tf.config, tf.tpu and the clusters
    "experimental_connect_to_cluster": _JOINS,
    "experimental_connect_to_host": _JOINS,
    "initialize_tpu_system": _JOINS,
    "tpu": _JOINS,
    "CollectiveCommunication": (
        "Write `armillary.cluster.CommunicationImplementation`, and give it as "
        "`communication_options=armillary.cluster.CommunicationOptions("
        "implementation=...)`."
    ),
    "CollectiveHints": _COMMUNICATION,
    "PreemptionCheckpointHandler": _PREEMPTION,
    "PreemptionWatcher": (
        "Write `armillary.cluster.TerminationConfig(watcher=...)`; SIGTERM is watched "
        "anyway."
    ),
    "rpc": (
        "To run functions on workers, write `armillary.distribute.coordinator."
        "ClusterCoordinator(strategy).schedule(fn)`."
    ),
    "UnionResolver": _RESOLVE,
    "GCEClusterResolver": _DESCRIBE,
    "KubernetesExecutableLocation": (
        "Leave it out: `armillary.cluster.KubernetesClusterResolver()` reads the "
        "variables of the job."
    ),
    "PerWorkerValue": "Write `armillary.distribute.coordinator.PerWorkerDataset`.",
    "experimental_get_current_worker_index": (
        "In the function of a dataset, use `input_context.input_pipeline_id`."
    ),
    # tf.distribute
    "Server": "Write `armillary.distribute.coordinator.Server(resolver).join()`.",
    "DistributedValues": "Write `armillary.distribute.PerReplica`.",
    "ReplicaContextBase": "Write `armillary.distribute.ReplicaContext`.",
    "RunOptions": (
        "Write `armillary.StandardTrainerOptions(compiler_options={...})` for options "
        "of XLA."
    ),
    "InputReplicationMode": (
        "Leave it out: `strategy.distribute_datasets_from_function(fn)` calls the "
        "function once in each process."
    ),
    "experimental_set_strategy": "Write `armillary.set_strategy(strategy)`.",
    "make_numpy_dataset": (
        "Write `strategy.make_numpy_dataset(arrays, batch_size=...)`, or "
        "`armillary.data.from_arrays(arrays, batch_size=...)`."
    ),
    "Strategy.group": "Leave it out: `strategy.run(fn)` runs `fn` at the call.",
    "Strategy.colocate_vars_with": _PLACED,
    "Strategy.configure": _PLACED,
    "Strategy.update_config_proto": _PLACED,
    "Strategy.experimental_assign_to_logical_device": _LOGICAL,
    "Strategy.experimental_replicate_to_logical_devices": _LOGICAL,
    "Strategy.experimental_split_to_logical_devices": _LOGICAL,
    "Strategy.devices": "Write `strategy.mesh.devices.flat`.",
    "ReplicaContext.devices": "Outside the step, write `strategy.mesh.devices.flat`.",
    "DistributedDataset.reduce": (
        "Add up in a loop: `for batch in dataset: strategy.run(step, args=(batch,))`."
    ),
    "DistributedDataset.map": (
        "Map before the data is distributed, in the source that is given to "
        "`strategy.distribute_dataset(source)`."
    ),
    "DistributedDataset.batch": (
        "Batch before the data is distributed: "
        "`armillary.data.from_arrays(arrays, batch_size=...)`."
    ),
    "DistributedDataset.get_next": "Write `next(iter(dataset))`.",
    "DistributedDataset.repeat": (
        "Repeat before the data is distributed: "
        "`armillary.data.from_arrays(arrays, batch_size=..., repeat=True)`."
    ),
    "DistributedDataset.shuffle": (
        "Shuffle before the data is distributed: "
        "`armillary.data.from_arrays(arrays, batch_size=..., shuffle_seed=0)`."
    ),
    "IndexedDataset.batch": _MADE.format(""),
    "IndexedDataset.map": (
        "Change the arrays before they become a dataset, or each batch in the step. "
        "To read one example at a time, write "
        "`armillary.data.from_random_access(source, batch_size=...)`."
    ),
    "IndexedDataset.prefetch": (
        "Leave it out, because batches are read ahead. To change their number, write "
        "`strategy.distribute_dataset(source, armillary.InputOptions(prefetch=...))`."
    ),
    "IndexedDataset.repeat": _MADE.format(", repeat=True"),
    "IndexedDataset.shuffle": _MADE.format(", shuffle_seed=0"),
    "IndexedDataset.take": (
        "Make the dataset of fewer examples, or limit the steps: "
        "`controller.evaluate(steps=10)`."
    ),
    # orbit.utils and orbit.actions
    "get_value": "Write `np.asarray(x)`, or `float(x)` for a number.",
    "create_loop_fn": _LOOP,
    "create_tf_while_loop_fn": _LOOP,
    "LoopFnWithSummaries": _STEP_SUMMARY,
    "OptionalSummariesFunction": _STEP_SUMMARY,
    "SummaryManagerInterface": (
        "Any object with the methods of `armillary.summary.SummaryManager` can be a "
        "`summary_manager`."
    ),
    "NoopSummaryManager": "Write `armillary.summary.SummaryManager(None)`.",
    "JSONPersistedValue": (
        "Write `armillary.actions.NewBestMetric(..., directory=...)`, which keeps its "
        "value in a file."
    ),
    "ExportSavedModel": "Write `armillary.actions.ExportModel(model, ..., args=...)`.",
    # tf
    "Variable": "Write `nnx.Variable(jnp.asarray(x))`, with `from flax import nnx`.",
    "GradientTape": "Write `armillary.value_and_grad(loss_fn, variables)`.",
    "Module": "Write `nnx.Module`, with `from flax import nnx`.",
    "nn": (
        "Write `armillary.compute_average_loss(losses)` or "
        "`armillary.scale_regularization_loss(loss)`; take layers from `flax.nnx`."
    ),
    "train": (
        "Write `armillary.Checkpoint(...)`, `armillary.CheckpointManager(...)` or "
        "`armillary.checkpoint.latest_checkpoint(directory)`."
    ),
    "config": _DEVICES,
    "list_physical_devices": _DEVICES,
    "list_logical_devices": _DEVICES,
    "set_logical_device_configuration": (
        'Write `jax.config.update("jax_num_cpu_devices", 4)` before JAX is used.'
    ),
    "experimental_functions_run_eagerly": _EAGERLY,
    "experimental_run_functions_eagerly": _EAGERLY,
    "run_functions_eagerly": _EAGERLY,
    "debugging": (
        'Write `armillary.StandardTrainerOptions(on_non_finite="raise")`, or '
        '`jax.config.update("jax_debug_nans", True)`.'
    ),
    "io": _RECORDS,
    "parse_single_example": _RECORDS,
    "constant": "Write `jnp.asarray(x)`.",
    "cast": "Write `x.astype(dtype)`.",
    "reduce_sum": "Write `jnp.sum(x)`.",
    "reduce_mean": "Write `jnp.mean(x)`.",
    "random": "Write `nnx.Rngs(0)`, which gives each replica a stream of its own.",
    "saved_model": "Write `armillary.actions.ExportModel(model, ..., args=...)`.",
    "data.Dataset": "Write `armillary.data.from_arrays(arrays, batch_size=...)`.",
    "data.from_tensor_slices": (
        "Write `armillary.data.from_arrays(arrays, batch_size=...)`."
    ),
    "data.Options": _OPTION,
    "data.AUTOTUNE": _OPTION,
    "data.experimental": _OPTION,
    "summary.scalar": _STEP_SUMMARY,
    "summary.histogram": _STEP_SUMMARY
    + " Wrap it in `armillary.summary.Histogram(...)`.",
    "summary.image": _STEP_SUMMARY + " Wrap it in `armillary.summary.Image(...)`.",
    "summary.text": _STEP_SUMMARY + " Wrap it in `armillary.summary.Text(...)`.",
    "summary.create_file_writer": (
        "Write `armillary.Controller(..., summary_dir=...)`, or "
        "`armillary.summary.SummaryManager(directory)` in your own loop."
    ),
    "summary.trace_on": "Write `armillary.actions.Profile(...)`.",
    "metrics.Mean": (
        'Write `nnx.metrics.Average("loss")`, or `keras.metrics.Mean("loss")`.'
    ),
    "metrics.SparseCategoricalAccuracy": (
        "Write `nnx.metrics.Accuracy()`, or "
        "`keras.metrics.SparseCategoricalAccuracy()`."
    ),
    # tf.keras and tf.estimator
    "Sequential": _KERAS.format("Sequential"),
    "Model": _KERAS.format("Model"),
    "Input": _KERAS.format("Input"),
    "layers": _KERAS.format("layers"),
    "losses": _KERAS.format("losses"),
    "optimizers": _KERAS.format("optimizers"),
    "callbacks": _ACTIONS + " " + _KERAS.format("callbacks"),
    "datasets": _KERAS.format("datasets"),
    "keras.metrics": _KERAS.format("metrics"),
    "keras.utils": (
        _KERAS.format("utils")
        + " For a table of layers, write `armillary.summarize(model)`."
    ),
    "keras.estimator": (
        "Write `armillary.keras.KerasTrainer(model, dataset)` with a `Controller`, or "
        "`model.fit(dataset)`."
    ),
    "feature_column": (
        "Columns are in `armillary.estimator`: write "
        '`armillary.estimator.numeric_column("feats")`.'
    ),
    "model_to_estimator": (
        "Train the compiled model: write `model.fit(...)` for a model made under "
        "`strategy.scope()`, or `armillary.keras.KerasTrainer(model, dataset)` with a "
        "`Controller`."
    ),
    # Lightning
    "LightningModule": (
        "Derive from `armillary.StandardTrainer`, and for validation from "
        "`armillary.StandardEvaluator`. `armillary.Controller(...)` runs them."
    ),
    "Trainer": (
        "Write `armillary.Controller(trainer=trainer, ...)`, with a trainer derived "
        "from `armillary.StandardTrainer`."
    ),
    "LightningDataModule": (
        "Write `armillary.data.from_arrays(arrays, batch_size=...)`, once for the "
        "trainer and once for the evaluator."
    ),
    "ModelCheckpoint": (
        "Write `armillary.CheckpointManager(checkpoint, directory, keep_best=..., "
        "higher_is_better=...)`."
    ),
    "Callback": _ACTIONS,
    "seed_everything": (
        "Write `nnx.Rngs(0)` for the model, and `shuffle_seed=0` for the data."
    ),
    "CheckpointManager.best_model_path": "Write `manager.best_checkpoint`.",
    "CheckpointManager.last_model_path": "Write `manager.latest_checkpoint`.",
    # Methods of objects, also of other libraries
    "Controller.fit": (
        "Write `controller.train(steps)`, or `controller.train(epochs=2)`."
    ),
    "Controller.validate": "Write `controller.evaluate()`.",
    "Controller.test": "Write `controller.evaluate()`.",
    "Controller.predict": "Write `armillary.predict(model, dataset)`.",
    "AbstractTrainer.fit": _FIT,
    "AbstractTrainer.compile": (
        "Leave it out: a trainer has its optimizer as an attribute, and compiles its "
        "step. For Keras' `compile`, write `armillary.keras.KerasTrainer(model, data)`."
    ),
    "AbstractTrainer.validate": "Write `controller.evaluate()`, with an `evaluator`.",
    "AbstractTrainer.log": _LOG.format("train_loop_end"),
    "AbstractTrainer.log_dict": _LOG.format("train_loop_end"),
    "AbstractEvaluator.log": _LOG.format("eval_end"),
    "AbstractEvaluator.log_dict": _LOG.format("eval_end"),
    "AbstractTrainer.manual_backward": (
        "Write `loss, gradients = armillary.value_and_grad(loss_fn, self.model)`."
    ),
    "AbstractTrainer.global_step": (
        "The optimizer counts the steps: write `trainer.optimizer.step` for an "
        "optimizer of Flax, and `trainer.optimizer.iterations` for one of Keras."
    ),
    "KerasTrainer.global_step": "Write `model.optimizer.iterations`.",
    "AbstractTrainer.predict": "Write `armillary.predict(model, dataset)`.",
    "Checkpoint.save_counter": "Write `optimizer.step`, or a global step of your own.",
    "CheckpointManager.checkpoint_prefix": "Write `manager.directory`.",
    "CheckpointManager.latest": "Write `manager.latest_checkpoint`.",
    "Metric.reset_states": (
        "Write `metric.reset()` for a metric of Flax, and `metric.reset_state()` for "
        "a metric of Keras."
    ),
    "Metric.reset_state": "Write `metric.reset()` for a metric of Flax.",
    "Metric.result": "Write `metric.compute()` for a metric of Flax.",
    "Metric.update_state": "Write `metric.update(...)` for a metric of Flax.",
    "Metric.name": 'Write a name of your own: `{"loss": metric.compute()}`.',
    "Metric.reset": "Write `metric.reset_state()` for a metric of Keras.",
    "Metric.compute": "Write `metric.result()` for a metric of Keras.",
    "Optimizer.step": "Write `optimizer.iterations` for an optimizer of Keras.",
    "Optimizer.learning_rate": (
        "Write `optax.inject_hyperparams(optax.adam)(learning_rate=...)`. Its rate is "
        "an array: `optimizer.opt_state.hyperparams['learning_rate']`."
    ),
    "Optimizer.learning_rate(step)": (
        "Write `optimizer.learning_rate`, which in Keras 3 is the value of the "
        "schedule at the current step."
    ),
    "Optimizer.iterations": "Write `optimizer.step` for an optimizer of Flax.",
    "Optimizer.apply_gradients": (
        "Write `optimizer.update(model, gradients)` for an optimizer of Flax, after "
        '`gradients = armillary.all_reduce("mean", gradients)`.'
    ),
    "Optimizer.minimize": (
        "Write `loss, gradients = armillary.value_and_grad(loss_fn, variables)`, then "
        '`gradients = armillary.all_reduce("mean", gradients)`, then '
        "`optimizer.update(model, gradients)` of Flax or "
        "`optimizer.apply_gradients(zip(gradients, variables))` of Keras."
    ),
    "Optimizer.zero_grad": "Leave it out: `armillary.value_and_grad` starts at zero.",
    # A variable of Flax looks up unknown names in its array.
    "Array.assign": _VARIABLE.format("="),
    "Array.assign_add": _VARIABLE.format("+="),
    "Array.assign_sub": _VARIABLE.format("-="),
    "Array.backward": (
        "Write `loss, gradients = armillary.value_and_grad(loss_fn, variables)`: JAX "
        "differentiates functions."
    ),
    "Array.detach": "Write `jax.lax.stop_gradient(x)`.",
    "Array.numpy": "Write `np.asarray(x)`, or `float(x)` for a number.",
    "Tracer.numpy": (
        "In a compiled step, an array has no value for Python. To print it, write "
        '`jax.debug.print("{}", x)`. To read it, return it from `train_loop_end`.'
    ),
    "StepIterator.get_next_as_optional": (
        "Write `next(iterator)`: a trainer ends its loop where the data ends."
    ),
}

# Public names that readers look for in another package.
_PLACES = {
    "armillary": """Checkpoint CheckpointManager Controller InputContext InputOptions
        function predict""",
    "armillary.actions": """ConditionalAction EarlyStopping ExportFileManager
        ExportModel NewBestMetric PeriodicAction Profile SaveCheckpointIfPreempted""",
    "armillary.checkpoint": "RestoreReport latest_checkpoint",
    "armillary.cluster": """ClusterResolver ClusterSpec CommunicationImplementation
        CommunicationOptions KubernetesClusterResolver SimpleClusterResolver
        SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver
        TerminationConfig""",
    "armillary.controller": "History RunOutput",
    "armillary.data": """DistributedDataset DistributedIterator FixedLenFeature
        TFRecordDataset as_source from_arrays from_tfrecords""",
    "armillary.distribute": """PerReplica ReplicaContext Strategy ValueContext
        cluster_resolver coordinator experimental is_per_replica partitioners""",
    "armillary.distribute.coordinator": """ClusterCoordinator PerWorkerDataset
        RemoteValue""",
    "armillary.estimator": """Estimator EstimatorSpec EvalSpec ModeKeys RunConfig
        TrainSpec train_and_evaluate""",
    "armillary.keras": "KerasEvaluator KerasTrainer",
    "armillary.summary": "Histogram Image SummaryManager SummaryWriter Text",
    "armillary.trainer": "EpochHelper PendingLoops",
}


def _find_homes() -> dict[str, str]:
    """Returns the package that holds each name of the table."""
    homes: dict[str, str] = {}
    for home, names in _PLACES.items():
        homes.update(dict.fromkeys(names.split(), home))
    return homes


HOMES = _find_homes()


def find_module_answer(module: str, name: str) -> str | None:
    """Returns the advice for a name that a package does not have, or `None`."""
    owner = module.rpartition(".")[2]
    answer = NAMES.get(f"{owner}.{name}") or NAMES.get(name)
    if answer is not None:
        return answer
    home = HOMES.get(name, module)
    return None if home == module else f"Write `{home}.{name}`."


def find_answer(kind: type, name: str) -> str | None:
    """Returns the advice for a name that objects of a class do not have, or `None`."""
    for base in kind.__mro__:
        owner = base.__name__.rpartition(".")[2]  # "jaxlib._jax.Array" of JAX
        answer = NAMES.get(f"{owner}.{name}")
        if answer:
            return answer
    return None


def refuse_name(module: str, name: str) -> NoReturn:
    """Raises for a name that a package does not have; its `__getattr__` calls this.

    Raises:
        AttributeError: With the answer, if there is one.
        ImportError: Instead, in `from package import name`.
    """
    answer = find_module_answer(module, name)
    problem = f"module {module!r} has no attribute {name!r}"
    if answer is None:
        raise AttributeError(problem, name=name, obj=sys.modules.get(module))
    if _is_in_import():
        raise ImportError(f"cannot import name {name!r} from {module!r}. {answer}")
    # Without an object, because Python would then add a suggestion of its own.
    raise AttributeError(f"{problem}. {answer}", name=name, obj=None)


def _is_in_import() -> bool:
    """Returns whether a name is looked up by `from package import name`.

    There, Python replaces an `AttributeError` by an `ImportError` of its own, without
    our answer.
    """
    frame: Any = inspect.currentframe()
    for _ in range(3):  # this function, `refuse_name`, and the package's `__getattr__`
        frame = frame and frame.f_back
    if frame is None or frame.f_lasti < 0:
        return False
    operation = frame.f_code.co_code[frame.f_lasti]
    return dis.opname[operation] == "IMPORT_FROM"


def answer_names(namespace: dict[str, Any]) -> None:
    """Makes a package and its classes give answers for unknown names.

    A package with its own `__getattr__` is not changed.
    """
    module = namespace["__name__"]
    namespace.setdefault("__getattr__", lambda name: refuse_name(module, name))
    owners = {name.partition(".")[0] for name in NAMES if "." in name}
    for name in namespace["__all__"]:
        kind = namespace.get(name)
        if not isinstance(kind, type) or name not in owners:
            continue
        is_ours = kind.__module__.startswith("armillary.")
        if is_ours and "__getattr__" not in vars(kind):
            answer_attributes(kind)


def answer_attributes(kind: type) -> None:
    """Makes objects of a class give answers for unknown names."""

    def find_attribute(self: Any, name: str) -> Any:
        try:
            # Python's own error, or an error inside a property.
            return object.__getattribute__(self, name)
        except AttributeError as error:
            inherited = getattr(super(kind, self), "__getattr__", None)
            if inherited is not None:
                return inherited(name)
            answer = find_answer(type(self), name)
            if answer is None or error.name != name:
                raise
            problem = f"{error}. {answer}"
            raise AttributeError(problem, name=name, obj=None) from None

    find_attribute.__name__ = "__getattr__"
    setattr(kind, "__getattr__", find_attribute)  # noqa: B010
