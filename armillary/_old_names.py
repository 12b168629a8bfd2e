"""Keywords of Orbit, `tf.distribute` and `tf.estimator`, and what to write here.

Where the name alone says too little, the class or function stands before it.
"""

_XLA = "Leave it out: there is no session here, and XLA places operations."
_NO_HOOKS = "Leave it out: there is no session here; a `Controller` has actions."
_PROCESSES = "Leave it out: the processes are those that the strategy has joined."
_ON_THE_TPU = "Leave it out: the program runs on the machines of the TPU itself."
_EXPORT = "Leave it out: export a restored module by `armillary.actions.ExportModel`."
_ONE_DEVICE = "Leave it out: a replica here is one device."
_TRAINER_ONLY = "Leave it out: an evaluation changes nothing that lasts."

ANSWERS = {
    "use_tf_function": "It is called `compile_step` here.",
    "use_tf_while_loop": "It is called `compile_loop` here.",
    "use_tpu_summary_optimization": "Leave it out: summaries come between loops.",
    "StandardEvaluatorOptions.on_non_finite": _TRAINER_ONLY,
    "StandardEvaluatorOptions.check_replicas_every": _TRAINER_ONLY,
    "Controller.eval_steps": "Methods take it: `train_and_evaluate(eval_steps=...)`.",
    "enable_async_checkpointing": "Leave it out: every save goes on in the background.",
    "hang_timeout": "It is called `hang_timeout_seconds` here.",
    "checkpoint_name": "Leave it out: a checkpoint is a folder named for its step.",
    "summary_fn": "Use `writer_fn`, which makes the writer of each directory.",
    "SummaryManager.global_step": "Leave it out: `write_summaries` takes the step.",
    "PeriodicAction.global_step": "Leave it out: a `Controller` binds its own.",
    "filename": "Use `directory`, in which it makes a file named for the metric.",
    "signatures": "Pass one function as `model`, and examples for it as `args`.",
    "checkpoint_number": "Leave it out: it is that of the manager's step counter.",
    "SaveCheckpointIfPreempted.cluster_resolver": _PROCESSES,
    "termination_watcher_fn": "It is called `watcher` here.",
    "save_fn": "Leave it out: the checkpoint manager saves.",
    "experimental_fetch_to_device": "Leave it out: batches are always on the devices.",
    "experimental_per_replica_buffer_size": "It is called `prefetch` here.",
    "experimental_place_dataset_on_device": "It is called `place_on_device` here.",
    "experimental_replication_mode": "Leave it out: a function with an `input_context` "
    "makes one data set for each process.",
    "MultiWorkerMirroredStrategy.communication": "Write `communication_options="
    "armillary.cluster.CommunicationOptions(implementation=...)`.",
    "cross_device_ops": "Leave it out: XLA chooses how values are reduced.",
    "tpu_cluster_resolver": "It is called `resolver` here.",
    "device_assignment": _ONE_DEVICE,
    "experimental_device_assignment": _ONE_DEVICE,
    "experimental_spmd_xla_partitioning": _ONE_DEVICE,
    "TPUClusterResolver.zone": _ON_THE_TPU,
    "TPUClusterResolver.project": _ON_THE_TPU,
    "exporters": _EXPORT,
    "export_outputs": _EXPORT,
    "hooks": _NO_HOOKS,
    "saving_listeners": _NO_HOOKS,
    "training_hooks": _NO_HOOKS,
    "training_chief_hooks": _NO_HOOKS,
    "evaluation_hooks": _NO_HOOKS,
    "prediction_hooks": _NO_HOOKS,
    "predict_keys": "Take the entries that you need of each prediction.",
    "scaffold": "Leave it out: `make_fn` of `modules.make` sets a module up.",
    "warm_start_from": "`make_fn` of `modules.make` may read a checkpoint.",
    "save_checkpoints_secs": "Use `save_checkpoints_steps`.",
    "experimental_distribute": "Use `train_distribute` and `eval_distribute`.",
    "session_config": _XLA,
    "device_fn": _XLA,
    "protocol": _XLA,
    "throttle_secs": "Use `save_checkpoints_steps`: each checkpoint is evaluated.",
    "start_delay_secs": "Use `save_checkpoints_steps`: each checkpoint is evaluated.",
    "weight_column": "Use an `Estimator` whose `model_fn` weights its losses.",
    "label_vocabulary": "Return numbers of classes from `input_fn`.",
    "loss_reduction": "Leave it out: the loss is the mean over the batch.",
    "batch_norm": "Use an `Estimator` whose `model_fn` has `nnx.BatchNorm`.",
}
