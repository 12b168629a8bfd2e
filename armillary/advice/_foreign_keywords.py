"""Keywords of Orbit, tf.distribute and other libraries, and the advice for each."""

_PROCESSES = "Leave it out: the strategy has joined the processes."
_TRAINER_ONLY = "Leave it out: an evaluation changes nothing that lasts."
_OF_THE_TRAINER = "The trainer takes it: `trainer=Trainer({})`."
_OF_METHODS = "Methods take it: `{}`."
_OF_THE_STRATEGY = "A strategy has the devices: `strategy=armillary.{}`."
_RESTORES = "Leave it out: the `checkpoint_manager` restores the latest checkpoint."
_CLIPS = "Optax clips gradients: `optax.chain(optax.clip_by_global_norm(1.0), ...)`."
_OF_THE_MANAGER = "`CheckpointManager` takes it: `{}`."
_HAS_A_MANAGER = (
    "Write `checkpoint_manager=armillary.CheckpointManager(checkpoint, directory)`."
)
_OF_THE_CONTROLLER = "`Controller` takes it: `{}`."
_OF_THE_DATA = "The data has it: `armillary.data.from_arrays(arrays, {})`."
_IN_EPOCHS = "It is called `epochs` here."
_OF_THE_EVALUATOR = "The evaluator takes it: `evaluator=Evaluator(eval_dataset)`."
_WEIGHTS = (
    "Weight the losses in `train_step`: `armillary.weighted_mean(losses, weights)`."
)
_NEWEST_STAY = "Leave it out: the newest `max_to_keep` checkpoints stay."
_BEST_STAYS = "Leave it out: `keep_best` keeps the best besides the newest."
_IN_STEPS = "It is called `checkpoint_interval` here, and counts steps."
_MAX_TO_KEEP = "It is called `max_to_keep` here."
_BEST_METRIC = "It is called `keep_best` here."
_BEST_DIRECTION = "It is called `higher_is_better` here, and is `True` or `False`."
_RESTORES_BEST = (
    "Leave it out, and call `checkpoint_manager.restore_best()` after training."
)
_ACCUMULATES = "Write `StandardTrainerOptions(accumulate_steps=...)` for the trainer."
_PRECISION = 'The trainer takes it: `StandardTrainerOptions(precision="bf16")`.'
_KEEPS_BEST = (
    "`CheckpointManager` takes it: `keep_best=..., higher_is_better=...`. To stop "
    "early, write `eval_actions=[armillary.actions.EarlyStopping(...)]`."
)

# Keywords of Orbit, `tf.distribute`, Keras, Lightning, Transformers and Orbax, and the
# advice for each. If the advice depends on the class or function, its name is in front.
ANSWERS = {
    "use_tf_function": "It is called `compile_step` here.",
    "use_tf_while_loop": "It is called `compile_loop` here.",
    "use_tpu_summary_optimization": "Leave it out: summaries come between loops.",
    "StandardEvaluatorOptions.on_non_finite": _TRAINER_ONLY,
    "StandardEvaluatorOptions.check_replicas_every": _TRAINER_ONLY,
    "Controller.eval_steps": _OF_METHODS.format("train_and_evaluate(eval_steps=...)"),
    "Controller.eval_interval": _OF_METHODS.format(
        "train_and_evaluate(eval_interval=...)"
    ),
    "Controller.train_steps": _OF_METHODS.format("train_and_evaluate(train_steps=...)"),
    "Controller.steps": _OF_METHODS.format("train(steps=...)"),
    "Controller.max_steps": _OF_METHODS.format("train(steps=...)"),
    "Controller.num_steps": _OF_METHODS.format("train(steps=...)"),
    "Controller.epochs": _OF_METHODS.format("train(epochs=...)"),
    "max_epochs": _OF_METHODS.format("train(epochs=...)"),
    "Controller.train.max_epochs": _IN_EPOCHS,
    "Controller.train.num_train_epochs": _IN_EPOCHS,
    "Controller.train.max_steps": "It is called `steps` here.",
    "Controller.train.train_steps": "It is called `steps` here.",
    "Controller.train_and_evaluate.max_epochs": _IN_EPOCHS,
    "Controller.train_and_evaluate.num_train_epochs": _IN_EPOCHS,
    "Controller.train_and_evaluate.train_epochs": _IN_EPOCHS,
    "Controller.train_and_evaluate.max_steps": "It is called `train_steps` here.",
    "Controller.train_and_evaluate.limit_val_batches": (
        "It is called `eval_steps` here."
    ),
    "Controller.train_dataset": _OF_THE_TRAINER.format("train_dataset"),
    "Controller.train_data": _OF_THE_TRAINER.format("train_dataset"),
    "Controller.batch_size": _OF_THE_DATA.format("batch_size=..."),
    "Controller.shuffle": _OF_THE_DATA.format("batch_size=..., shuffle_seed=0"),
    "Controller.seed": (
        "Seeds are where numbers are drawn: `nnx.Rngs(0)` for the model, and "
        "`shuffle_seed=0` for the data."
    ),
    "Controller.eval_dataset": _OF_THE_EVALUATOR,
    "Controller.train_dataloaders": _OF_THE_TRAINER.format("train_dataset"),
    "Controller.val_dataloaders": _OF_THE_EVALUATOR,
    "Controller.datamodule": (
        "The trainer and the evaluator take their data: "
        "`trainer=Trainer(train_dataset)`, `evaluator=Evaluator(eval_dataset)`."
    ),
    "Controller.overfit_batches": (
        "Give the trainer few examples: "
        "`armillary.data.from_arrays(few, batch_size=..., repeat=True)`."
    ),
    "Controller.detect_anomaly": (
        'The trainer takes it: `StandardTrainerOptions(on_non_finite="raise")`.'
    ),
    "Controller.check_val_every_n_epoch": (
        "Leave it out: `train_and_evaluate(epochs=...)` evaluates after each epoch."
    ),
    "drop_last": "It is called `drop_remainder` here.",
    "num_workers": "It is called `num_threads` here.",
    "from_arrays.num_workers": "Leave it out: the arrays are in memory.",
    "collate_fn": (
        "Leave it out: a batch has the structure of an example, with a batch axis."
    ),
    "pin_memory": "Leave it out: a thread sends the batches ahead of the steps.",
    "Controller.validation_data": _OF_THE_EVALUATOR,
    "Controller.validation_split": (
        "Divide the arrays first, and give the evaluator its part: "
        "`evaluator=Evaluator(eval_dataset)`."
    ),
    "Controller.validation_steps": _OF_METHODS.format(
        "train_and_evaluate(eval_steps=...)"
    ),
    "Controller.limit_val_batches": _OF_METHODS.format(
        "train_and_evaluate(eval_steps=...)"
    ),
    "Controller.val_check_interval": _OF_METHODS.format(
        "train_and_evaluate(eval_interval=...)"
    ),
    "Controller.num_sanity_val_steps": (
        "Leave it out, and call `controller.evaluate(steps=...)` before training."
    ),
    "Controller.limit_train_batches": _OF_METHODS.format("train(steps=...)"),
    "Controller.fast_dev_run": _OF_METHODS.format("train(steps=...)"),
    "Controller.min_epochs": _OF_METHODS.format("train(epochs=...)"),
    "Controller.steps_per_epoch": (
        "Leave it out: the data has its length, as in `train(epochs=...)`. "
        "`steps_per_loop` is another number, of steps between two log lines."
    ),
    "Controller.max_time": (
        "Call `controller.request_stop(reason)` in one of the `train_actions`."
    ),
    "Controller.initial_epoch": _RESTORES,
    "Controller.loss": "The trainer computes it, in `train_step`.",
    "Controller.metrics": (
        "The trainer holds them: update one in `train_step`, and return "
        '`{"loss": self.loss.compute()}` from `train_loop_end`.'
    ),
    "Controller.learning_rate": "Optax has it: `optax.adam(learning_rate)`.",
    "Controller.lr": "Optax has it: `optax.adam(learning_rate)`.",
    "Controller.class_weight": _WEIGHTS,
    "Controller.sample_weight": _WEIGHTS,
    "Controller.run_eagerly": (
        "Write `armillary.StandardTrainerOptions(compile_step=False)` for the trainer."
    ),
    "Controller.profiler": "Write `train_actions=[armillary.actions.Profile(...)]`.",
    "Controller.deterministic": (
        "Leave it out. For GPUs, set `XLA_FLAGS=--xla_gpu_deterministic_ops=true`."
    ),
    "Controller.benchmark": "Leave it out: XLA chooses between operations.",
    "Controller.default_root_dir": (
        "Write `summary_dir=...`, and "
        "`armillary.CheckpointManager(checkpoint, directory)`."
    ),
    "Controller.checkpoint_dir": _HAS_A_MANAGER,
    "Controller.enable_checkpointing": _HAS_A_MANAGER,
    "Controller.save_weights_only": (
        "Name what to save: `armillary.Checkpoint(model=model)`, for the "
        "`checkpoint_manager`."
    ),
    "Controller.save_top_k": _OF_THE_MANAGER.format("max_to_keep=..., keep_best=..."),
    "Controller.save_best_only": _OF_THE_MANAGER.format("keep_best=..."),
    "Controller.every_n_train_steps": _OF_THE_MANAGER.format("checkpoint_interval=..."),
    "Controller.save_freq": _OF_THE_MANAGER.format("checkpoint_interval=..."),
    "Controller.save_steps": _OF_THE_MANAGER.format("checkpoint_interval=..."),
    "Controller.save_interval": _OF_THE_MANAGER.format("checkpoint_interval=..."),
    "Controller.checkpoint_interval": _OF_THE_MANAGER.format("checkpoint_interval=..."),
    "Controller.save_total_limit": _OF_THE_MANAGER.format("max_to_keep=..."),
    "Controller.max_to_keep": _OF_THE_MANAGER.format("max_to_keep=..."),
    "Controller.max_checkpoints": _OF_THE_MANAGER.format("max_to_keep=..."),
    "Controller.metric_for_best_model": _OF_THE_MANAGER.format(
        "keep_best=..., higher_is_better=..."
    ),
    "Controller.load_best_model_at_end": _RESTORES_BEST,
    "Controller.output_dir": _HAS_A_MANAGER,
    "Controller.num_train_epochs": _OF_METHODS.format("train(epochs=...)"),
    "Controller.per_device_train_batch_size": _OF_THE_DATA.format("batch_size=..."),
    "Controller.logging_steps": "It is called `log_interval` here.",
    "Controller.logging_dir": "It is called `summary_dir` here.",
    "Controller.mode": _OF_THE_MANAGER.format("keep_best=..., higher_is_better=..."),
    "Controller.train.batch_size": _OF_THE_DATA.format("batch_size=..."),
    "Controller.train.callbacks": _OF_THE_CONTROLLER.format(
        "train_actions=[...], eval_actions=[...]"
    ),
    "Controller.train.validation_data": _OF_THE_CONTROLLER.format(
        "evaluator=Evaluator(eval_dataset)"
    ),
    "Controller.train.verbose": _OF_THE_CONTROLLER.format("progress=..."),
    "Controller.model": "The trainer holds it: `self.model = model` in its `__init__`.",
    "Controller.optimizer": (
        "The trainer holds it. Give its count of steps: `global_step=optimizer.step`."
    ),
    "Controller.callbacks": "Write `train_actions=[...]` and `eval_actions=[...]`.",
    "KerasTrainer.callbacks": (
        "Give the `Controller` actions, such as "
        "`eval_actions=[armillary.actions.EarlyStopping(...)]`, or call "
        "`model.fit(dataset, callbacks=[...])`."
    ),
    "callbacks": (
        "The `Controller` has actions: `train_actions=[...]`, `eval_actions=[...]`."
    ),
    "epochs": "`Controller.train` takes it: `controller.train(epochs=...)`.",
    "batch_size": _OF_THE_DATA.format("batch_size=..."),
    "Controller.logger": "Write `summary_dir=...`, or a `summary_manager=...`.",
    "Controller.devices": _OF_THE_STRATEGY.format("MirroredStrategy(devices)"),
    "Controller.accelerator": _OF_THE_STRATEGY.format("MirroredStrategy()"),
    "Controller.num_nodes": _OF_THE_STRATEGY.format("MultiWorkerMirroredStrategy()"),
    "Controller.precision": _PRECISION,
    "Controller.bf16": _PRECISION,
    "Controller.verbose": "It is called `progress` here.",
    "Controller.enable_progress_bar": "It is called `progress` here.",
    "Controller.monitor": _KEEPS_BEST,
    "gradient_clip_val": _CLIPS,
    "clipnorm": _CLIPS,
    "max_grad_norm": _CLIPS,
    "accumulate_grad_batches": _ACCUMULATES,
    "Controller.gradient_accumulation_steps": _ACCUMULATES,
    "resume_from_checkpoint": _RESTORES,
    "ckpt_path": _RESTORES,
    "log_every_n_steps": "It is called `log_interval` here.",
    "CheckpointManager.monitor": _BEST_METRIC,
    "EarlyStopping.monitor": "It is called `metric` here.",
    "NewBestMetric.monitor": "It is called `metric` here.",
    "EarlyStopping.restore_best_weights": _RESTORES_BEST,
    "mode": "Say so with `higher_is_better=True`, or `False`.",
    "CheckpointManager.save_top_k": _BEST_STAYS,
    "CheckpointManager.save_best_only": _BEST_STAYS,
    "CheckpointManager.save_last": _NEWEST_STAY,
    "CheckpointManager.every_n_train_steps": _IN_STEPS,
    "CheckpointManager.every_n_epochs": _IN_STEPS,
    "CheckpointManager.period": _IN_STEPS,
    "CheckpointManager.save_freq": _IN_STEPS,
    "CheckpointManager.save_interval_steps": _IN_STEPS,
    "CheckpointManager.save_interval": _IN_STEPS,
    "CheckpointManager.save_steps": _IN_STEPS,
    "CheckpointManager.save_every": _IN_STEPS,
    "CheckpointManager.save_total_limit": _MAX_TO_KEEP,
    "CheckpointManager.max_checkpoints": _MAX_TO_KEEP,
    "CheckpointManager.keep": _MAX_TO_KEEP,
    "CheckpointManager.metric_for_best_model": _BEST_METRIC,
    "CheckpointManager.best_fn": _BEST_METRIC,
    "CheckpointManager.greater_is_better": _BEST_DIRECTION,
    "CheckpointManager.best_mode": _BEST_DIRECTION,
    "CheckpointManager.load_best_model_at_end": _RESTORES_BEST,
    "CheckpointManager.output_dir": "It is called `directory` here.",
    "CheckpointManager.dirpath": "It is called `directory` here.",
    "CheckpointManager.filepath": "It is called `directory` here.",
    "CheckpointManager.filename": (
        "Leave it out: a checkpoint is a folder named for its step."
    ),
    "CheckpointManager.save_weights_only": (
        "Name what to save: `armillary.Checkpoint(model=model)`."
    ),
    "enable_async_checkpointing": "Leave it out: every save runs in the background.",
    "hang_timeout": "It is called `hang_timeout_seconds` here.",
    "checkpoint_name": "Leave it out: a checkpoint is a folder named for its step.",
    "Checkpoint.read.rename": (
        "Name the objects as they were saved: `Checkpoint(model={'old name': part})`."
    ),
    "summary_fn": "Use `writer_fn`, which makes the writer of each directory.",
    "SummaryManager.global_step": "Leave it out: `write_summaries` takes the step.",
    "PeriodicAction.global_step": "Leave it out: a `Controller` binds its own.",
    "NewBestMetric.filename": (
        "Use `directory`, in which it makes a file named for the metric."
    ),
    "write_metric": "Leave it out: of several processes, the chief writes.",
    "signatures": "Pass one function as `model`, and examples for it as `args`.",
    "SaveCheckpointIfPreempted.cluster_resolver": _PROCESSES,
    "termination_watcher_fn": "It is called `watcher` here.",
    "experimental_fetch_to_device": "Leave it out: batches are always on the devices.",
    "experimental_per_replica_buffer_size": "It is called `prefetch` here.",
    "experimental_place_dataset_on_device": "It is called `place_on_device` here.",
    "MultiWorkerMirroredStrategy.communication": "Write `communication_options="
    "armillary.cluster.CommunicationOptions(implementation=...)`.",
    "cross_device_ops": "Leave it out, or use `armillary.MirroredStrategy`, which has "
    "it.",
    "reduce_to_device": "Leave it out, and put that device first in `devices` of the "
    "strategy.",
    "accumulation_fn": "Leave it out, and derive from "
    "`armillary.distribute.CrossDeviceOps` to combine values in another way.",
    "tpu_cluster_resolver": "It is called `resolver` here.",
    "experimental_device_assignment": "Leave it out: a replica here is one device.",
    "Strategy.run.options": (
        "Leave it out; for options of XLA, write "
        "`StandardTrainerOptions(compiler_options={...})`."
    ),
    "input_signature": "Leave it out: each shape of the arguments is a program.",
    "jit_compile": "Leave it out: XLA compiles every program.",
    "reduce_retracing": "Leave it out: each shape of the arguments is a program.",
}
