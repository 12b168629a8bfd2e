"""A model with every kind of row, its table, and its tensors in a file."""

import numpy as np
from flax import nnx

from armillary import pretrained

NUM_LAYERS = 3
SIZE = 4


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(SIZE, 2 * SIZE, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


class Model(nnx.Module):
    """Stacked blocks, a list of norms, a fused and a divided kernel."""

    def __init__(self, num_layers=NUM_LAYERS):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(6, SIZE, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(SIZE, rngs=rngs) for _ in range(2)])
        self.query = nnx.LinearGeneral(SIZE, (2, 2), use_bias=False, rngs=rngs)
        self.key = nnx.Linear(SIZE, 2, use_bias=False, rngs=rngs)
        self.gate_up = nnx.Linear(SIZE, 6, use_bias=False, rngs=rngs)

        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)


ROWS = [
    ("wte.weight", "embed/embedding"),
    ("h.{layer}.up.weight", "blocks/up/kernel", pretrained.transpose),
    ("h.{layer}.up.bias", "blocks/up/bias"),
    ("norm.{number}.weight", "norms/{number}/scale"),
    (
        "q.weight",
        "query/kernel",
        pretrained.rearrange("(heads size) embed -> embed heads size", size=2),
    ),
    ("k.weight", "key/kernel", pretrained.transpose),
    (
        ("gate.weight", "up.weight"),
        "gate_up/kernel",
        pretrained.join(2, axis=0),
        pretrained.transpose,
    ),
    ("lm_head.weight", "embed/embedding", pretrained.tied),
    ("*.inv_freq", None),
]
NAMES = pretrained.Names(ROWS)


def make_tensors(num_layers=NUM_LAYERS):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    tensors = {
        "wte.weight": draw(6, SIZE),
        "norm.0.weight": draw(SIZE),
        "norm.1.weight": draw(SIZE),
        "q.weight": draw(4, SIZE),
        "k.weight": draw(2, SIZE),
        "gate.weight": draw(3, SIZE),
        "up.weight": draw(3, SIZE),
    }
    for layer in range(num_layers):
        tensors[f"h.{layer}.up.weight"] = draw(2 * SIZE, SIZE)
        tensors[f"h.{layer}.up.bias"] = draw(2 * SIZE)
    return tensors


def read_model(model):
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}


def check_model(model, tensors):
    """Compares every parameter with the tensors, by equations of its own."""
    found = read_model(model)
    layers = range(NUM_LAYERS)
    expected = {
        "embed/embedding": tensors["wte.weight"],
        "norms/0/scale": tensors["norm.0.weight"],
        "norms/1/scale": tensors["norm.1.weight"],
        "query/kernel": tensors["q.weight"].T.reshape(SIZE, 2, 2),
        "key/kernel": tensors["k.weight"].T,
        "gate_up/kernel": np.concatenate(
            [tensors["gate.weight"].T, tensors["up.weight"].T], axis=1
        ),
        "blocks/up/kernel": np.stack([tensors[f"h.{i}.up.weight"].T for i in layers]),
        "blocks/up/bias": np.stack([tensors[f"h.{i}.up.bias"] for i in layers]),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
