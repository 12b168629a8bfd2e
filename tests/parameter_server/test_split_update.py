"""Tests of optimizers split by variable: equal numbers, or a refusal by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from armillary.parameter_server._optimizers import (
    LocalUpdate,
    SplitUpdate,
    UpdateSpec,
    flat_update,
)
from armillary.parameter_server._server import type_of

NAMES = {0: "kernel", 1: "bias"}


def make_case(transformation):
    """Returns the optimizer, how it is called, and what its variables hold."""
    transformation = optax.with_extra_args_support(transformation)
    rng = np.random.default_rng(0)
    params = {
        "kernel": jnp.asarray(rng.normal(size=(5, 3)), jnp.float32),
        "bias": jnp.asarray(rng.normal(size=(3,)), jnp.float32),
    }
    state = transformation.init(params)
    leaves = [params["kernel"], params["bias"], *jax.tree.leaves(state)]
    # Trees are in the order of their keys: the bias comes first.
    trees = (
        jax.tree.structure(params),
        jax.tree.structure(state),
        jax.tree.structure(params),
    )
    spec = UpdateSpec(0, trees, list(range(2, len(leaves))), [1, 0])
    types = dict(enumerate(map(type_of, leaves)))
    return transformation, spec, types, leaves


def make_split(transformation, spec, types):
    return SplitUpdate(
        transformation, spec, types, {i: NAMES.get(i, f"s{i}") for i in types}
    )


def swapped_traces(updates, state, params=None):
    """Updates each variable by what the other was given a step ago."""
    kernel, bias = state["kernel"], state["bias"]
    new = {"kernel": updates["kernel"], "bias": updates["bias"] + kernel.sum()}
    return {"kernel": kernel, "bias": bias}, new


def times_constant(x):
    return x * np.full(x.shape, 2.0, "float32") if x.shape == (5, 3) else x


ELEMENTWISE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.01),
    "adamw": optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1),
    "lion": optax.lion(0.01),
    "rmsprop": optax.rmsprop(0.01, centered=True),
    "clip": optax.chain(optax.clip(0.1), optax.adagrad(0.1)),
    "masked": optax.masked(optax.adam(0.1), {"kernel": True, "bias": False}),
    "labels": optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"kernel": "a", "bias": "b"}
    ),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_parts_on_several_servers_are_updated_as_a_whole(name):
    cloudpickle = pytest.importorskip("ray").cloudpickle
    transformation, spec, types, leaves = make_case(ELEMENTWISE[name])
    split = make_split(transformation, spec, types)
    assert split.is_rowwise(0)
    # The kernel in two parts, and the bias on a third server.
    rows = {(0, 0): slice(0, 3), (0, 1): slice(3, 5), (1, 0): slice(None)}
    dumped = cloudpickle.dumps(tuple(transformation))
    update = LocalUpdate(dumped, spec, split.owners, types).make()
    values = [{}, {}, {}]
    for server, (slot, number) in enumerate(rows):
        for i, leaf in enumerate(leaves):
            owner = split.owners.get(i, i)
            if owner is None:
                values[server][i, 0] = leaf
            elif owner == slot:
                values[server][i, number] = leaf[rows[slot, number]]
    whole = list(leaves)
    for step in range(3):
        rng = np.random.default_rng(step)
        gradients = [
            jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves[:2]
        ]
        update_all = flat_update(transformation, spec)
        bias, kernel, *new = update_all(*gradients[::-1], *whole[2:], *whole[1::-1])
        whole = [whole[0] + kernel, whole[1] + bias, *new]
        for held, ((slot, number), part) in zip(values, rows.items(), strict=True):
            held.update(update({(slot, number): gradients[slot][part]}, held))
    for (slot, number), held in zip(rows, values, strict=True):
        for (i, _), value in held.items():
            expected = whole[i]
            if split.owners.get(i, i) is not None:
                expected = expected[rows[slot, number]]
            np.testing.assert_allclose(
                value, expected, rtol=1e-6, err_msg=f"{name} {i}"
            )


@pytest.mark.parametrize(
    "transformation",
    [
        optax.adafactor(0.1, min_dim_size_to_factor=2),
        optax.lamb(0.1),
        optax.chain(optax.clip_by_block_rms(1e6), optax.sgd(0.1)),
        optax.stateless(lambda u, p: jax.tree.map(lambda x: x / x.shape[0], u)),
        optax.stateless(lambda u, p: jax.tree.map(times_constant, u)),
        optax.stateless(
            lambda u, p: jax.tree.map(lambda x: x - x.sum(0, keepdims=True), u)
        ),
        optax.stateless(lambda u, p: jax.tree.map(lambda x: x[::-1], u)),
        optax.stateless(lambda u, p: jax.tree.map(lambda x: jnp.sort(x, 0), u)),
    ],
    ids=["adafactor", "lamb", "rms", "shape", "constant", "sum", "turned", "sorted"],
)
def test_an_optimizer_that_uses_a_whole_variable_leaves_it_whole(transformation):
    transformation, spec, types, _ = make_case(transformation)
    assert not make_split(transformation, spec, types).is_rowwise(0)


@pytest.mark.parametrize(
    "transformation",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        optax.apply_if_finite(optax.adam(0.1), 3),
        optax.GradientTransformation(lambda p: p, swapped_traces),
    ],
    ids=["global norm", "if finite", "a step ago"],
)
def test_an_optimizer_that_uses_several_variables_is_refused(transformation):
    transformation, spec, types, _ = make_case(transformation)
    with pytest.raises(ValueError, match=r"from several variables .*global_norm"):
        make_split(transformation, spec, types)
