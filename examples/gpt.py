"""Trains a small GPT, a decoder-only transformer, on packed sequences of real text.

The text is the reference of the Python language, which every Python holds as
`pydoc_data.topics`, and a token is a character. Each paragraph is a sequence, and
several of them are packed into each row of 128 tokens. Segment ids keep them apart in
the attention, positions begin again with each paragraph, and padding has no weight.

    python examples/gpt.py --strategy sharded --devices 2 --run-dir runs/gpt

Blocks run in a loop, so devices that share the parameters (FSDP) collect one block at a
time. `--mesh fsdp=4,tensor=2` also divides each block (tensor parallelism), by the
names that the model gives its axes. `--remat` and `--parts` need less memory.

It prints the loss and the perplexity of each 100 steps, then both on paragraphs that
were held out (a perplexity of about 6), and a paragraph that the model has written. Run
the same command again, and training continues from the last checkpoint, also with
another strategy.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import armillary

LENGTH = 128  # tokens in a row
BATCH_SIZE = 16
NUM_HEADS = 4
EDGE = 0  # the token before and after each paragraph
LOGICAL_RULES = {
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "tokens": None,
    "blocks": None,
}
"""The axis of the mesh for each name of an axis of the model."""
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def make_dense(
    sizes: tuple[int, int], axes: tuple[str, str], rngs: nnx.Rngs
) -> nnx.Linear:
    """Returns a dense layer whose kernel has a name for each axis."""
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
    return nnx.Linear(*sizes, kernel_init=kernel_init, rngs=rngs)


class Block(nnx.Module):
    """Attention to earlier tokens, and two dense layers for each token."""

    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs) -> None:
        self.num_heads = num_heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        # Query, key and value of all heads come from one product.
        self.attention_in = make_dense((width, 3 * width), ("embed", "heads"), rngs)
        self.attention_out = make_dense((width, width), ("heads", "embed"), rngs)
        self.up = make_dense((width, 4 * width), ("embed", "mlp"), rngs)
        self.down = make_dense((4 * width, width), ("mlp", "embed"), rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the next activations, of the same shape: `(batch, length, width)`."""
        query, key, value = self.project(x)
        attended = jax.nn.dot_product_attention(query, key, value, mask=mask)
        return self.finish(x, attended)

    def project(self, x: jax.Array) -> jax.Array:
        """Returns query, key and value: `(3, batch, length, heads, size)`."""
        size = x.shape[-1] // self.num_heads
        projected = self.attention_in(self.attention_norm(x))
        heads = projected.reshape(*x.shape[:2], 3, self.num_heads, size)
        return jnp.moveaxis(heads, 2, 0)

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns the next activations, from the attended values of each head."""
        x = x + self.attention_out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    """A decoder-only transformer. With `remat`, blocks compute activations twice.

    The blocks are one module, whose arrays have a first axis of `depth`. The embedding
    of tokens is also the last layer.
    """

    def __init__(
        self, num_tokens: int, width: int, depth: int, remat: bool, rngs: nnx.Rngs
    ) -> None:
        self.remat = remat
        init = nnx.with_partitioning(
            nnx.initializers.normal(width**-0.5), ("tokens", "embed")
        )
        self.token = nnx.Embed(num_tokens, width, embedding_init=init, rngs=rngs)
        self.position = nnx.Embed(LENGTH, width, embedding_init=init, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "blocks"})
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(width, NUM_HEADS, rngs)

        self.blocks = make_blocks(rngs)

    def __call__(
        self, tokens: jax.Array, segments: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """Returns logits of shape `(batch, length, num_tokens)`."""
        is_earlier = jnp.tri(tokens.shape[1], dtype=bool)
        is_same = segments[:, :, None] == segments[:, None, :]
        mask = (is_same & is_earlier[None])[:, None]
        x = self.token(tokens) + self.position(positions)
        graph, blocks = nnx.split(self.blocks)

        def run_block(x: jax.Array, block: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graph, block)(x, mask), None

        body = jax.checkpoint(run_block) if self.remat else run_block
        x, _ = jax.lax.scan(body, x, blocks)
        return self.token.attend(self.norm(x))


def pack(paragraphs: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Packs paragraphs into rows, with an edge before and after each of them.

    Returns:
        Arrays of shape `(rows, LENGTH)`: `tokens`, `targets` (the next tokens),
        `segment_ids` (0 for padding) and `positions`.
    """
    documents = [np.pad(paragraph, 1, constant_values=EDGE) for paragraph in paragraphs]
    packed = armillary.data.pack(documents, row_length=LENGTH, targets=True)
    return jax.tree.map(lambda *rows: np.stack(rows), *packed)


def load_data() -> tuple[dict, dict, str]:
    """Returns rows to train on, rows to evaluate, and the character of each token."""
    texts = [topics[name] for name in sorted(topics)]
    characters = "\0" + "".join(sorted(set("".join(texts)) - {"\0"}))
    number_of = {character: number for number, character in enumerate(characters)}
    paragraphs = [
        np.array([number_of[character] for character in paragraph])
        for text in texts
        for paragraph in text.split("\n\n")
        if paragraph.strip()
    ]
    held_out = paragraphs[::10]
    del paragraphs[::10]
    return pack(paragraphs), pack(held_out), characters


def make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Returns AdamW with clipping and a schedule, which decays only kernels."""

    def find_kernels(parameters: nnx.State) -> nnx.State:
        def is_kernel(path: tuple, _: jax.Array) -> bool:
            return "kernel" in jax.tree_util.keystr(path)

        return jax.tree_util.tree_map_with_path(is_kernel, parameters)

    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 2e-3, warmup_steps=num_steps // 10, decay_steps=num_steps, end_value=2e-4
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, weight_decay=0.1, mask=find_kernels),
    )


def compute_losses(model: GPT, batch: dict) -> tuple[jax.Array, jax.Array]:
    """Returns the loss and the weight of each token: 0 for padding."""
    logits = model(batch["tokens"], batch["segment_ids"], batch["positions"])
    weights = (batch["segment_ids"] > 0).astype(logits.dtype)
    return cross_entropy(logits, batch["targets"]), weights


def add_perplexity(metrics: dict, state: dict) -> dict:
    """Returns the perplexity of a loop or an evaluation, from its exact loss."""
    del state
    return {"perplexity": np.exp(metrics["loss"])}


def split(batch: dict, num_parts: int) -> dict:
    """Returns a batch with a first axis of parts.

    A part takes every `num_parts`-th row, so each device has rows of each part.
    """

    def split_rows(rows: jax.Array) -> jax.Array:
        parts = rows.reshape(-1, num_parts, *rows.shape[1:])
        return jnp.moveaxis(parts, 1, 0)

    return jax.tree.map(split_rows, batch)


def make_step(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation, num_parts: int
) -> Callable[[dict, dict], tuple[dict, dict]]:
    """Returns the step, which accumulates the gradients of parts of each batch."""

    def step(state: dict, batch: dict) -> tuple[dict, dict]:
        parameters = state["parameters"]
        # Replicas and parts hold different numbers of tokens, and each token counts
        # once.
        num_tokens = jnp.sum(batch["segment_ids"] > 0)
        total = armillary.all_reduce("sum", num_tokens).astype(jnp.float32)

        def add_part(gradients: nnx.State, part: dict) -> tuple[nnx.State, tuple]:
            def loss_fn(parameters: nnx.State) -> tuple[jax.Array, tuple]:
                losses, weights = compute_losses(nnx.merge(graph, parameters), part)
                return jnp.sum(losses * weights) / total, (losses, weights)

            new, aux = jax.grad(loss_fn, has_aux=True)(parameters)
            return jax.tree.map(jnp.add, gradients, new), aux

        zeros = jax.tree.map(jnp.zeros_like, parameters)
        parts = split(batch, num_parts)
        gradients, (losses, weights) = jax.lax.scan(add_part, zeros, parts)
        gradients = armillary.all_reduce("sum", gradients)
        updates, moments = optimizer.update(gradients, state["moments"], parameters)
        parameters = optax.apply_updates(parameters, updates)
        metrics = {"loss": armillary.metrics.WeightedMean(losses, weights)}
        return {"parameters": parameters, "moments": moments}, metrics

    return step


def make_trainer(
    strategy: armillary.distribute.Strategy,
    rows: dict,
    model_options: dict,
    num_steps: int,
    num_parts: int = 1,
) -> tuple[armillary.StepTrainer, nnx.GraphDef]:
    """Returns a trainer, and the structure of its model.

    Args:
        strategy: The strategy. Each array is made where it belongs.
        rows: The rows to train on.
        model_options: The arguments of `GPT`, except `rngs`.
        num_steps: The length of the schedule.
        num_parts: The number of parts in which each batch is differentiated.
    """
    model = strategy.make(lambda: GPT(**model_options, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(model)
    optimizer = make_optimizer(num_steps)
    moments = strategy.make(optimizer.init, parameters)
    trainer = armillary.StepTrainer(
        make_step(graph, optimizer, num_parts),
        {"parameters": parameters, "moments": moments},
        armillary.data.from_arrays(
            rows, batch_size=BATCH_SIZE, shuffle_seed=0, repeat=True
        ),
        strategy=strategy,
        loop_end=add_perplexity,
    )
    return trainer, graph


def sample(model: GPT, characters: str, seed: int = 0) -> str:
    """Returns a paragraph of at most `LENGTH` characters that the model writes.

    Each new token runs the model on the whole row. `decoding.py` has a cache instead.
    """
    ones, positions = jnp.ones((1, LENGTH), int), jnp.arange(LENGTH)[None]

    def add_token(tokens: jax.Array, now: tuple) -> tuple:
        place, key = now
        logits = model(tokens[None, :-1], ones, positions)[0, place]
        token = jax.random.categorical(key, logits / 0.5)  # the temperature
        return tokens.at[place + 1].set(token), token

    begin = jnp.full(LENGTH + 1, EDGE)
    keys = jax.random.split(jax.random.key(seed), LENGTH)
    _, tokens = jax.lax.scan(add_token, begin, (jnp.arange(LENGTH), keys))
    text = "".join(characters[token] for token in np.asarray(tokens))
    return text.split(characters[EDGE])[0]


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the axes of a mesh, from text such as `fsdp=4,tensor=2`."""
    pairs = [axis.split("=") for axis in text.split(",")]
    return {name: int(size) for name, size in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT on packed text.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/gpt"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--steps-per-loop", type=int, default=100)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 4")
    parser.add_argument("--depth", type=int, default=2, help="number of blocks")
    parser.add_argument("--remat", action="store_true", help="save memory")
    parser.add_argument("--parts", type=int, default=1, help="of a batch; saves memory")
    parser.add_argument(
        "--strategy", choices=["mirrored", "sharded"], default="sharded"
    )
    parser.add_argument("--mesh", type=parse_mesh, help="such as fsdp=4,tensor=2")
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    if options.strategy == "sharded":
        strategy = armillary.ShardedStrategy(options.mesh, logical_rules=LOGICAL_RULES)
    else:
        strategy = armillary.MirroredStrategy()
    train, held_out, characters = load_data()
    share = np.mean(train["segment_ids"] > 0)
    print(f"{len(train['tokens'])} rows, {share:.1%} of the tokens are text")
    model_options = {
        "num_tokens": len(characters),
        "width": options.width,
        "depth": options.depth,
        "remat": options.remat,
    }
    trainer, graph = make_trainer(
        strategy, train, model_options, options.steps, options.parts
    )

    def evaluate(state: dict, batch: dict) -> dict:
        losses, weights = compute_losses(nnx.merge(graph, state["parameters"]), batch)
        return {"loss": armillary.metrics.WeightedMean(losses, weights)}

    controller = armillary.Controller(
        trainer=trainer,
        evaluator=armillary.StepEvaluator(
            evaluate,
            trainer,
            armillary.data.from_arrays(held_out, batch_size=BATCH_SIZE),
            loop_end=add_perplexity,
        ),
        global_step=trainer.global_step,
        steps_per_loop=options.steps_per_loop,
        summary_dir=options.run_dir / "train",
        eval_summary_dir=options.run_dir / "eval",
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer),
            options.run_dir / "checkpoints",
            checkpoint_interval=200,
        ),
    )
    result = controller.train_and_evaluate(train_steps=options.steps)
    print(f"Perplexity {result['perplexity']:.2f}, loss {result['loss']:.3f}")
    trained = nnx.merge(graph, trainer.state["parameters"])
    trained.remat = False  # because sampling computes no gradient
    print(f"A sample:\n{sample(trained, characters)}")


if __name__ == "__main__":
    main()
