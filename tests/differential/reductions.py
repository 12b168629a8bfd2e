"""Ways to reduce over replicas, and losses that reduce before they are differentiated.

Most cases of the suite sum gradients of an average over the whole batch. These are in
other words: a plain mean, the words of JAX, a derivative of single examples.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import armillary
from tests.differential.harness import (
    ROWS,
    WIDTH,
    Batch,
    Case,
    Replica,
    WholeBatch,
    descend,
    widen,
)
from tests.differential.layers import Network, error
from tests.differential.optimizers import Learner, adam, losses
from tests.differential.programs import squared

RATE = 0.1
Loss = Callable[[Any, Batch, Replica], Any]
Step = Callable[[Any, Batch, Replica], None]


class Valued(nnx.Module):
    """Weights, and the last value of their loss."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))
        self.value = nnx.Variable(jnp.zeros((), "float64"))


def errors(w: Any, batch: Batch) -> Any:
    """Returns a loss of each example that is no polynomial."""
    return jnp.log1p(squared(w, batch))


def penalty(w: Any) -> Any:
    return 0.1 * jnp.sum(w**2)


def reduced(op: str, name: str, loss_fn: Loss) -> Case:
    """Returns a case that reduces gradients of each replica's loss."""

    def step(state: Any, batch: Batch, replica: Replica) -> None:
        w = state.w[...]
        pair = jax.value_and_grad(loss_fn)(w, batch, replica)
        state.value[...], grads = getattr(replica, op)(pair)
        state.w[...] = w - RATE * grads

    return Case(name=name, make=Valued, step=step)


def _similar(w: Any, batch: Batch, replica: Replica) -> Any:
    """Returns a contrastive loss of each example with the examples of all replicas."""
    own = jnp.tanh(batch["x"] * w)
    return jax.nn.logsumexp(own @ replica.gather(own).T, axis=1)


def _balance(w: Any, batch: Batch, replica: Replica) -> Any:
    """Returns a loss of what all examples have in common, as of experts' shares."""
    shares = replica.mean(jax.nn.softmax(batch["x"] * w).mean(0))
    return jnp.sum(shares**2)


def _ratio(w: Any, batch: Batch, replica: Replica) -> Any:
    overlap = jnp.sum(jnp.tanh(batch["x"] @ w) * batch["y"])
    size = jnp.sum(1 + jnp.abs(batch["x"] @ w))
    overlap, size = replica.total((overlap, size))
    return overlap / size


def _weights_of(batch: Batch) -> Any:
    return (batch["x"][:, 0] > 0).astype("float64")


MEANS: dict[str, Loss] = {
    "armillary.all_reduce(mean), of a mean with a penalty": (
        lambda w, b, r: jnp.mean(errors(w, b)) + penalty(w)
    ),
    "armillary.weighted_mean": (
        lambda w, b, r: r.weighted_mean(errors(w, b), _weights_of(b)) + penalty(w)
    ),
    "armillary.weighted_mean (weights of parameters)": (
        lambda w, b, r: r.weighted_mean(errors(w, b), jax.nn.softplus(b["x"] @ w))
    ),
    "a loss of gathered examples (contrastive), mean": (
        lambda w, b, r: jnp.mean(_similar(w, b, r))
    ),
    "a loss of averaged statistics (mixture of experts), mean": (
        lambda w, b, r: jnp.mean(errors(w, b)) + _balance(w, b, r)
    ),
    "the root of a mean, reduced before the root": (
        lambda w, b, r: jnp.sqrt(r.mean(jnp.mean(errors(w, b))))
    ),
    "a ratio of sums (Dice), reduced before the ratio": _ratio,
    "jax.lax.pmean (of the loss)": lambda w, b, r: r.pmean(jnp.mean(errors(w, b))),
    "a mean in jax.checkpoint, jax.jit and lax.scan": lambda w, b, r: (
        jax.lax.scan(
            lambda c, x: (c + jax.jit(jax.checkpoint(jnp.tanh))(x * w).sum(), None),
            0.0,
            b["x"],
        )[0]
        / len(b["x"])
    ),
}
SUMS: dict[str, Loss] = {
    "a penalty next to an average: armillary.scale_regularization_loss": (
        lambda w, b, r: r.average(errors(w, b)) + r.shared(penalty(w))
    ),
    "a loss of gathered examples (contrastive), sum": (
        lambda w, b, r: r.average(_similar(w, b, r))
    ),
    "a loss of averaged statistics (mixture of experts), sum": (
        lambda w, b, r: r.average(errors(w, b)) + r.shared(_balance(w, b, r))
    ),
}


def _chained(op: str) -> Case:
    def step(learner: Any, batch: Batch, replica: Replica) -> None:
        def loss_fn(model: Any) -> Any:
            each = losses({k: model[k][...] for k in model}, batch)
            return jnp.mean(each) if op == "mean" else replica.average(each)

        learner.optimizer.update(learner.model, nnx.grad(loss_fn)(learner.model))

    def make() -> Any:
        clip = optax.clip_by_global_norm(0.1)
        return Learner(optax.chain(armillary.all_reduce_gradients(op), clip, adam()))

    name = f"armillary.all_reduce_gradients({op}), in optax.chain"
    return Case(name=name, make=make, step=step)


def _accumulated(name: str, op: str | None) -> Case:
    def step(model: Any, batch: Batch, replica: Replica) -> None:
        def loss_fn(batch: Batch) -> Any:
            each = error(model(batch["x"]), batch)
            if op is None:
                return replica.average(each)
            return jnp.mean(each) + penalty(model.first.kernel[...])

        _, grads = armillary.value_and_grad(
            loss_fn, model, batch=batch, accumulate_steps=2, op=op
        )
        descend(model, replica.mean(grads) if op else replica.total(grads))

    def reference(model: Any, batch: Batch, num_replicas: int) -> None:
        del num_replicas

        def loss_fn(model: Any) -> Any:
            more = penalty(model.first.kernel[...]) if op else 0.0
            return jnp.mean(error(model(batch["x"]), batch)) + more

        descend(model, nnx.grad(loss_fn)(model))

    return Case(name=name, make=Network, step=step, reference=reference)


class Normed(Network):
    """A network with batch statistics over all replicas."""

    def __init__(self) -> None:
        kinds = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        super().__init__(nnx.BatchNorm(4, axis_name="replica", **kinds))


def _synchronized(op: str) -> Case:
    def step(model: Any, batch: Batch, replica: Replica) -> None:
        def loss_fn(model: Any) -> Any:
            each = error(model(batch["x"]), batch)
            return jnp.mean(each) if op == "mean" else replica.average(each)

        grads = nnx.grad(loss_fn)(model)
        descend(model, getattr(replica, op)(grads))

    def reference(model: Any, batch: Batch, num_replicas: int) -> None:
        del num_replicas
        model.between[0].axis_name = None
        step(model, batch, WholeBatch())
        model.between[0].axis_name = "replica"

    name = f"nnx.BatchNorm(axis_name=replica), {op} of gradients"
    # Flax makes float32 statistics, which float64 ones cannot be written into.
    return Case(name=name, make=lambda: widen(Normed()), step=step, reference=reference)


def _micro_steps(w: Any, batch: Batch, replica: Replica) -> Any:
    """Updates after each half of the examples, in a loop."""
    halves = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), batch)

    def update(w: Any, half: Batch) -> Any:
        grads = jax.grad(lambda w: jnp.mean(errors(w, half)) + penalty(w))(w)
        return w - RATE * replica.mean(grads), None

    return jax.lax.scan(update, w, halves)[0]


def _in_turn(w: Any, batch: Batch, num_replicas: int) -> Any:
    # The first halves of all replicas, and then the second ones.
    count = max(num_replicas, 1)
    order = jnp.arange(ROWS).reshape(count, 2, -1).swapaxes(0, 1).reshape(-1)
    ordered = {name: array[order] for name, array in batch.items()}
    return _micro_steps(w, ordered, WholeBatch())


class Rivals(nnx.Module):
    """Weights that want opposite things, and an average of one of them."""

    def __init__(self) -> None:
        self.one = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))
        self.other = nnx.Param(jnp.linspace(-1.0, 1.0, WIDTH))
        self.slow = nnx.Variable(jnp.zeros(WIDTH))


def _compete(state: Any, batch: Batch, replica: Replica) -> None:
    """Updates one with what the other is, and then the other (a GAN)."""

    def gain(one: Any, other: Any) -> Any:
        return jnp.mean(errors(one, batch) * jnp.tanh(batch["x"] @ other))

    one, other = state.one[...], state.other[...]
    grads = jax.grad(lambda v: gain(v, other) + penalty(v))(one)
    state.one[...] = one - RATE * replica.mean(grads)
    one = state.one[...]
    grads = jax.grad(lambda v: -gain(one, v) + penalty(v) + penalty(one))(other)
    state.other[...] = other - RATE * replica.mean(grads)
    state.slow[...] = optax.incremental_update(one, state.slow[...], 0.1)


def of_weights(name: str, update: Step, **options: Any) -> Case:
    """Returns a case that replaces weights by what a function makes of them."""

    def step(state: Any, batch: Batch, replica: Replica) -> None:
        state.w[...] = update(state.w[...], batch, replica)

    return Case(name=name, make=Valued, step=step, **options)


def plain_mean(w: Any, batch: Batch) -> Any:
    """Returns the loss of one device, whatever the batch."""
    return jnp.mean(errors(w, batch)) + penalty(w)


def _clipped_each(w: Any, batch: Batch, replica: Replica) -> Any:
    """Clips the gradient of each example, in plain JAX."""
    one = jax.grad(lambda w, x, y: jnp.log1p((x @ w - y) ** 2))
    each = jax.vmap(one, (None, 0, 0))(w, batch["x"], batch["y"])
    norms = jnp.linalg.norm(each, axis=1, keepdims=True)
    return w - RATE * replica.mean(jnp.mean(each / jnp.maximum(norms, 0.1), axis=0))


def _gauss_newton(w: Any, batch: Batch, replica: Replica) -> Any:
    """Takes a step by the Jacobian of the examples' outputs, by parameters."""
    jacobian = jax.jacrev(lambda w: jnp.tanh(batch["x"] @ w))(w)
    matrix = replica.total(jacobian.T @ jacobian)
    residual = jnp.tanh(batch["x"] @ w) - batch["y"]
    gradient = replica.total(jacobian.T @ residual)
    return w - RATE * jnp.linalg.solve(matrix + jnp.eye(WIDTH), gradient)


def _meta(w: Any, batch: Batch, replica: Replica) -> Any:
    """Differentiates through the update that each example makes for itself (MAML)."""

    def adapted(w: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.log1p((x @ w - y) ** 2)

        return loss(w - 0.05 * jax.grad(loss)(w))

    def loss_fn(w: Any) -> Any:
        return jnp.mean(jax.vmap(adapted, (None, 0, 0))(w, batch["x"], batch["y"]))

    return w - RATE * replica.mean(jax.grad(loss_fn)(w))


def _ensemble(w: Any, batch: Batch, replica: Replica) -> Any:
    members = jnp.stack([w, 2 * w, jnp.sin(w)])
    grads = jax.vmap(jax.grad(plain_mean), (0, None))(members, batch)
    return w - RATE * replica.mean(grads).mean(0)


def _filtered(w: Any, batch: Batch, replica: Replica) -> Any:
    params = {"w": w, "activation": jnp.tanh}

    def loss_fn(params: Any) -> Any:
        return jnp.mean((params["activation"](batch["x"] @ params["w"])) ** 2)

    return w - RATE * replica.mean(eqx.filter_grad(loss_fn)(params)["w"])


OWN: dict[str, Step] = {
    "jax.lax.pmean (of gradients)": lambda w, b, r: (
        w - RATE * r.pmean(jax.grad(plain_mean)(w, b))
    ),
    "jax.lax.psum (of gradients)": lambda w, b, r: (
        w - RATE * r.psum(jax.grad(lambda w: r.average(errors(w, b)))(w))
    ),
    "jax.lax.pmean (of a loss, and of its gradients)": lambda w, b, r: (
        w - RATE * r.pmean(jax.grad(lambda w: r.pmean(plain_mean(w, b)))(w))
    ),
    "weight decay apart from the loss, by a plain gradient": lambda w, b, r: (
        w - RATE * (r.mean(jax.grad(plain_mean)(w, b)) + jax.grad(penalty)(w))
    ),
    "jax.vmap of jax.grad (examples, clipped)": _clipped_each,
    "jax.vmap of jax.grad (an ensemble)": _ensemble,
    "jax.jacrev (of outputs by parameters)": _gauss_newton,
    "jax.grad of jax.grad (MAML)": _meta,
    "equinox.filter_grad": _filtered,
}


CASES: list[Case] = [
    *(reduced("mean", name, loss_fn) for name, loss_fn in MEANS.items()),
    *(reduced("total", name, loss_fn) for name, loss_fn in SUMS.items()),
    _chained("mean"),
    _chained("sum"),
    _accumulated("armillary.value_and_grad (accumulated, mean)", "mean"),
    _accumulated("armillary.value_and_grad (accumulated, of an average)", None),
    _synchronized("mean"),
    _synchronized("total"),
    of_weights(
        "an update in each step of lax.scan",
        _micro_steps,
        reference=lambda state, batch, n: state.w.set_value(
            _in_turn(state.w[...], batch, n)
        ),
    ),
    Case(name="two updates in one step (GAN)", make=Rivals, step=_compete),
    *(of_weights(name, update) for name, update in OWN.items()),
]
