"""Random models of NNX, Linen and Equinox, with random annotations of their axes.

A model looks tokens up, adds blocks of dense layers one after the other, then a stack
of blocks in a loop with rematerialization, and compares the result with its embedding.
A number is drawn once for all libraries, so the annotations are the same in all.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec

import armillary

NUM_TOKENS = 64
NUM_ROWS = 32
MESHES = [
    {"data": 2, "model": 4},
    {"a": 2, "b": 2, "c": 2},
    {"fsdp": 4, "expert": 2},
    {"data": 8},
]
ALIAS = "the_axis_"
"""The beginning of a name that `logical_rules` gives a meaning."""

Names = tuple[str | None, ...] | None
ACTIVATIONS = (jax.nn.gelu, jnp.tanh, jax.nn.silu)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A drawn model and mesh.

    Attributes:
        seed: The number that everything is drawn from.
        sizes: The axes of the mesh.
        batch_axes: The axes that batches are divided over.
        width: The size of a token.
        hidden: The size in the middle of each block; the last one is of the stack.
        depth: The number of blocks in the stack.
        activation: The function between the layers of a block.
        birth: How the model is made: `"elsewhere"`, `"make"` or `"scope"`.
        names: The annotation of each parameter, by a short path.
    """

    seed: int
    sizes: dict[str, int]
    batch_axes: tuple[str, ...]
    width: int
    hidden: tuple[int, ...]
    depth: int
    activation: Callable[[Any], Any]
    birth: str
    names: dict[str, Names]

    @property
    def blocks(self) -> list[str]:
        """The short paths of the blocks before the stack."""
        return [f"blocks/{i}" for i in range(len(self.hidden) - 1)]

    @property
    def logical_rules(self) -> dict[str, Any]:
        return {ALIAS + axis: axis for axis in self.sizes}

    def spec(self, path: str) -> PartitionSpec | None:
        """Returns the division that an annotation asks for, if there is one."""
        names = self.names[path]
        if names is None:
            return None
        return PartitionSpec(*map(_without_alias, names))


def _without_alias(name: str | None) -> str | None:
    return name and name.removeprefix(ALIAS)


def draw(seed: int, sizes: dict[str, int] | None = None) -> Drawn:
    """Returns a model, and a mesh if no mesh is given."""
    source = random.Random(seed)
    sizes = sizes or source.choice(MESHES)
    axes = list(sizes)

    def draw_names(num_axes: int) -> Names:
        if source.random() < 0.2:
            return None
        free = source.sample(axes, len(axes))
        names: list[str | None] = []
        for _ in range(num_axes):
            is_divided = free and source.random() < 0.7
            names.append(
                source.choice(("", ALIAS)) + free.pop() if is_divided else None
            )
        return tuple(names)

    hidden = tuple(source.choice((16, 32, 64)) for _ in range(source.randint(1, 3)))
    names: dict[str, Names] = {"embedding": draw_names(2)}
    for i in range(len(hidden) - 1):
        for layer, num_axes in LAYERS.items():
            names[f"blocks/{i}/{layer}"] = draw_names(num_axes)
    for layer, num_axes in LAYERS.items():
        # XLA of jaxlib 0.10 computes wrong numbers for some stacks whose layers are
        # divided over one of three axes, also for plain `jax.jit`.
        if len(axes) < 3:
            names[f"stack/{layer}"] = draw_names(1 + num_axes)
        else:
            own = draw_names(num_axes)
            names[f"stack/{layer}"] = None if own is None else (None, *own)
    return Drawn(
        seed=seed,
        sizes=sizes,
        batch_axes=tuple(source.sample(axes, source.randint(1, len(axes)))),
        width=source.choice((16, 32)),
        hidden=hidden,
        depth=8,
        activation=source.choice(ACTIVATIONS),
        birth=source.choice(("elsewhere", "make", "scope")),
        names=names,
    )


LAYERS = {"up/kernel": 2, "up/bias": 1, "down/kernel": 2}
"""The annotated parameters of a block, and the axes of each."""


def make_data(drawn: Drawn) -> dict[str, np.ndarray]:
    """Returns tokens, and a vector for each token."""
    source = np.random.default_rng(drawn.seed)
    tokens = source.integers(NUM_TOKENS, size=NUM_ROWS)
    x = source.normal(size=(NUM_ROWS, drawn.width))
    return {"tokens": tokens.astype(np.int32), "x": x.astype(np.float32)}


def compute_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return losses.mean()


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


class Model:
    """A model under a strategy: trains, and tells where its arrays lie."""

    def train(self, num_steps: int) -> list[float]:
        """Returns the loss of each step."""
        raise NotImplementedError

    def arrays(self) -> dict[str, list[jax.Array]]:
        """Returns each annotated parameter and its moments, by short path."""
        raise NotImplementedError


# Flax NNX


def _annotate(init: Any, names: Names) -> Any:
    return init if names is None else nnx.with_partitioning(init, names)


class NnxBlock(nnx.Module):
    def __init__(
        self, drawn: Drawn, path: str, hidden: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.activation = drawn.activation
        kernel_init = nnx.initializers.lecun_normal()
        names = {layer: drawn.names[f"{path}/{layer}"] for layer in LAYERS}
        if path == "stack":  # `nnx.vmap` adds the first name.
            names = {k: None if n is None else n[1:] for k, n in names.items()}
        options: dict[str, Any] = {"param_dtype": dtype, "rngs": rngs}
        self.norm = nnx.LayerNorm(drawn.width, **options)
        self.up = nnx.Linear(
            drawn.width,
            hidden,
            kernel_init=_annotate(kernel_init, names["up/kernel"]),
            bias_init=_annotate(nnx.initializers.zeros, names["up/bias"]),
            **options,
        )
        self.down = nnx.Linear(
            hidden,
            drawn.width,
            use_bias=False,
            kernel_init=_annotate(kernel_init, names["down/kernel"]),
            **options,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.activation(self.up(self.norm(x))))


class NnxNet(nnx.Module):
    def __init__(self, drawn: Drawn, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        embedding_init = nnx.initializers.normal()
        self.embed = nnx.Embed(
            NUM_TOKENS,
            drawn.width,
            embedding_init=_annotate(embedding_init, drawn.names["embedding"]),
            param_dtype=dtype,
            rngs=rngs,
        )
        *sizes, last = drawn.hidden
        pairs = zip(drawn.blocks, sizes, strict=True)
        self.blocks = nnx.List([NnxBlock(drawn, *pair, dtype, rngs) for pair in pairs])

        @nnx.split_rngs(splits=drawn.depth)
        @nnx.vmap
        def make_stack(rngs: nnx.Rngs) -> NnxBlock:
            return NnxBlock(drawn, "stack", last, dtype, rngs)

        self.stack = make_stack(rngs)
        # `nnx.vmap` gives all variables the same first name, but here each has its own.
        for layer in LAYERS:
            names = drawn.names[f"stack/{layer}"]
            if names is not None:
                part, name = layer.split("/")
                variable = getattr(getattr(self.stack, part), name)
                variable.set_metadata("out_sharding", names)

    def __call__(self, batch: Any) -> jax.Array:
        x = batch["x"] + self.embed(batch["tokens"])
        for block in self.blocks:
            x = block(x)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x: jax.Array, block: NnxBlock) -> jax.Array:
            return block(x)

        return self.embed.attend(run(x, self.stack))


class NnxModel(Model):
    def __init__(self, strategy: Any, drawn: Drawn, dtype: Any) -> None:
        self._strategy = strategy
        self._data = make_data(drawn)
        with nnx.use_eager_sharding(False):
            self._net, self._optimizer = born(strategy, drawn, make_nnx, dtype)

    def train(self, num_steps: int) -> list[float]:
        @armillary.function
        def train_step(batch: Any) -> Any:
            return self._strategy.run(self._step, args=(batch,))

        return run_steps(self._strategy, self._data, train_step, num_steps)

    def _step(self, batch: Any) -> jax.Array:
        def loss_fn(net: NnxNet) -> jax.Array:
            return compute_loss(net(batch), batch["tokens"])

        loss, gradients = nnx.value_and_grad(loss_fn)(self._net)
        gradients = armillary.all_reduce("mean", gradients)
        self._optimizer.update(self._net, gradients)
        return loss

    def arrays(self) -> dict[str, list[jax.Array]]:
        moments = self._optimizer.opt_state[1][0]
        params = nnx.to_pure_dict(nnx.state(self._net, nnx.Param))
        trees = [params, *map(nnx.to_pure_dict, (moments.mu, moments.nu))]
        found: dict[str, list[jax.Array]] = {"embedding": []}
        for tree in trees:
            found["embedding"].append(tree["embed"]["embedding"])
            blocks = tree.get("blocks", {})
            for path, block in [*blocks.items(), ("stack", tree["stack"])]:
                place = path if path == "stack" else f"blocks/{path}"
                for layer in LAYERS:
                    part, name = layer.split("/")
                    found.setdefault(f"{place}/{layer}", []).append(block[part][name])
        return found


def make_nnx(drawn: Drawn, dtype: Any) -> Any:
    net = NnxNet(drawn, dtype)
    return net, nnx.Optimizer(net, OPTIMIZER, wrt=nnx.Param)


# Pure steps


class PureModel(Model):
    """A model whose state is a pytree, with a step that returns the next state."""

    def __init__(self, strategy: Any, drawn: Drawn, dtype: Any) -> None:
        data = make_data(drawn)
        make = self.make_net(drawn, dtype)
        state = born(strategy, drawn, lambda: _make_pure(make), None)
        state = self.place(state, strategy, drawn)
        source = armillary.data.from_arrays(data, batch_size=16, repeat=True)
        self._trainer = armillary.StepTrainer(
            self._step, state, source, strategy=strategy
        )

    def make_net(self, drawn: Drawn, dtype: Any) -> Callable[[], Any]:
        """Returns a function that makes the parameters."""
        raise NotImplementedError

    def place(self, state: Any, strategy: Any, drawn: Drawn) -> Any:
        """Divides arrays of the first state, as a user may do."""
        del strategy, drawn
        return state

    def apply(self, params: Any, batch: Any) -> jax.Array:
        """Returns the logits of a batch."""
        raise NotImplementedError

    def _step(self, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return compute_loss(self.apply(params, batch), batch["tokens"])

        params = state["params"]
        loss, gradients = jax.value_and_grad(loss_fn)(params)
        gradients = armillary.all_reduce("mean", gradients)
        updates, opt = OPTIMIZER.update(gradients, state["opt"], params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    def train(self, num_steps: int) -> list[float]:
        return [float(self._trainer.train(1)["loss"]) for _ in range(num_steps)]

    @property
    def trees(self) -> list[Any]:
        """The parameters and the two moments of each."""
        state = self._trainer.state
        moments = state["opt"][1][0]
        return [state["params"], moments.mu, moments.nu]


def _make_pure(make: Callable[[], Any]) -> Any:
    params = make()
    return {"params": params, "opt": OPTIMIZER.init(params)}


# Linen


def _box(init: Any, names: Names) -> Any:
    if names is None:
        return init
    is_logical = any(name and name.startswith(ALIAS) for name in names)
    make = linen.with_logical_partitioning if is_logical else linen.with_partitioning
    return make(init, names)


class LinenBlock(linen.Module):
    drawn: Drawn
    place: str
    hidden: int
    dtype: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        names: dict[str, Names] = dict.fromkeys(LAYERS)
        if self.place != "stack":  # Its parameters have their boxes as a stack.
            names = {k: self.drawn.names[f"{self.place}/{k}"] for k in LAYERS}
        kernel_init = linen.initializers.lecun_normal()
        zeros = linen.initializers.zeros
        hidden = linen.LayerNorm(param_dtype=self.dtype)(x)
        hidden = linen.Dense(
            self.hidden,
            kernel_init=_box(kernel_init, names["up/kernel"]),
            bias_init=_box(zeros, names["up/bias"]),
            param_dtype=self.dtype,
            name="up",
        )(hidden)
        return x + linen.Dense(
            self.drawn.width,
            use_bias=False,
            kernel_init=_box(kernel_init, names["down/kernel"]),
            param_dtype=self.dtype,
            name="down",
        )(self.drawn.activation(hidden))


class LinenNet(linen.Module):
    drawn: Drawn
    dtype: Any

    @linen.compact
    def __call__(self, batch: Any) -> jax.Array:
        drawn = self.drawn
        embedding_init = linen.initializers.normal()
        embed = linen.Embed(
            NUM_TOKENS,
            drawn.width,
            embedding_init=_box(embedding_init, drawn.names["embedding"]),
            param_dtype=self.dtype,
            name="embed",
        )
        x = batch["x"] + embed(batch["tokens"])
        *sizes, last = drawn.hidden
        for path, hidden in zip(drawn.blocks, sizes, strict=True):
            name = path.replace("/", "_")
            x = LinenBlock(drawn, path, hidden, self.dtype, name=name)(x)

        def apply(params: Any, x: jax.Array) -> jax.Array:
            block = LinenBlock(drawn, "stack", last, self.dtype, parent=None)
            found: Any = block.apply({"params": params}, x)
            return found

        stack = self.param("stack", _make_linen_stack, drawn, last, self.dtype)

        def layer(x: jax.Array, params: Any) -> Any:
            return apply(params, x), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, linen.unbox(stack))
        return embed.attend(x)


def _make_linen_stack(key: jax.Array, drawn: Drawn, hidden: int, dtype: Any) -> Any:
    """Returns the parameters of all blocks of a stack, each in its box."""
    block = LinenBlock(drawn, "stack", hidden, dtype, parent=None)
    x = jnp.zeros((1, drawn.width), dtype)

    def init(key: jax.Array) -> Any:
        return linen.unbox(block.init(key, x)["params"])

    params = jax.vmap(init)(jax.random.split(key, drawn.depth))
    for layer in LAYERS:
        part, name = layer.split("/")
        make = _box(lambda _, value: value, drawn.names[f"stack/{layer}"])
        params[part][name] = make(None, params[part][name])
    return params


class LinenModel(PureModel):
    def make_net(self, drawn: Drawn, dtype: Any) -> Callable[[], Any]:
        self._net = LinenNet(drawn, dtype)
        batch = {name: value[:1] for name, value in make_data(drawn).items()}
        return lambda: self._net.init(jax.random.key(0), batch)["params"]

    def apply(self, params: Any, batch: Any) -> jax.Array:
        logits: Any = self._net.apply({"params": params}, batch)
        return logits

    def arrays(self) -> dict[str, list[jax.Array]]:
        found: dict[str, list[jax.Array]] = {"embedding": []}
        for tree in map(linen.unbox, self.trees):
            for part, block in tree.items():
                if part == "embed":
                    found["embedding"].append(block["embedding"])
                    continue
                place = part.replace("_", "/")
                for layer in LAYERS:
                    part, name = layer.split("/")
                    found.setdefault(f"{place}/{layer}", []).append(block[part][name])
        return found


# Equinox


def make_equinox_classes() -> Any:
    """Returns a class, which exists only where Equinox is installed."""
    import equinox

    class Block(equinox.Module):
        norm: Any
        up: Any
        down: Any
        activation: Any = equinox.field(static=True)

        def __init__(self, drawn: Drawn, hidden: int, dtype: Any, key: Any) -> None:
            first, second = jax.random.split(key)
            width = drawn.width
            self.norm = equinox.nn.LayerNorm(width, dtype=dtype)
            self.up = equinox.nn.Linear(width, hidden, dtype=dtype, key=first)
            self.down = equinox.nn.Linear(
                hidden, width, use_bias=False, dtype=dtype, key=second
            )
            self.activation = drawn.activation

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(self.activation(self.up(self.norm(x))))

    class Net(equinox.Module):
        embed: Any
        blocks: list[Block]
        stack: Block

        def __init__(self, drawn: Drawn, dtype: Any) -> None:
            first, second, *keys = jax.random.split(
                jax.random.key(0), 1 + len(drawn.hidden)
            )
            self.embed = equinox.nn.Embedding(
                NUM_TOKENS, drawn.width, dtype=dtype, key=first
            )
            *sizes, last = drawn.hidden
            pairs = zip(sizes, keys, strict=True)
            self.blocks = [Block(drawn, size, dtype, key) for size, key in pairs]

            def make_block(key: jax.Array) -> Block:
                return Block(drawn, last, dtype, key)

            keys = jax.random.split(second, drawn.depth)
            self.stack = equinox.filter_vmap(make_block)(keys)

        def __call__(self, token: jax.Array, x: jax.Array) -> jax.Array:
            x = x + self.embed(token)
            for block in self.blocks:
                x = block(x)
            arrays, rest = equinox.partition(self.stack, equinox.is_array)

            def layer(x: jax.Array, arrays: Any) -> Any:
                return equinox.combine(arrays, rest)(x), None

            x, _ = jax.lax.scan(jax.checkpoint(layer), x, arrays)
            return self.embed.weight @ x

    return Net


EQUINOX_NAMES = {
    "up/kernel": "up/weight",
    "up/bias": "up/bias",
    "down/kernel": "down/weight",
}


class EquinoxModel(PureModel):
    """Equinox has no annotations, so a model has rules, and arrays that are divided."""

    def make_net(self, drawn: Drawn, dtype: Any) -> Callable[[], Any]:
        net = make_equinox_classes()
        return lambda: net(drawn, dtype)

    @staticmethod
    def rules(drawn: Drawn) -> dict[str, PartitionSpec]:
        """Returns a rule for each annotation that is not the division of an array."""
        rules: dict[str, PartitionSpec] = {}
        for path in drawn.names:
            spec = drawn.spec(path)
            if spec is not None and not _is_placed(path, drawn):
                rules[f"params/{_in_equinox(path)}$"] = spec
        return rules

    def place(self, state: Any, strategy: Any, drawn: Drawn) -> Any:
        if strategy.mesh is None:
            return state

        def divide(keys: Any, leaf: Any) -> Any:
            path = "/".join(_name_of(key) for key in keys)
            for short in drawn.names:
                spec = drawn.spec(short)
                is_meant = path.endswith(f"params/{_in_equinox(short)}")
                if is_meant and spec is not None and _is_placed(short, drawn):
                    return jax.device_put(leaf, NamedSharding(strategy.mesh, spec))
            return leaf

        return jax.tree_util.tree_map_with_path(divide, state)

    def apply(self, params: Any, batch: Any) -> jax.Array:
        return jax.vmap(params)(batch["tokens"], batch["x"])

    def arrays(self) -> dict[str, list[jax.Array]]:
        found: dict[str, list[jax.Array]] = {"embedding": []}
        for tree in self.trees:
            found["embedding"].append(tree.embed.weight)
            blocks = [*enumerate(tree.blocks), ("stack", tree.stack)]
            for path, block in blocks:
                place = path if path == "stack" else f"blocks/{path}"
                for layer, own in EQUINOX_NAMES.items():
                    part, name = own.split("/")
                    array = getattr(getattr(block, part), name)
                    found.setdefault(f"{place}/{layer}", []).append(array)
        return found


def _is_placed(path: str, drawn: Drawn) -> bool:
    """Returns whether a drawn array is divided by hand, and not by a rule.

    An array that is whole on each device has to be divided by a rule.
    """
    is_whole = not any(drawn.names[path] or ())
    return not is_whole and len(path) % 2 == drawn.seed % 2


def _in_equinox(path: str) -> str:
    if path == "embedding":
        return "embed/weight"
    place, part, name = path.rsplit("/", 2)
    return f"{place}/{EQUINOX_NAMES[f'{part}/{name}']}"


def _name_of(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


# All libraries

LIBRARIES: dict[str, type[Any]] = {
    "nnx": NnxModel,
    "linen": LinenModel,
    "equinox": EquinoxModel,
}


def born(strategy: Any, drawn: Drawn, make: Callable[..., Any], dtype: Any) -> Any:
    """Makes a state before training: in parts, in the scope, or on one device."""
    args = () if dtype is None else (drawn, dtype)
    if drawn.birth == "make":
        return strategy.make(make, *args)
    if drawn.birth == "scope":
        with strategy.scope():
            return make(*args)
    return make(*args)


def run_steps(strategy: Any, data: Any, step: Any, num_steps: int) -> list[float]:
    """Returns the loss of each step of a function of a batch."""
    source = armillary.data.from_arrays(data, batch_size=16, repeat=True)
    batches = iter(strategy.distribute_dataset(source))
    return [float(step(next(batches))) for _ in range(num_steps)]


def make_strategy(library: str, drawn: Drawn, mesh: Any) -> armillary.ShardedStrategy:
    """Returns a strategy with the rules of a drawn model."""
    rules = EquinoxModel.rules(drawn) if library == "equinox" else None
    return armillary.ShardedStrategy(
        mesh,
        rules,
        logical_rules=drawn.logical_rules,
        batch_axes=drawn.batch_axes,
    )


def find_misplaced(drawn: Drawn, model: Model, mesh: Any) -> list[str]:
    """Returns the paths of the arrays that do not lie where their annotation says."""
    misplaced: list[str] = []
    arrays = model.arrays()
    assert arrays.keys() == drawn.names.keys()
    for path, copies in arrays.items():
        assert len(copies) == 3
        spec = drawn.spec(path)
        if spec is None:
            continue
        for array in copies:
            expected = NamedSharding(mesh, spec)
            if not array.sharding.is_equivalent_to(expected, array.ndim):
                misplaced.append(f"{path}: {array.sharding} is not {spec}")
    return misplaced
