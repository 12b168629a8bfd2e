"""PyTorch with Lightning: `Trainer.fit` in its barebones mode."""

import logging
import warnings
from typing import Any

from benchmarks.peers._case import Peer, cut_batches, import_peer
from benchmarks.peers._torch_models import make_model
from benchmarks.protocol import Options, UnsupportedError
from benchmarks.tasks import SEED, Task


class LightningContestant(Peer):
    """One module and optimizer; a burst is one `fit` of so many steps.

    Lightning has no loop of several steps, so `steps_per_loop` only sets how often
    the loss is read. The loss is the mean of the last such loop.
    """

    library = "lightning"

    def _build(self, task: Task, options: Options) -> dict[str, Any]:
        if options.devices != 1:
            raise UnsupportedError(
                f"`devices` is {options.devices}, but Lightning starts a process for "
                "each device of a CPU, and they would share the same cores. Use "
                "`--devices 1`."
            )
        torch: Any = import_peer("torch", "lightning")
        library: Any = import_peer("lightning.pytorch", "lightning")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        # Advice about data workers: the batches are ready in memory.
        warnings.filterwarnings("ignore", module="lightning")
        library.seed_everything(SEED, verbose=False)
        self._library = library
        self._module = _make_module(torch, library, task, options.steps_per_loop)
        self._loader = _make_loader(torch, task)
        return {
            "input": "DataLoader over batches cut in advance",
            "trainer": "barebones",
            "optimizer": "fused",
            "threads": torch.get_num_threads(),
            "parameters": sum(
                parameter.numel() for parameter in self._module.parameters()
            ),
        }

    def run(self, num_steps: int) -> float:
        trainer = self._library.Trainer(
            max_steps=num_steps, max_epochs=-1, barebones=True
        )
        trainer.fit(self._module, self._loader)
        return self._module.last_loss


def _make_module(torch: Any, library: Any, task: Task, steps_per_loop: int) -> Any:
    class Module(library.LightningModule):
        """The model, its loss and an optimizer that outlives a call of `fit`."""

        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(torch, task)
            self.last_loss = float("nan")
            self._sum = torch.zeros(())
            self._optimizer = _make_optimizer(torch, self.model, task)

        def training_step(self, batch: Any, index: int) -> Any:
            del index
            loss = torch.nn.functional.cross_entropy(self.model(batch), batch["label"])
            self._sum += loss.detach()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            del outputs, batch, index
            if self.global_step % steps_per_loop == 0:
                self.last_loss = self._sum.item() / steps_per_loop
                self._sum.zero_()

        def configure_optimizers(self) -> Any:
            return self._optimizer

    return Module()


def _make_optimizer(torch: Any, model: Any, task: Task) -> Any:
    # Fused is faster than the default on a CPU too.
    if task.optimizer == "adamw":
        return torch.optim.AdamW(
            model.parameters(),
            task.learning_rate,
            weight_decay=task.weight_decay,
            fused=True,
        )
    return torch.optim.Adam(model.parameters(), task.learning_rate, fused=True)


def _make_loader(torch: Any, task: Task) -> Any:
    arrays = {
        name: torch.from_numpy(array) for name, array in cut_batches(task).items()
    }
    arrays["label"] = arrays["label"].long()
    if task.name == "cnn":
        # Channels come first in shape and last in memory: one channel needs no copy.
        arrays["image"] = arrays["image"].permute(0, 1, 4, 2, 3)

    class Batches(torch.utils.data.Dataset):
        """Whole batches, by index."""

        def __len__(self) -> int:
            return len(arrays["label"])

        def __getitem__(self, index: int) -> Any:
            return {name: array[index] for name, array in arrays.items()}

    return torch.utils.data.DataLoader(
        Batches(), batch_size=None, shuffle=True, num_workers=0
    )
