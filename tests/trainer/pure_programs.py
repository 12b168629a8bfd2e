"""Pure steps of several libraries, with statistics, keys and averages in the state."""

import functools
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

import armillary
from armillary.data import from_arrays

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")


DATA = {"x": X, "y": X @ np.array([1.0, -2.0, 3.0], "float32")}


SGD = optax.sgd(0.05, momentum=0.9)


NUM_REPLICAS = 4


def mean_over_replicas(tree):
    return jax.lax.pmean(tree, "replica")


def loss_of(predictions, batch):
    return jnp.mean((predictions[:, 0] - batch["y"]) ** 2)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        x = linen.Dense(4)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return linen.Dense(1)(x)


class StatefulTrainState(TrainState):
    batch_stats: Any


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


class EquinoxNet(equinox.Module):
    first: equinox.nn.Linear
    norm: equinox.nn.BatchNorm
    last: equinox.nn.Linear

    def __init__(self, mode):
        keys = jax.random.split(jax.random.key(1))
        self.first = equinox.nn.Linear(3, 4, key=keys[0])
        self.norm = equinox.nn.BatchNorm(4, axis_name="batch", mode=mode)
        self.last = equinox.nn.Linear(4, 1, key=keys[1])

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(x), state


class Program(NamedTuple):
    """A step, its first state, and where the statistics of batches lie in it."""

    step: Any
    state: Any
    statistics: Any


def make_linen():
    net = LinenNet()
    variables = net.init(jax.random.key(1), X[:1], train=False)

    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            y, new = net.apply(variables, batch["x"], mutable=["batch_stats"])
            return loss_of(y, batch), new["batch_stats"]

        gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), gradients = gradient_fn(state["params"])
        updates, momentum = SGD.update(mean_over_replicas(gradients), state["momentum"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "batch_stats": batch_stats, "momentum": momentum}
        return new, {"loss": loss}

    state = {**variables, "momentum": SGD.init(variables["params"])}
    return Program(step, state, lambda state: state["batch_stats"])


def make_train_state():
    net = LinenNet()
    variables = net.init(jax.random.key(1), X[:1], train=False)

    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            y, new = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
            return loss_of(y, batch), new["batch_stats"]

        gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), gradients = gradient_fn(state.params)
        new = state.apply_gradients(
            grads=mean_over_replicas(gradients), batch_stats=batch_stats
        )
        return new, {"loss": loss}

    state = StatefulTrainState.create(
        apply_fn=net.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=SGD,
    )
    return Program(step, state, lambda state: state.batch_stats)


def make_nnx():
    graphdef, params, rest = nnx.split(NnxNet(nnx.Rngs(1)), nnx.Param, ...)

    def step(state, batch):
        params, rest, momentum = state

        def loss_fn(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            loss = loss_of(model(batch["x"]), batch)
            return loss, nnx.split(model, nnx.Param, ...)[2]

        gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, rest), gradients = gradient_fn(params)
        updates, momentum = SGD.update(mean_over_replicas(gradients), momentum)
        return (optax.apply_updates(params, updates), rest, momentum), {"loss": loss}

    state = (params, rest, SGD.init(params))
    return Program(step, state, lambda state: state[1])


def make_equinox(mode):
    model, statistics = equinox.nn.make_with_state(EquinoxNet)(mode)

    def step(state, batch):
        model, statistics, momentum = state

        def loss_fn(model):
            y, new = jax.vmap(
                model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
            )(batch["x"], statistics)
            return loss_of(y, batch), new

        gradient_fn = equinox.filter_value_and_grad(loss_fn, has_aux=True)
        (loss, new), gradients = gradient_fn(model)
        updates, momentum = SGD.update(mean_over_replicas(gradients), momentum)
        return (equinox.apply_updates(model, updates), new, momentum), {"loss": loss}

    momentum = SGD.init(equinox.filter(model, equinox.is_inexact_array))
    return Program(step, (model, statistics, momentum), lambda state: state[1])


def make_keras(*, as_variables=False):
    import keras

    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((3,)),
            layers.Dense(4),
            layers.BatchNormalization(momentum=0.9),
            layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(state, batch):
        params, others, momentum = state

        def loss_fn(params):
            results = model.stateless_call(params, others, batch["x"], training=True)
            return loss_of(results[0], batch), results[1]

        gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, new), gradients = gradient_fn(params)
        gradients = mean_over_replicas(gradients)
        params, momentum = optimizer.stateless_apply(momentum, gradients, params)
        return (params, new, momentum), {"loss": loss}

    lists = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    state = tuple([v if as_variables else v.value for v in each] for each in lists)
    return Program(step, state, lambda state: state[1])


PROGRAMS = {
    "linen": make_linen,
    "train_state": make_train_state,
    "nnx": make_nnx,
    "equinox batch": functools.partial(make_equinox, "batch"),
    "equinox ema": functools.partial(make_equinox, "ema"),
    "keras": make_keras,
    "keras variables": functools.partial(make_keras, as_variables=True),
}


def make_program(request, name):
    if name.startswith("keras"):
        request.getfixturevalue("keras")
    return PROGRAMS[name]()


def make_data():
    return from_arrays(DATA, batch_size=16, shuffle_seed=3, repeat=True)


def make_trainer(program, num_replicas=1, **options):
    return armillary.StepTrainer(
        program.step,
        program.state,
        make_data(),
        strategy=armillary.MirroredStrategy(jax.devices()[:num_replicas]),
        **options,
    )


def arrays_of(state):
    leaves = jax.tree.leaves(state)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return [np.asarray(array) for array in arrays if array.dtype != bool]


def as_arrays(state):
    """Returns a state with arrays for numbers and variables, as a trainer holds it."""

    def convert(leaf):
        if not isinstance(leaf, jax.Array) and hasattr(leaf, "value"):
            return leaf.value  # of Keras
        return jnp.asarray(leaf) if type(leaf) is int else leaf

    return jax.tree.map(convert, state)


def train_by_hand(program, num_replicas, num_steps):
    """Trains in plain JAX: `vmap` over the shares, then the mean of all results."""

    def mean(leaf):
        is_float = isinstance(leaf, jax.Array) and jnp.issubdtype(
            leaf.dtype, jnp.floating
        )
        return jnp.mean(leaf, axis=0) if is_float else leaf[0]

    def whole_step(arrays, batch):
        state = equinox.combine(arrays, rest)
        shares = jax.tree.map(
            lambda rows: rows.reshape(num_replicas, -1, *rows.shape[1:]), batch
        )

        def share_step(share):
            return equinox.filter(program.step(state, share)[0], equinox.is_array)

        each = jax.vmap(share_step, axis_name="replica")(shares)
        return jax.tree.map(mean, each)

    arrays, rest = equinox.partition(as_arrays(program.state), equinox.is_array)
    compiled = jax.jit(whole_step)
    for _, batch in zip(range(num_steps), make_data(), strict=False):
        arrays = compiled(arrays, batch)
    return equinox.combine(arrays, rest)
