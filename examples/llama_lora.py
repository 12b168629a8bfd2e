"""Fine-tunes a Llama with LoRA on several devices, and saves it for `transformers`.

`--model` is a folder with `config.json`, `tokenizer.json` and safetensors. The program
divides its weights over the devices, adds adapters to every block, and trains only
them. The weights themselves stay out of the checkpoints.

    python examples/llama_lora.py --model llama --text corpus.txt --run-dir runs/llama

Without `--model`, it writes a tiny Llama with random weights to the run directory, and
a token is a byte. Without `--text`, the text is the reference of the Python language.

It prints the loss of each 20 steps, and at the end the folder of the merged model. Kill
it, and run the same command again: the merged weights are, bit for bit, the weights of
a run that was not killed.
"""

import argparse
from pathlib import Path
from pydoc_data import topics

import jax
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

import armillary
from armillary import pretrained
from decoder.families import make_names, read_config
from decoder.model import Decoder, DecoderConfig

BATCH_SIZE = 8
LENGTH = 64  # tokens in a row
# FSDP: the axis of the mesh for each name of an axis of the model.
LOGICAL_RULES = {
    "embed": "fsdp",
    "tokens": None,
    "heads": None,
    "kv_heads": None,
    "mlp": None,
    "blocks": None,
}
TINY = Path(__file__).parent / "decoder" / "tiny_llama.json"
# The reference of the Python language, which every Python holds.
TEXT = Path(topics.__file__)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Trainer(armillary.StandardTrainer):
    """Trains the adapters of a model to predict the next token."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: Decoder,
        transform: optax.GradientTransformation,
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.optimizer = strategy.make(
            nnx.Optimizer, model, transform, wrt=nnx.LoRAParam
        )
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator) -> None:
        self.strategy.run(self.replica_step, args=(next(iterator),))

    def replica_step(self, tokens: jax.Array) -> None:
        def loss_fn(model: Decoder) -> jax.Array:
            return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()

        adapters = nnx.DiffState(0, nnx.LoRAParam)
        loss, gradients = nnx.value_and_grad(loss_fn, argnums=adapters)(self.model)
        gradients = armillary.all_reduce("mean", gradients)
        self.optimizer.update(self.model, gradients)
        self.loss.update(loss=loss)

    def train_loop_end(self) -> dict:
        return {"loss": self.loss.compute()}


def write_tiny(folder: Path, strategy: armillary.distribute.Strategy) -> None:
    """Writes a small model with random weights, as if it had been trained before."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(TINY.read_text())
    config = read_config(folder)
    model = strategy.make(Decoder, config, nnx.Rngs(0))
    pretrained.save(model, folder, make_names(config))


def load_model(
    folder: Path, config: DecoderConfig, strategy: armillary.distribute.Strategy
) -> Decoder:
    """Returns the model in a folder. Each device reads only its part."""
    model = strategy.make(Decoder, config, nnx.Rngs(0))
    pretrained.load(model, folder, make_names(config), cast=True)
    return model


def save_merged(model: Decoder, folder: Path, base: Path) -> None:
    """Writes the model with merged adapters, in the dtype of the files of its base."""
    dtype = pretrained.list_tensors(base)["model.norm.weight"].dtype
    merged = armillary.lora.merge(model)
    pretrained.save(merged, folder, make_names(model.config), dtype=dtype)
    (folder / "config.json").write_text((base / "config.json").read_text())


def read_tokens(text: Path, tokenizer: Path | None) -> np.ndarray:
    """Returns rows of tokens, of shape `(rows, LENGTH + 1)`, without the last part.

    Without a tokenizer, a token is a byte.
    """
    if tokenizer is None:
        tokens = list(text.read_bytes())
    else:
        tokens = Tokenizer.from_file(str(tokenizer)).encode(text.read_text()).ids
    num_rows = len(tokens) // (LENGTH + 1)
    rows = np.array(tokens[: num_rows * (LENGTH + 1)], np.int32)
    return rows.reshape(num_rows, LENGTH + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tunes a Llama with LoRA.")
    parser.add_argument("--model", type=Path, help="by default, a tiny random one")
    parser.add_argument("--text", type=Path, default=TEXT, help="to learn")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/llama"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rank", type=int, default=8, help="width of the adapters")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    strategy = armillary.ShardedStrategy(logical_rules=LOGICAL_RULES)
    base, tokenizer = options.model, None
    if base is None:
        base = options.run_dir / "tiny"
        if not (base / "model.safetensors").exists():
            write_tiny(base, strategy)
    else:
        tokenizer = base / "tokenizer.json"
    model = load_model(base, read_config(base), strategy)
    armillary.lora.add(
        model,
        rank=options.rank,
        where="blocks/.*kernel",
        rngs=nnx.Rngs(1),
        alpha=2 * options.rank,
    )
    source = armillary.data.from_arrays(
        read_tokens(options.text, tokenizer),
        batch_size=BATCH_SIZE,
        shuffle_seed=0,
        repeat=True,
    )
    trainer = Trainer(
        strategy.distribute_dataset(source),
        strategy,
        model,
        optax.adam(options.learning_rate),
    )
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=20,
        summary_dir=options.run_dir / "train",
        checkpoint_manager=armillary.CheckpointManager(
            # The base is in its own files, so a checkpoint has only digests of it.
            armillary.Checkpoint(trainer=trainer, leave_out=armillary.lora.base(model)),
            options.run_dir / "checkpoints",
            checkpoint_interval=20,
        ),
    )
    controller.train(options.steps)

    merged = options.run_dir / "merged"
    save_merged(model, merged, base)
    print(f"The merged model is in {merged}")


if __name__ == "__main__":
    main()
