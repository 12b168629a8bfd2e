"""Tests of adapters on layers: their outputs, merging, and what is refused."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import armillary
from tests.lora.models import WHERE, Network, make_tokens, set_adapters

lora = armillary.lora


def add(model, where="kernel", rank=2, **options):
    return lora.add(model, rank=rank, where=where, rngs=nnx.Rngs(1), **options)


def read_all(model):
    return {
        path: np.array(value) for path, value in nnx.to_flat_state(nnx.state(model))
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path])


def test_new_adapters_change_neither_outputs_nor_paths():
    model = Network(nnx.Rngs(0))
    before = read_all(model)
    expected = np.array(model(make_tokens()))
    embed = model.embed

    paths = add(model, WHERE)

    assert paths == [
        "embed/embedding",
        *(f"blocks/attention/{n}/kernel" for n in ("key", "out", "query", "value")),
        *("blocks/down/kernel", "blocks/up/kernel", "mix/kernel", "join/kernel"),
    ]
    np.testing.assert_array_equal(model(make_tokens()), expected)
    assert model.embed is embed
    assert isinstance(embed, nnx.Embed)
    base = {
        p: v for p, v in read_all(model).items() if not str(p[-1]).startswith("lora")
    }
    assert_equal(base, before)
    shapes = {path: value.shape for path, value in read_all(model).items()}
    # Each of the two blocks of the stack has an adapter of its own.
    assert shapes["blocks", "attention", "query", "lora_a"] == (2, 8, 2)
    assert shapes["blocks", "attention", "query", "lora_b"] == (2, 2, 2, 4)
    a = model.blocks.attention.query.lora_a[...]
    assert not np.array_equal(a[0], a[1])


@pytest.mark.slow
def test_a_merged_model_computes_what_the_adapted_model_does():
    model = Network(nnx.Rngs(0))
    expected = read_all(model)
    base_outputs = np.array(model(make_tokens()))
    add(model, WHERE, alpha=3)
    set_adapters(model)
    adapted = np.array(model(make_tokens()))
    assert np.abs(adapted - base_outputs).max() > 0.1

    merged = lora.merge(model)
    np.testing.assert_allclose(merged(make_tokens()), adapted, rtol=1e-4, atol=1e-5)
    assert type(merged.embed) is nnx.Embed
    assert nnx.state(merged, nnx.LoRAParam) == nnx.State({})
    # The adapted model is as it was, and its base comes back bit for bit.
    np.testing.assert_array_equal(model(make_tokens()), adapted)
    lora.remove(model)
    assert type(model.embed) is nnx.Embed
    assert_equal(read_all(model), expected)
    np.testing.assert_array_equal(model(make_tokens()), base_outputs)


LAYERS = {
    "linear": (nnx.Linear, (6, 5), {}, (3, 6)),
    "general": (nnx.LinearGeneral, (6, (2, 3)), {}, (3, 6)),
    "two axes": (nnx.LinearGeneral, ((2, 3), 5), {"axis": (1, -1)}, (4, 2, 3)),
    "batch": (nnx.LinearGeneral, (6, 5), {"batch_axis": {0: 4}}, (4, 3, 6)),
    "heads": (nnx.Einsum, ("btd,hde->bthe", (2, 6, 3)), {}, (4, 5, 6)),
    "experts": (nnx.Einsum, ("e...d,edf->e...f", (3, 6, 5)), {}, (3, 4, 2, 6)),
    "no bias": (nnx.Linear, (6, 5), {"use_bias": False}, (2, 3, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_computes_with_the_sum_of_weight_and_product(name):
    kind, arguments, options, shape = LAYERS[name]
    layer = kind(*arguments, **options, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    before = np.array(layer(x))
    add(layer, alpha=1)
    np.testing.assert_array_equal(layer(x), before)
    set_adapters(layer)
    outputs = layer(x)
    assert np.abs(outputs - before).max() > 0.01
    np.testing.assert_allclose(lora.merge(layer)(x), outputs, rtol=1e-4, atol=1e-5)


def test_the_sum_of_a_linear_layer_is_the_formula():
    layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    add(layer, rank=2, alpha=6)
    set_adapters(layer)
    product = np.array(layer.lora_a[...]) @ np.array(layer.lora_b[...])
    expected = np.array(layer.kernel[...]) + 3 * product
    np.testing.assert_allclose(lora.merge(layer).kernel[...], expected, rtol=1e-6)


def test_an_adapter_keeps_the_dtype_of_its_layer():
    layer = nnx.Linear(
        4, 3, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    add(layer)
    set_adapters(layer)
    assert layer.lora_a.dtype == jnp.float32
    assert layer(jnp.ones((2, 4))).dtype == jnp.bfloat16
    assert lora.merge(layer).kernel.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_merged_weight_is_rounded_once_to_its_own_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        layer = nnx.Linear(4, 3, param_dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
        weight = np.full((4, 3), 1 / 3, layer.kernel.dtype)
        layer.kernel.set_value(jnp.asarray(weight))
        add(layer, alpha=3)
        set_adapters(layer)
        a = np.asarray(layer.lora_a[...], np.float64)
        b = np.asarray(layer.lora_b[...], np.float64)
        exact = weight.astype(np.float64) + 1.5 * a @ b
        merged = np.asarray(lora.merge(layer).kernel[...])
    assert merged.dtype == weight.dtype
    error = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-6, "float64": 1e-14}
    found = merged.astype(np.float64)
    np.testing.assert_allclose(found, exact, rtol=error[dtype])


def test_a_weight_in_the_memory_of_the_host_is_merged_there():
    mesh = Mesh(np.array(jax.devices()[:2]), "fsdp")
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"), memory_kind="pinned_host")
    check_merged_in_place(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), sharding)


def check_merged_in_place(layer, sharding):
    """Checks that a weight is merged where it lies, with the same values."""
    add(layer)
    set_adapters(layer)
    expected = lora.merge(layer).kernel[...]
    layer.kernel.set_value(jax.device_put(layer.kernel[...], sharding))
    merged = lora.merge(layer).kernel[...]
    assert merged.sharding == sharding
    np.testing.assert_allclose(merged, expected, rtol=1e-6)


def test_first_values_are_drawn_for_each_layer_with_the_variance_of_he():
    model = nnx.Dict(
        first=nnx.Linear(256, 64, rngs=nnx.Rngs(0)),
        second=nnx.Linear(256, 64, rngs=nnx.Rngs(0)),
        joined=nnx.LinearGeneral((16, 16), 64, axis=(-2, -1), rngs=nnx.Rngs(0)),
        embed=nnx.Embed(300, 64, rngs=nnx.Rngs(0)),
        stack=nnx.split_rngs(splits=3)(
            nnx.vmap(lambda rngs: nnx.Linear(256, 64, rngs=rngs))
        )(nnx.Rngs(0)),
    )
    add(model, WHERE, rank=8)
    drawn = [
        *(model[name].lora_a[...] for name in ("first", "second", "joined")),
        *model.stack.lora_a[...],
    ]
    for values in drawn:
        # Uniform in an interval of this size, as He et al. (2015) have it.
        limit = (6 / 256) ** 0.5
        assert 0.99 * limit < np.abs(values).max() <= limit
        np.testing.assert_allclose(np.std(values), (2 / 256) ** 0.5, rtol=0.1)
    firsts = {float(values.ravel()[0]) for values in drawn}
    assert len(firsts) == len(drawn)
    np.testing.assert_allclose(np.std(model.embed.lora_b[...]), 0.5, rtol=0.1)
    assert not np.any(model.embed.lora_a[...])


def test_a_model_with_adapters_can_be_pickled():
    model = Network(nnx.Rngs(0))
    add(model, WHERE, alpha=3)
    set_adapters(model)
    again = pickle.loads(pickle.dumps(model))
    assert type(again.embed) is type(model.embed)
    np.testing.assert_array_equal(again(make_tokens()), model(make_tokens()))
    lora.remove(again)
    assert type(again.embed) is nnx.Embed


def test_adapters_get_the_names_of_the_axes_of_their_weight():
    layer = nnx.LinearGeneral(8, (2, 4), rngs=nnx.Rngs(0))
    layer.kernel.set_metadata("out_sharding", ("embed", "heads", None))
    add(layer)
    assert layer.lora_a.get_metadata("out_sharding") == ("embed", None)
    assert layer.lora_b.get_metadata("out_sharding") == (None, "heads", None)


def test_a_merged_weight_has_the_sharding_of_the_weight():
    mesh = Mesh(np.array(jax.devices()[:4]), "fsdp")
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    check_merged_in_place(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), sharding)


def test_the_base_is_all_parameters_but_the_adapters():
    model = Network(nnx.Rngs(0))
    num_before = len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    add(model, "up/kernel")
    base = lora.base(model)
    assert len(base) == num_before
    assert not any(isinstance(variable, nnx.LoRAParam) for variable in base)
    # Flax's own adapters count, too.
    own = nnx.LoRA(
        4, 2, 3, base_module=nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)
    )
    assert len(lora.base(own)) == 2


class Doubled(nnx.Linear):
    """A layer that computes something else."""

    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs, out_sharding)


class Named(nnx.Linear):
    """A layer with another constructor."""

    def __init__(self, rngs):
        super().__init__(4, 4, rngs=rngs)


class Tied(nnx.Module):
    """Two layers with one kernel."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.second = nnx.Linear(4, 4, rngs=rngs)
        self.second.kernel = self.first.kernel


def test_a_subclass_with_the_same_call_can_have_an_adapter():
    layer = Named(nnx.Rngs(0))
    add(layer)
    assert isinstance(layer, Named)
    assert type(lora.merge(layer)) is Named


def make_stack_with_axis_last():
    make = nnx.vmap(
        lambda rngs: nnx.Linear(4, 3, use_bias=False, rngs=rngs), out_axes=2
    )
    layer = nnx.split_rngs(splits=2)(make)(nnx.Rngs(0))
    return nnx.List([layer])


def make_with_kernel(value):
    layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    layer.kernel.set_value(value)
    return layer


REFUSED = {
    "norm": (lambda rngs: nnx.LayerNorm(4, rngs=rngs), "scale", "not the weight"),
    "convolution": (lambda rngs: nnx.Conv(2, 2, (3,), rngs=rngs), "", "not the weight"),
    "own call": (lambda rngs: Doubled(4, 4, rngs=rngs), "", "`__call__` of its own"),
    "tied": (Tied, "", "2 layers share it"),
    "int8": (lambda _: make_with_kernel(jnp.ones((4, 3), jnp.int8)), "", "QLoRA"),
    "float8": (
        lambda _: make_with_kernel(jnp.ones((4, 3), jnp.float8_e5m2)),
        *("", "its dtype is float8_e5m2"),
    ),
    "of NumPy": (
        lambda _: make_with_kernel(np.ones((4, 3), np.float32)),
        *("", "its value is a `numpy.ndarray`, not an array of JAX (`jnp.asarray`)"),
    ),
    "traced equation": (
        lambda rngs: nnx.Einsum("bd,ddk->bk", (4, 4, 3), rngs=rngs),
        *("", "equation 'bd,ddk->bk'"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_that_cannot_have_an_adapter_is_refused_by_name(name):
    make, where, reason = REFUSED[name]
    model = nnx.List([make(nnx.Rngs(0))])
    with pytest.raises(ValueError) as error:
        add(model, where or "kernel")
    assert "`where` is" in str(error.value)
    assert f"0/{'first/' if name == 'tied' else ''}{where or 'kernel'}: " in str(
        error.value
    )
    assert reason in str(error.value)
    assert "`nnx.Linear`" in str(error.value)


def test_a_stack_whose_axis_is_not_first_is_refused():
    with pytest.raises(ValueError, match="axes of a stack of layers must come first"):
        add(make_stack_with_axis_last())


def test_nothing_changes_if_one_parameter_is_refused():
    model = Network(nnx.Rngs(0))
    before = read_all(model)
    with pytest.raises(ValueError, match="blocks/up/bias") as error:
        add(model, "blocks/up")
    assert "'blocks/up/kernel', which is one" in str(error.value)
    assert_equal(read_all(model), before)
    assert type(model.blocks.up) is nnx.Linear


def test_a_second_adapter_is_refused():
    layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    add(layer)
    with pytest.raises(ValueError, match=r"has an adapter already \(`armillary\.lora"):
        add(layer)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"where": "attn"},
            ValueError,
            ["`where`", "'attn'", "none of these", "kernel"],
        ),
        ({"where": "("}, ValueError, ["`where`", "regular expression"]),
        ({"where": None}, TypeError, ["`where`", "None"]),
        ({"rank": 0}, ValueError, ["`rank`", "0"]),
        ({"rank": 4}, ValueError, ["`rank`", "at most 3", "rows and columns"]),
        ({"alpha": -1}, ValueError, ["`alpha`", "-1"]),
        ({"alpha": 0}, ValueError, ["`alpha` is 0", "positive", "Use `alpha=4`"]),
        ({"alpha": float("nan")}, ValueError, ["`alpha` is nan", "finite"]),
        ({"rngs": 0}, TypeError, ["`rngs`", "nnx.Rngs(1)"]),
        (
            {"rngs": nnx.Rngs(dropout=0)},
            ValueError,
            ["`rngs`", "stream `params`", "nnx.Rngs(1)"],
        ),
        ({"model": {}}, TypeError, ["`model`", "Flax NNX"]),
    ],
)
def test_a_wrong_argument_is_refused(options, error, words):
    usual = {
        "model": nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
        "rank": 2,
        "where": "kernel",
        "rngs": nnx.Rngs(1),
    }
    arguments = {**usual, **options}
    model = arguments.pop("model")
    with pytest.raises(error) as found:
        lora.add(model, **arguments)
    for word in words:
        assert word in str(found.value)


@pytest.mark.parametrize("function", [lora.merge, lora.remove, lora.base])
def test_a_model_without_adapters_is_refused(function):
    with pytest.raises(ValueError, match=r"armillary\.lora\.add\(model"):
        function(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="`model`"):
        function({})
