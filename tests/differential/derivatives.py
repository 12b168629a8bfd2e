"""Derivatives of the loss of all replicas, which optimizers take that search."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.differential.harness import WIDTH, Batch, Case, Replica, descend
from tests.differential.layers import LAYERS, Network, error
from tests.differential.optimizers import Plain
from tests.differential.reductions import RATE, Valued, errors, penalty, plain_mean


def over_all(name: str, op: str, update: Callable[[Any, Any], Any]) -> Case:
    """Returns a case of a derivative of the loss of all replicas."""

    def step(state: Any, batch: Batch, replica: Replica) -> None:
        def own(w: Any) -> Any:
            each = errors(w, batch)
            if op == "mean":
                return jnp.mean(each) + penalty(w)
            return replica.average(each) + replica.shared(penalty(w))

        loss_fn = replica.whole(own, op)
        state.value[...] = loss_fn(state.w[...])
        state.w[...] -= RATE * update(loss_fn, state.w[...])

    name = f"armillary.over_replicas({op}): {name}"
    return Case(name=name, make=Valued, step=step)


def _of_model(model: Any, batch: Batch, replica: Replica) -> None:
    """Differentiates the loss of all replicas by a module, and a value next to it."""

    def own(model: Any, scale: Any) -> Any:
        outputs = model(batch["x"])
        return scale * jnp.mean(error(outputs, batch)), outputs

    loss_fn = replica.whole(own, "mean", has_aux=True)
    (_, outputs), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, 2.0)
    assert outputs.shape == (len(batch["y"]), 1)
    descend(model, grads)


def _with_state(model: Any, batch: Batch, replica: Replica) -> None:
    """Differentiates the loss of all replicas, which draws and keeps statistics."""
    loss_fn = replica.whole(lambda m: jnp.mean(error(m(batch["x"]), batch)), "mean")
    descend(model, nnx.grad(loss_fn)(model))


def _direction(w: Any) -> Any:
    return jnp.cos(jnp.arange(w.size))


DERIVATIVES: dict[str, Callable[[Any, Any], Any]] = {
    "jax.grad": lambda f, w: jax.grad(f)(w),
    "jax.jvp": lambda f, w: jax.jvp(f, (w,), (_direction(w),))[1] * _direction(w),
    "jax.hessian": lambda f, w: jnp.linalg.solve(
        jax.hessian(f)(w) + jnp.eye(WIDTH), jax.grad(f)(w)
    ),
    "jax.jacrev of jax.grad": lambda f, w: jax.jacrev(jax.grad(f))(w).sum(0),
    "jax.jvp of jax.grad": lambda f, w: jax.jvp(jax.grad(f), (w,), (_direction(w),))[1],
    "jax.grad of a directional derivative": lambda f, w: jax.grad(
        lambda v: jax.jvp(f, (v,), (_direction(v),))[1]
    )(w),
    "jax.grad of the norm of jax.grad": lambda f, w: jax.grad(
        lambda v: jnp.sum(jax.grad(f)(v) ** 2)
    )(w),
    "a third derivative": lambda f, w: jax.grad(
        lambda v: jnp.sum(jax.hessian(f)(v) ** 2)
    )(w),
    "jax.vmap": lambda f, w: jax.vmap(jax.grad(f))(jnp.stack([w, 2 * w])).mean(0),
    "jax.checkpoint in jax.jit": lambda f, w: jax.jit(jax.grad(jax.checkpoint(f)))(w),
    "jax.linearize": lambda f, w: jax.linearize(f, w)[1](_direction(w)) * w,
    "optax.second_order.hessian_diag": lambda f, w: optax.second_order.hessian_diag(
        lambda w, x, y: f(w), w, 0.0, 0.0
    ),
    "optax.second_order.fisher_diag": lambda f, w: optax.second_order.fisher_diag(
        lambda w, x, y: f(w), w, 0.0, 0.0
    ),
}


def _searched(state: Any, batch: Batch, replica: Replica) -> None:
    """Searches along a line, which begins where the last one has ended."""
    w, opt_state = state.params.get_value(), state.opt_state.get_value()
    loss_fn = replica.whole(lambda w: plain_mean(w, batch), "mean")
    pair = optax.value_and_grad_from_state(loss_fn)(w, state=opt_state)
    updates, opt_state = optax.lbfgs().update(
        pair[1], opt_state, w, value=pair[0], grad=pair[1], value_fn=loss_fn
    )
    state.params.set_value(optax.apply_updates(w, updates))
    state.opt_state.set_value(opt_state)


CASES: list[Case] = [
    Case(
        name="optax.value_and_grad_from_state",
        make=lambda: Plain(optax.lbfgs(), jnp.linspace(0.5, 1.5, WIDTH)),
        step=_searched,
    ),
    *(
        over_all(name, op, update)
        for op in ("mean", "sum")
        for name, update in DERIVATIVES.items()
    ),
    replace(
        next(each for each in LAYERS if each.name == "nnx.BatchNorm and nnx.Dropout"),
        name="armillary.over_replicas(mean): nnx.BatchNorm and nnx.Dropout",
        step=_with_state,
    ),
    Case(
        name="armillary.over_replicas(mean): nnx.value_and_grad (has_aux)",
        make=Network,
        step=_of_model,
    ),
]
