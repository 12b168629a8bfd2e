"""Fine-tunes a Llama with LoRA on four devices, and saves it for `transformers`.

    python examples/llama_lora.py --model llama --text corpus.txt --run-dir runs/llama

`--model` is a folder with `config.json`, `tokenizer.json` and safetensors; by default,
a tiny random Llama with a token for each byte. Its weights stay out of the checkpoints.
Kill the program, and run it again: it ends bit for bit the same, in `<run-dir>/merged`.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

import armillary
from armillary import data, lora, pretrained
from decoder.families import make_names, read_config
from decoder.model import Decoder

LENGTH = 64
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
TINY = Path(__file__).parent / "decoder" / "tiny_llama.json"


class Trainer(armillary.StandardTrainer):
    """Trains the adapters of a model to predict the next token."""

    def __init__(self, strategy, model, dataset) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        adam = optax.adam(1e-2)
        self.optimizer = strategy.make(nnx.Optimizer, model, adam, wrt=nnx.LoRAParam)
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator) -> None:
        self.strategy.run(self.replica_step, args=(next(iterator),))

    def replica_step(self, tokens) -> None:
        def loss_fn(model):
            return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()

        adapters = nnx.DiffState(0, nnx.LoRAParam)
        loss, gradients = nnx.value_and_grad(loss_fn, argnums=adapters)(self.model)
        gradients = armillary.all_reduce("mean", gradients)
        self.optimizer.update(self.model, gradients)
        self.loss.update(loss=loss)

    def train_loop_end(self) -> dict:
        return {"loss": self.loss.compute()}


def write_tiny(folder: Path, strategy) -> None:
    """Writes a small model with random weights, as if it had been trained before."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(TINY.read_text())
    config = read_config(folder)
    model = strategy.make(Decoder, config, nnx.Rngs(0))
    pretrained.save(model, folder, make_names(config))


def read_tokens(text: Path, model: Path) -> np.ndarray:
    """Returns sequences of tokens, of shape `(rows, LENGTH + 1)`."""
    tokens = list(text.read_bytes())
    if (model / "config.json").read_text() != TINY.read_text():
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokens = tokenizer.encode(text.read_text()).ids
    rows = len(tokens) // (LENGTH + 1)
    return np.array(tokens[: rows * (LENGTH + 1)], np.int32).reshape(rows, LENGTH + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tunes a Llama with LoRA.")
    parser.add_argument("--model", type=Path, default=Path("llama"))
    parser.add_argument("--text", type=Path, default=Path(__file__), help="to learn")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/llama"))
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)  # virtual devices

    whole = dict.fromkeys(["tokens", "heads", "kv_heads", "mlp", "blocks"])
    strategy = armillary.ShardedStrategy(logical_rules={"embed": "fsdp", **whole})
    if not options.model.exists():
        write_tiny(options.model, strategy)
    config = read_config(options.model)
    names = make_names(config)
    model = strategy.make(Decoder, config, nnx.Rngs(0))
    pretrained.load(model, options.model, names, cast=True)
    lora.add(model, rank=8, where="blocks/.*kernel", rngs=nnx.Rngs(1), alpha=16)

    tokens = read_tokens(options.text, options.model)
    source = data.from_arrays(tokens, batch_size=8, shuffle_seed=0, repeat=True)
    trainer = Trainer(strategy, model, strategy.distribute_dataset(source))
    checkpoint = armillary.Checkpoint(trainer=trainer, leave_out=lora.base(model))
    folder = options.run_dir / "checkpoints"
    manager = armillary.CheckpointManager(checkpoint, folder, checkpoint_interval=20)
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=20,
        checkpoint_manager=manager,
    )
    controller.train(options.steps)

    merged = options.run_dir / "merged"
    dtype = pretrained.list_tensors(options.model)["model.norm.weight"].dtype
    pretrained.save(lora.merge(model), merged, names, dtype=dtype)
    (merged / "config.json").write_text((options.model / "config.json").read_text())


if __name__ == "__main__":
    main()
