"""Every layer and every metric of Flax NNX, and changes to a model between loops."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from armillary.errors import ReplicaMismatchError
from tests.differential.harness import (
    CLASSES,
    WIDTH,
    Batch,
    Case,
    Refusal,
    Replica,
    by_shard,
    training,
    widen,
)

Call = Callable[[Any, Any], Any]
AT_TWO = ((2, 1), (1, 1, 1))
MEAN_NOTE = "batch statistics are the mean over the statistics of the replicas"
HAS_ROPE = hasattr(nnx, "RoPE")  # Flax 0.12.12 has it.
KEY_NOTE = "each replica draws from its own key"


def error(output: Any, batch: Batch) -> Any:
    """Returns the squared error of each example, from an output of any shape."""
    rows = batch["x"].shape[0]
    return (jnp.tanh(output).reshape(rows, -1).mean(1) - batch["y"]) ** 2


def flat(x: Any) -> Any:
    return x


def sequence(x: Any) -> Any:
    """Returns the features as a sequence of three."""
    return x.reshape(x.shape[0], 3, 2)


def image(x: Any) -> Any:
    """Returns the features as an image of one channel."""
    return x.reshape(x.shape[0], 3, 2, 1)


def layer(
    name: str,
    make: Callable[..., Any],
    *args: Any,
    see: Call | Callable[[Any], Any] = flat,
    call: Call = lambda model, x: model(x),
    build: Callable[..., Case] = training,
    note: str = "",
    tolerance: float = 1e-8,
    between: Callable[[Any, int], None] | None = None,
    is_here: bool = True,
    **options: Any,
) -> Case:
    """Returns a case that trains one layer."""

    def make_layer() -> Any:
        kwargs = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0), **options}
        return make(*args, **{k: v for k, v in kwargs.items() if v is not None})

    def losses(model: Any, batch: Batch) -> Any:
        return error(call(model, see(batch["x"])), batch)

    rest = {"note": note, "tolerance": tolerance, "between": between}
    rest["is_here"] = is_here
    if between is not None:
        rest["loops"] = AT_TWO
    return build(name, make_layer, losses, **rest)


def _rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


def _linear(rngs: nnx.Rngs | None = None) -> nnx.Linear:
    return nnx.Linear(WIDTH, 4, param_dtype=jnp.float64, rngs=rngs or _rngs())


class Network(nnx.Module):
    """Two layers, with what is given between them."""

    def __init__(self, *between: Any) -> None:
        rngs = _rngs()
        self.first = _linear(rngs)
        self.between = nnx.List(between)
        self.last = nnx.Linear(4, 1, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        for part in self.between:
            x = part(x)
        return self.last(nnx.relu(x))


def _attention(**options: Any) -> nnx.MultiHeadAttention:
    options = {"deterministic": True, "decode": False, **options}
    return nnx.MultiHeadAttention(
        **{"num_heads": 2, "in_features": 2, **options},
        param_dtype=jnp.float64,
        rngs=_rngs(),
    )


class _Rotated(nnx.Module):
    """A layer, and what it makes turned by its positions."""

    def __init__(self, rope: Any) -> None:
        self.linear = nnx.Linear(2, 2, param_dtype=jnp.float64, rngs=_rngs())
        self.rope = rope

    def __call__(self, x: Any) -> Any:
        return self.rope(self.linear(x))


def _attention_with_rope() -> nnx.MultiHeadAttention:
    rope = nnx.RoPE(embedding_size=4, max_seq_len=4)
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    return _attention(qkv_features=8, attention_fn=attend)


def _attend_causally(model: Any, x: Any) -> Any:
    mask = nnx.combine_masks(
        nnx.make_causal_mask(x[..., 0]),
        nnx.make_attention_mask(x[..., 0] > -9, x[..., 0] > -9),
    )
    return model(x, mask=mask)


def _decode(model: Any, x: Any) -> Any:
    """Attends to a growing cache, on a copy of the model that lives in this step."""
    copy = nnx.merge(*nnx.split(model), copy=True)
    copy.init_cache(x.shape, x.dtype)
    outputs = [copy(x[:, i : i + 1], decode=True) for i in range(x.shape[1])]
    return jnp.concatenate(outputs, axis=1)


def _rnn(cell: Any, **options: Any) -> Callable[..., Any]:
    def make(**kwargs: Any) -> Any:
        return nnx.RNN(
            cell(2, 3, dtype=jnp.float64, **kwargs), rngs=kwargs["rngs"], **options
        )

    return make


def _birnn(**kwargs: Any) -> Any:
    forward, backward = (nnx.RNN(nnx.GRUCell(2, 3, **kwargs)) for _ in range(2))
    return nnx.Bidirectional(forward, backward, rngs=kwargs["rngs"])


def _pooling(fn: Callable[..., Any]) -> Case:
    def losses(model: Any, batch: Batch) -> Any:
        pooled = fn(sequence(model(batch["x"])[:, :6]), (2,))
        return error(pooled, batch)

    def make() -> Any:
        return nnx.Linear(WIDTH, WIDTH, rngs=_rngs())

    return training(f"nnx.{fn.__name__}", make, losses)


def _pool(x: Any, window: Any) -> Any:
    return nnx.pool(x, 0.0, jax.lax.add, window, (1,), "SAME")


_pool.__name__ = "pool"


def _embed_losses(model: Any, batch: Batch) -> Any:
    logits = model.attend(model(batch["label"]) + batch["x"][:, :4])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


class Tied(nnx.Module):
    """One kernel that two layers share."""

    def __init__(self) -> None:
        self.encode = _linear()
        self.decode = nnx.Linear(4, WIDTH, param_dtype=jnp.float64, rngs=_rngs())
        self.same = self.encode

    def __call__(self, x: Any) -> Any:
        return self.same(self.decode(self.encode(x)))


class Sower(nnx.Module):
    """Keeps what it saw, and its loss takes it out again."""

    def __init__(self) -> None:
        self.linear = _linear()

    def __call__(self, x: Any) -> Any:
        x = self.linear(x)
        self.sow(nnx.Intermediate, "seen", x)
        return x


def _sow_losses(model: Any, batch: Batch) -> Any:
    output = model(batch["x"])
    seen = nnx.pop(model, nnx.Intermediate)
    return error(output + sum(jax.tree.leaves(seen)), batch)


LAYERS = [
    layer("nnx.Linear", nnx.Linear, WIDTH, 4),
    layer(
        "nnx.LinearGeneral",
        nnx.LinearGeneral,
        (3, 2),
        (2, 2),
        axis=(-2, -1),
        see=sequence,
    ),
    layer("nnx.Einsum", nnx.Einsum, "bi,ij->bj", (WIDTH, 4), (4,)),
    layer("nnx.Conv", nnx.Conv, 1, 2, (2, 2), see=image),
    layer(
        "nnx.Conv (1-D, strides, dilation, groups)",
        nnx.Conv,
        2,
        4,
        (2,),
        see=sequence,
        strides=1,
        kernel_dilation=2,
        feature_group_count=2,
    ),
    layer("nnx.Conv (causal)", nnx.Conv, 2, 4, (2,), see=sequence, padding="CAUSAL"),
    layer("nnx.ConvTranspose", nnx.ConvTranspose, 1, 2, (2, 2), see=image),
    training(
        "nnx.Embed",
        lambda: nnx.Embed(CLASSES, 4, rngs=_rngs()),
        _embed_losses,
        tolerance=1e-5,
    ),
    layer("nnx.PReLU", lambda **_: Network(nnx.PReLU(param_dtype=jnp.float64))),
    layer(
        "nnx.Sequential",
        lambda **_: nnx.Sequential(
            _linear(), nnx.relu, nnx.Linear(4, 1, param_dtype=jnp.float64, rngs=_rngs())
        ),
    ),
    layer("nnx.List", lambda **_: Network(nnx.relu, nnx.tanh)),
    layer(
        "nnx.Dict",
        lambda **_: nnx.Dict(a=_linear(), b=_linear(nnx.Rngs(1))),
        call=lambda model, x: model["a"](x) * model["b"](x),
    ),
    layer("nnx.LayerNorm", lambda **_: Network(nnx.LayerNorm(4, rngs=_rngs()))),
    layer("nnx.RMSNorm", lambda **_: Network(nnx.RMSNorm(4, rngs=_rngs()))),
    layer("nnx.GroupNorm", lambda **_: Network(nnx.GroupNorm(4, 2, rngs=_rngs()))),
    layer(
        "nnx.InstanceNorm", lambda **_: nnx.InstanceNorm(2, rngs=_rngs()), see=sequence
    ),
    layer(
        "nnx.BatchNorm",
        lambda **_: Network(nnx.BatchNorm(4, rngs=_rngs())),
        build=by_shard,
        note=MEAN_NOTE,
    ),
    layer(
        "nnx.BatchNorm(use_running_average=True)",
        lambda **_: Network(nnx.BatchNorm(4, use_running_average=True, rngs=_rngs())),
    ),
    layer(
        "nnx.SpectralNorm",
        lambda **_: nnx.SpectralNorm(_linear(), rngs=_rngs()),
        call=lambda model, x: model(x, update_stats=True),
    ),
    layer("nnx.WeightNorm", lambda **_: nnx.WeightNorm(_linear(), rngs=_rngs())),
    layer(
        "nnx.Dropout",
        lambda **_: Network(nnx.Dropout(0.5, rngs=_rngs())),
        build=by_shard,
        note=KEY_NOTE,
    ),
    layer(
        "nnx.Dropout(deterministic=True)",
        lambda **_: Network(nnx.Dropout(0.5, deterministic=True, rngs=_rngs())),
    ),
    layer(
        "nnx.BatchNorm and nnx.Dropout",
        lambda **_: Network(
            nnx.BatchNorm(4, rngs=_rngs()), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        ),
        build=by_shard,
        note=f"{MEAN_NOTE}; {KEY_NOTE}",
    ),
    layer("nnx.LoRA", nnx.LoRA, WIDTH, 2, 4, base_module=None),
    layer(
        "nnx.LoRA(base_module=...)",
        lambda **_: nnx.LoRA(
            WIDTH, 2, 4, base_module=_linear(), param_dtype=jnp.float64, rngs=_rngs()
        ),
    ),
    layer("nnx.LoRALinear", nnx.LoRALinear, WIDTH, 4, lora_rank=2),
    layer(
        "nnx.MultiHeadAttention", lambda **_: _attention(), see=sequence, tolerance=1e-5
    ),
    layer(
        "nnx.MultiHeadAttention (masked, cross)",
        lambda **_: _attention(),
        see=sequence,
        tolerance=1e-5,
        call=_attend_causally,
    ),
    layer(
        "nnx.MultiHeadAttention (grouped queries)",
        lambda **_: _attention(num_heads=4, qkv_features=8, num_kv_heads=2),
        see=sequence,
        tolerance=1e-5,
    ),
    layer(
        "nnx.MultiHeadAttention (dropout)",
        lambda **_: _attention(
            dropout_rate=0.5, broadcast_dropout=False, deterministic=False, decode=False
        ),
        see=sequence,
        tolerance=1e-5,
        build=by_shard,
        note=KEY_NOTE,
    ),
    layer(
        "nnx.MultiHeadAttention (decoding within a step)",
        lambda **_: _attention(),
        see=sequence,
        call=_decode,
        tolerance=1e-5,
        note="on a copy of the model made in the step",
    ),
    layer(
        "nnx.dot_product_attention",
        nnx.Linear,
        WIDTH,
        12,
        tolerance=1e-5,
        call=lambda model, x: nnx.dot_product_attention(
            *jnp.split(model(x).reshape(-1, 2, 2, 3), 3, -1)
        ),
    ),
    layer(
        "nnx.RoPE",
        lambda **_: _Rotated(nnx.RoPE(embedding_size=2, max_seq_len=4)),
        see=sequence,
        tolerance=1e-5,
        is_here=HAS_ROPE,
    ),
    layer(
        "nnx.RoPE (in nnx.MultiHeadAttention)",
        lambda **_: _attention_with_rope(),
        see=sequence,
        tolerance=1e-5,
        is_here=HAS_ROPE,
    ),
    layer("nnx.SimpleCell", _rnn(nnx.SimpleCell), see=sequence),
    layer("nnx.GRUCell", _rnn(nnx.GRUCell), see=sequence),
    layer("nnx.LSTMCell", _rnn(nnx.LSTMCell), see=sequence),
    layer("nnx.OptimizedLSTMCell", _rnn(nnx.OptimizedLSTMCell), see=sequence),
    layer(
        "nnx.RNN (reverse, unrolled)",
        _rnn(nnx.GRUCell, reverse=True, unroll=3),
        see=sequence,
    ),
    layer(
        "nnx.RNN (seq_lengths)",
        _rnn(nnx.GRUCell, return_carry=True),
        see=sequence,
        call=lambda model, x: model(
            x, seq_lengths=1 + (x[:, 0, 0] > 0).astype("int32")
        )[0],
    ),
    layer("nnx.Bidirectional", _birnn, see=sequence),
    *(_pooling(fn) for fn in (nnx.avg_pool, nnx.max_pool, nnx.min_pool, _pool)),
    layer("a layer used under two names", lambda **_: Tied()),
    training("nnx.Module.sow and nnx.pop", Sower, _sow_losses),
]


class Measured(nnx.Module):
    """A metric of random logits."""

    def __init__(self, metric: Any) -> None:
        self.model, self.metric = _linear(), metric


def metric(
    name: str, make: Callable[[], Any], update: Callable[..., Any], **options: Any
) -> Case:
    """Returns a case that updates a metric."""

    def step(state: Any, batch: Batch, replica: Replica) -> None:
        logits = state.model(batch["x"])[:, :CLASSES]
        if update.__code__.co_argcount == 4:
            update(state.metric, logits, batch, replica)
        else:
            update(state.metric, logits, batch)

    return Case(name=name, make=lambda: Measured(make()), step=step, **options)


def _update_accuracy(metric: Any, logits: Any, batch: Batch) -> None:
    metric.update(logits=logits, labels=batch["label"])


def _update_multi(metric: Any, logits: Any, batch: Batch) -> None:
    metric.update(logits=logits, labels=batch["label"], values=batch["y"])


def _reset_between(state: Any, done: int) -> None:
    if done == 2:
        state.metric.reset()


METRICS = [
    metric(
        "nnx.metrics.Average",
        lambda: widen(nnx.metrics.Average()),
        lambda m, _, b: m.update(values=b["y"]),
    ),
    metric(
        "nnx.metrics.Average (mask)",
        lambda: widen(nnx.metrics.Average()),
        lambda m, _, b: m.update(values=b["y"], mask=b["x"][:, 0] > 0),
    ),
    metric(
        "nnx.metrics.Welford",
        lambda: widen(nnx.metrics.Welford()),
        lambda m, _, b: m.update(values=b["y"]),
        refusal=Refusal(
            ReplicaMismatchError,
            "must be equal on all replicas",
            "the sum of the replicas' values is not the value of the whole batch: "
            "update it with gathered values",
        ),
    ),
    metric(
        "nnx.metrics.Welford (of gathered values)",
        lambda: widen(nnx.metrics.Welford()),
        lambda m, _, b, replica: m.update(values=replica.gather(b["y"])),
    ),
    metric(
        "nnx.metrics.Accuracy",
        lambda: widen(nnx.metrics.Accuracy()),
        _update_accuracy,
    ),
    metric(
        "nnx.metrics.Accuracy(threshold=...)",
        lambda: widen(nnx.metrics.Accuracy(threshold=0.5)),
        lambda m, logits, b: m.update(
            logits=logits[:, 0], labels=(b["label"] > 0).astype("int32")
        ),
    ),
    metric(
        "nnx.MultiMetric",
        covers=("nnx.metrics.MultiMetric",),
        make=lambda: widen(
            nnx.MultiMetric(
                accuracy=nnx.metrics.Accuracy(), average=nnx.metrics.Average()
            )
        ),
        update=_update_multi,
    ),
    metric(
        "nnx.metrics.Average (reset between loops)",
        lambda: widen(nnx.metrics.Average()),
        lambda m, _, b: m.update(values=b["y"]),
        between=_reset_between,
        loops=AT_TWO,
    ),
]


class Surgical(nnx.Module):
    """A model that grows, shrinks and freezes, and its optimizer."""

    def __init__(self, *between: Any) -> None:
        self.model = Network(*between)
        self.restart()

    def restart(self, wrt: Any = nnx.Param) -> None:
        """Makes a new optimizer, for the parameters that there are."""
        self.wrt = wrt
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=wrt)


def surgery(name: str, change: Callable[[Any], None], *between: Any) -> Case:
    """Returns a case that changes the model after two of three steps."""

    def step(state: Any, batch: Batch, replica: Replica) -> None:
        def loss_fn(model: Any) -> Any:
            return replica.average(error(model(batch["x"]), batch))

        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, state.wrt))(state.model)
        state.optimizer.update(state.model, replica.total(grads))

    def after(state: Any, done: int) -> None:
        if done == 2:
            change(state)

    def make() -> Any:
        return Surgical(*(part() for part in between))

    return Case(
        name=f"between loops: {name}",
        make=make,
        step=step,
        between=after,
        loops=AT_TWO,
    )


def _replace(state: Any) -> None:
    state.model.last = nnx.Linear(4, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(5))
    state.restart()


def _add(state: Any) -> None:
    extra = nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(5))
    state.model.between.append(extra)
    state.restart()


def _remove(state: Any) -> None:
    del state.model.between[0]
    state.restart()


def _freeze(state: Any) -> None:
    state.restart(nnx.All(nnx.Param, nnx.PathContains("last")))


def _freeze_by_metadata(state: Any) -> None:
    state.model.first.kernel.set_metadata(trainable=False)
    state.restart(
        lambda path, value: (
            isinstance(value, nnx.Param) and value.get_metadata().get("trainable", True)
        )
    )


def _swap_values(state: Any) -> None:
    state.model.first.kernel[...] = jnp.ones((WIDTH, 4))


def _lora(state: Any) -> None:
    state.model.first = nnx.LoRA(
        WIDTH,
        2,
        4,
        base_module=state.model.first,
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(5),
    )
    state.restart(nnx.LoRAParam)


def _second_linear() -> Any:
    return nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(3))


SURGERY = [
    surgery("replacing a layer", _replace),
    surgery("adding a layer", _add),
    surgery("removing a layer", _remove, _second_linear),
    surgery("freezing layers by a filter", _freeze),
    surgery("freezing a parameter by its metadata", _freeze_by_metadata),
    surgery("putting values into a parameter", _swap_values),
    surgery("wrapping a layer in LoRA", _lora),
]


def _switch_mode(name: str, make: Callable[[], Any]) -> Case:
    """Returns a case that goes over to evaluation mode after two of three steps."""

    def after(model: Any, done: int) -> None:
        if done == 2:
            model.eval()

    return layer(name, make, build=by_shard, between=after)


SWITCHES = [
    _switch_mode(
        "between loops: model.eval() with BatchNorm and Dropout",
        lambda **_: Network(
            nnx.BatchNorm(4, rngs=_rngs()), nnx.Dropout(0.5, rngs=_rngs())
        ),
    ),
]
CASES: list[Case] = [*LAYERS, *METRICS, *SURGERY, *SWITCHES]
