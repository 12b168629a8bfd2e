"""Tunix: `PeftTrainer` on a Flax NNX model, without LoRA."""

import itertools
from typing import Any

from benchmarks.peers._case import import_peer
from benchmarks.peers._jax_model import JaxPeer, read_from
from benchmarks.protocol import Options
from benchmarks.tasks import SEED, Task


class TunixContestant(JaxPeer):
    """One trainer; a burst is one `train` of so many batches.

    Tunix logs each step one step later. Its metrics go to no backend here. The loss is
    the mean of the last loop.
    """

    library = "tunix"

    def _build(self, task: Task, options: Options) -> dict[str, Any]:
        self._check_devices(options)
        self._peft: Any = import_peer("tunix.sft.peft_trainer", "tunix")
        self._task = task
        self._steps_per_loop = options.steps_per_loop
        self._losses: list[Any] = []
        self._trainer = self._make_trainer(None)
        self._batches = read_from(task, 0)
        return {
            "input": "batches gathered as by hand",
            "parameters": self._count_parameters(),
        }

    def run(self, num_steps: int) -> float:
        import jax

        self._losses.clear()
        self._trainer.train(itertools.islice(self._batches, num_steps))
        loop = self._losses[-self._steps_per_loop :]
        jax.block_until_ready(self._losses)
        return sum(map(float, loop)) / len(loop)

    def _count_parameters(self) -> int:
        import jax
        from flax import nnx

        state = nnx.state(self._trainer.model, nnx.Param)
        return sum(leaf.size for leaf in jax.tree.leaves(state))

    def save(self, folder: str) -> None:
        """Writes a checkpoint to its end."""
        trainer = self._trainer
        manager = self._make_manager(folder)
        manager.save(trainer.train_steps, trainer.model, trainer.optimizer, force=True)
        manager.close()

    def restore(self, folder: str) -> None:
        """Makes a trainer that begins with the checkpoint of a folder."""
        self._trainer = self._make_trainer(folder)
        self._batches = read_from(self._task, self._trainer.train_steps)

    def _make_manager(self, folder: str) -> Any:
        module: Any = import_peer("tunix.sft.checkpoint_manager", "tunix")
        return module.CheckpointManager(root_directory=folder)

    def _make_trainer(self, folder: str | None) -> Any:
        import jax.numpy as jnp
        from flax import nnx

        from benchmarks.contestants.functional import make_optimizer, mean_loss
        from benchmarks.models import make_model

        losses = self._losses

        class Trainer(self._peft.PeftTrainer):
            """Keeps the loss of each step, on the device."""

            def _post_process_train_step(self, aux: Any) -> None:
                losses.append(aux)

        def loss_fn(model: Any, batch: Any) -> Any:
            loss = mean_loss(model(batch), batch["label"])
            return loss, loss

        trainer = Trainer(
            make_model(self._task, nnx.Rngs(SEED), jnp.float32),
            make_optimizer(self._task),
            self._peft.TrainingConfig(
                eval_every_n_steps=10**9, checkpoint_root_directory=folder
            ),
        )
        # Otherwise, `train` closes the trainer, so that it could not train again.
        trainer.is_managed_externally = True
        trainer = trainer.with_loss_fn(loss_fn, has_aux=True)
        return trainer.with_gen_model_input_fn(lambda batch: {"batch": batch})
