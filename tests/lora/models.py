"""Models with all layers that can have adapters."""

import jax
import jax.numpy as jnp
from flax import nnx

WHERE = "kernel|embedding"


class Block(nnx.Module):
    """A layer of a stack, with kernels of two and of three dimensions."""

    def __init__(self, rngs: nnx.Rngs, width: int = 8) -> None:
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.relu(self.up(x)))


class Network(nnx.Module):
    """An embedding, a scanned stack of two blocks, an einsum, and tied logits."""

    def __init__(self, rngs: nnx.Rngs, width: int = 8) -> None:
        self.embed = nnx.Embed(16, width, rngs=rngs)
        make = nnx.vmap(lambda rngs: Block(rngs, width))
        self.blocks = nnx.split_rngs(splits=2)(make)(rngs)
        self.mix = nnx.Einsum("btd,hde->bthe", (2, width, width), rngs=rngs)
        self.join = nnx.LinearGeneral((2, width), width, axis=(-2, -1), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        run = nnx.scan(
            lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        x = self.join(self.mix(run(x, self.blocks)))
        return self.embed.attend(x)


def make_tokens(num_rows: int = 3) -> jax.Array:
    return jnp.arange(num_rows * 5).reshape(num_rows, 5) % 16


def set_adapters(model: nnx.Module, seed: int = 3) -> None:
    """Gives all adapters random values, as after some training."""
    keys = nnx.Rngs(seed)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        values = jax.random.normal(keys.params(), variable.get_value().shape) / 4
        variable.set_value(values)
