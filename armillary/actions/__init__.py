"""What a controller runs after each loop of training and after each evaluation.

An action is any function of an output. The ones here are parts to combine: a condition
and what to do when it holds. This run keeps the best model in a folder of its own, and
ends when the evaluation loss has not improved five times in a row::

    best_accuracy = armillary.actions.NewBestMetric(
        "accuracy", higher_is_better=True, directory=run_dir)
    best_models = armillary.CheckpointManager(
        armillary.Checkpoint(model=model), best_dir, step_counter=optimizer.step)
    keep_best = armillary.actions.ConditionalAction(
        condition=best_accuracy.test,
        action=[lambda output: best_models.save(), best_accuracy.commit])
    stop_early = armillary.actions.EarlyStopping(
        lambda reason: controller.request_stop(reason),
        "loss", patience=5, higher_is_better=False)

    controller = armillary.Controller(
        trainer=trainer, evaluator=evaluator, global_step=optimizer.step,
        steps_per_loop=100, eval_actions=[keep_best, stop_early],
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(
                model=model, optimizer=optimizer, stop_early=stop_early),
            run_dir, checkpoint_interval=1000))
    controller.train_and_evaluate(train_steps=100_000, eval_interval=1000)

Every process of a run calls the actions with the same output. An action of your own
that writes to a shared place must therefore write where `jax.process_index() == 0`.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.actions._conditions import ConditionalAction as ConditionalAction
from armillary.actions._conditions import EarlyStopping as EarlyStopping
from armillary.actions._conditions import NewBestMetric as NewBestMetric
from armillary.actions._conditions import PeriodicAction as PeriodicAction
from armillary.actions._files import ExportFileManager as ExportFileManager
from armillary.actions._files import ExportModel as ExportModel
from armillary.actions._files import Profile as Profile
from armillary.actions._save_if_preempted import (
    SaveCheckpointIfPreempted as SaveCheckpointIfPreempted,
)

__all__ = [
    "ConditionalAction",
    "EarlyStopping",
    "ExportFileManager",
    "ExportModel",
    "NewBestMetric",
    "PeriodicAction",
    "Profile",
    "SaveCheckpointIfPreempted",
]

_mark_public(globals())
