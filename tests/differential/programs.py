"""Transformations of Flax NNX and JAX in a step: control flow, derivatives, calls."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import checkify, io_callback, jet, ode, sparse
from jax.lax import scan as bound_scan  # Bound before the library is used.

from tests.differential.harness import (
    WIDTH,
    Batch,
    Case,
    Losses,
    Replica,
    by_shard,
    functions,
    training,
)
from tests.differential.layers import KEY_NOTE, Network, error


def z(w: Any, b: Batch) -> Any:
    """Returns one number per example, of the weights and the features."""
    return b["x"] @ w


def squared(w: Any, b: Batch) -> Any:
    """Returns the squared error of a linear model."""
    return (z(w, b) - b["y"]) ** 2


def is_local(b: Batch) -> Any:
    """Returns a predicate that differs between replicas, of which none sees all rows.

    It is true on the whole batch as on each replica, so that the reference agrees.
    """
    return jnp.sum(b["x"] ** 2) > 0


def is_shared(w: Any) -> Any:
    """Returns a predicate that is the same on all replicas."""
    return jnp.sum(w) > -100


def count_locally(b: Batch) -> Any:
    """Returns 2, in a way that differs between replicas as far as anyone can tell."""
    return 1 + is_local(b).astype("int32")


def _per_row(fn: Callable[[Any, Any, Any], Any]) -> Losses:
    return lambda w, b: jax.vmap(lambda x, y: fn(w, x, y))(b["x"], b["y"])


def _fori(w: Any, b: Batch, count: Any) -> Any:
    return jax.lax.fori_loop(0, count, lambda i, s: jnp.sin(s) + i, z(w, b))


def _while(w: Any, b: Batch, count: Any) -> Any:
    _, total = jax.lax.while_loop(
        lambda carry: carry[0] < count,
        lambda carry: (carry[0] + 1, jnp.sin(carry[1]) + z(w, b)),
        (0, jnp.zeros_like(b["y"])),
    )
    return total


def _without_gradient(count: Callable[[Any, Batch], Any], loop: Any) -> Losses:
    """Returns losses that use what a loop counted, which has no gradient of its own."""
    return lambda w, b: squared(w, b) * jax.lax.stop_gradient(loop(w, b, count(w, b)))


def _scan(scan: Any) -> Losses:
    def losses(w: Any, b: Batch) -> Any:
        def body(carry: Any, x: Any) -> Any:
            return jnp.tanh(carry + x), carry

        last, each = scan(body, jnp.zeros(len(b["y"])), (b["x"] * w).T)
        return last + each.sum(0)

    return losses


def _scan_of_params(w: Any, b: Batch) -> Any:
    def body(carry: Any, weight: Any) -> Any:
        return carry * weight + 1, None

    return jax.lax.scan(body, b["y"], w)[0]


def _scan_of_nothing(w: Any, b: Batch) -> Any:
    return (
        jax.lax.scan(lambda c, x: (c + b["y"].sum() * x, x), w, jnp.zeros(0))[0]
        @ b["x"].T
    )


def _prefix(w: Any, b: Batch) -> Any:
    return jax.lax.associative_scan(jnp.multiply, b["x"] * w, axis=1).sum(1)


CONTROL = {
    "lax.cond (shared predicate)": lambda w, b: jax.lax.cond(
        is_shared(w), lambda: squared(w, b), lambda: z(w, b)
    ),
    "lax.cond (shared predicate, one branch a constant)": lambda w, b: jax.lax.cond(
        is_shared(w), lambda: squared(w, b), lambda: jnp.zeros_like(b["y"])
    ),
    "lax.cond (shared predicate, the other a constant)": lambda w, b: (
        squared(w, b)
        + jax.lax.cond(jnp.sum(w) < -100, lambda: z(w, b).sum(), lambda: 0.0)
    ),
    "lax.cond (local predicate of local branches)": lambda w, b: jax.lax.cond(
        is_local(b), lambda: squared(w, b), lambda: z(w, b)
    ),
    "lax.cond (local predicate of shared branches)": lambda w, b: (
        b["x"] @ jax.lax.cond(is_local(b), lambda: jnp.sin(w), lambda: w)
    ),
    "lax.cond (local predicate, one shared branch)": lambda w, b: jax.lax.cond(
        is_local(b), lambda: z(w, b), lambda: jnp.zeros_like(b["y"])
    ),
    "lax.cond (operands)": lambda w, b: jax.lax.cond(
        is_local(b), lambda w, b: squared(w, b), lambda w, b: z(w, b), w, b
    ),
    "lax.cond under vmap (per example)": _per_row(
        lambda w, x, y: jax.lax.cond(y > 0, lambda w: w @ x, lambda w: w.sum(), w)
    ),
    "lax.switch (shared index)": lambda w, b: jax.lax.switch(
        is_shared(w).astype("int32"),
        [lambda: jnp.zeros_like(b["y"]), lambda: squared(w, b), lambda: z(w, b)],
    ),
    "lax.switch (local index)": lambda w, b: (
        b["x"] @ jax.lax.switch(count_locally(b), [lambda w: w, jnp.sin, jnp.cos], w)
    ),
    "lax.switch under vmap (per example)": lambda w, b: jax.vmap(
        lambda i, x: jax.lax.switch(i, [jnp.sum, lambda w: w @ x, lambda w: 0.0], w)
    )(b["label"], b["x"]),
    "lax.while_loop (shared trip count)": _without_gradient(
        lambda w, b: 1 + is_shared(w).astype("int32"), _while
    ),
    "lax.while_loop (local trip count)": _without_gradient(
        lambda w, b: count_locally(b), _while
    ),
    "lax.while_loop (a local count times a parameter)": lambda w, b: z(
        w * jax.lax.while_loop(lambda i: i < count_locally(b), lambda i: i + 1, 0), b
    ),
    "lax.while_loop under vmap (per example)": lambda w, b: (
        z(w, b)
        * jax.vmap(lambda y: jax.lax.while_loop(lambda s: s < 2, lambda s: s + 1, y))(
            b["y"]
        )
    ),
    "lax.while_loop (jvp)": lambda w, b: (
        jax.jvp(
            lambda y: jax.lax.while_loop(
                lambda s: s.sum() < 9, lambda s: s + 1.5 * y**2, y
            ),
            (b["y"],),
            (b["y"],),
        )[1]
        * z(w, b)
        * 0
        + z(w, b)
    ),
    "lax.fori_loop (fixed)": lambda w, b: _fori(w, b, 3),
    "lax.fori_loop (shared trip count)": _without_gradient(
        lambda w, b: 1 + is_shared(w).astype("int32"), _fori
    ),
    "lax.fori_loop (local trip count)": _without_gradient(
        lambda w, b: count_locally(b), _fori
    ),
    "lax.scan": _scan(lambda *args: jax.lax.scan(*args)),
    "lax.scan (unrolled, reversed)": _scan(
        lambda *args: jax.lax.scan(*args, unroll=2, reverse=True)
    ),
    "lax.scan (bound before the library is imported)": _scan(bound_scan),
    "lax.scan (of parameters)": _scan_of_params,
    "lax.scan (of zero steps)": _scan_of_nothing,
    "lax.scan (rematerialized body)": _scan(
        lambda body, *args: jax.lax.scan(jax.checkpoint(body), *args)
    ),
    "lax.map": lambda w, b: jax.lax.map(lambda x: jnp.sin(x @ w), b["x"]),
    "lax.map (batch_size)": lambda w, b: jax.lax.map(
        lambda x: jnp.sin(x @ w), b["x"], batch_size=2
    ),
    "lax.associative_scan": _prefix,
    "lax.select": lambda w, b: jax.lax.select(b["y"] > 0, z(w, b), squared(w, b)),
    "jnp.where": lambda w, b: jnp.where(b["y"] > 0, z(w, b), 0.0),
    "jnp.piecewise": lambda w, b: jnp.piecewise(
        z(w, b), [b["y"] > 0], [lambda v: v**2, 1.0]
    ),
    "jnp.select": lambda w, b: jnp.select(
        [b["y"] > 1, b["y"] > 0], [z(w, b), squared(w, b)]
    ),
    "jnp.vectorize": lambda w, b: jnp.vectorize(
        lambda w, x: w @ x, signature="(n),(n)->()"
    )(w, b["x"]),
    "lax.platform_dependent": lambda w, b: jax.lax.platform_dependent(
        w, b["x"], cpu=lambda w, x: x @ w, default=lambda w, x: x @ w
    ),
    "lax.optimization_barrier": lambda w, b: jax.lax.optimization_barrier(z(w, b)),
    "lax.stop_gradient": lambda w, b: z(w, b) * jax.lax.stop_gradient(z(w, b)),
    "lax.reduce_precision": lambda w, b: jax.lax.reduce_precision(z(w, b), 8, 23),
}


@jax.custom_vjp
def _scaled(w: Any, x: Any) -> Any:
    return x @ w


_scaled.defvjp(
    lambda w, x: (x @ w, (w, x)), lambda res, g: (2 * (g @ res[1]), g[:, None] * res[0])
)


@jax.custom_vjp
def _no_gradient(w: Any, x: Any) -> Any:
    return x @ w


_no_gradient.defvjp(
    lambda w, x: (x @ w, (w, x)),
    lambda res, g: (jnp.zeros_like(res[0]), jnp.zeros_like(res[1])),
)


@jax.custom_vjp
def _clipped(w: Any) -> Any:
    return w


_clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@jax.custom_vjp
def _clipped_locally(v: Any) -> Any:
    return v


_clipped_locally.defvjp(lambda v: (v, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _powered(power: int, w: Any, x: Any) -> Any:
    return (x @ w) ** power


_powered.defvjp(
    lambda power, w, x: ((x @ w) ** power, (w, x)),
    lambda power, res, g: (g @ res[1] * power, None),
)


@jax.custom_jvp
def _smooth(v: Any) -> Any:
    return jnp.abs(v)


_smooth.defjvp(
    lambda primals, tangents: (_smooth(*primals), jnp.tanh(primals[0]) * tangents[0])
)


@jax.custom_gradient
def _straight(v: Any) -> Any:
    return jnp.round(v), lambda g: (g,)


def _root(w: Any, b: Batch) -> Any:
    def f(v: Any) -> Any:
        return v**3 + v - z(w, b)

    def solve(f: Any, start: Any) -> Any:
        return jax.lax.fori_loop(0, 20, lambda _, v: v - f(v) / (3 * v**2 + 1), start)

    def tangent_solve(g: Any, y: Any) -> Any:
        return y / g(jnp.ones_like(y))

    return jax.lax.custom_root(f, jnp.zeros_like(b["y"]), solve, tangent_solve)


def _linear_solve(w: Any, b: Batch) -> Any:
    diagonal = 1 + w**2

    def matvec(v: Any) -> Any:
        return v * diagonal

    def solve(_: Any, rhs: Any) -> Any:
        return rhs / diagonal

    solved = [
        jax.lax.custom_linear_solve(matvec, row, solve, symmetric=True)
        for row in b["x"]
    ]
    return jnp.stack(solved).sum(1)


def _fixed_point(w: Any, b: Batch) -> Any:
    @jax.custom_vjp
    def solve(w: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 30, lambda _, v: jnp.cos(v * 0.1 + x @ w), x @ w)

    def forward(w: Any, x: Any) -> Any:
        v = solve(w, x)
        return v, (w, x, v)

    def backward(res: Any, g: Any) -> Any:
        w, x, v = res
        _, vjp = jax.vjp(lambda w, v: jnp.cos(v * 0.1 + x @ w), w, v)
        u = jax.lax.fori_loop(0, 30, lambda _, u: g + vjp(u)[1], g)
        return vjp(u)[0], jnp.zeros_like(x)

    solve.defvjp(forward, backward)
    return solve(w, b["x"])


def _penalty(w: Any, b: Batch) -> Any:
    slope = jax.vmap(jax.grad(lambda x: jnp.tanh(x @ w)))(b["x"])
    return jnp.sum(slope**2, 1) + squared(w, b)


def _hvp(w: Any, b: Batch) -> Any:
    def f(x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ w))

    return jax.jvp(jax.grad(f), (b["x"],), (jnp.ones_like(b["x"]),))[1].sum(1)


def _closure(w: Any, b: Batch) -> Any:
    converted, consts = jax.closure_convert(lambda x: jnp.sin(x @ w), b["x"])
    return converted(b["x"], *consts)


def _odeint(w: Any, b: Batch) -> Any:
    path = ode.odeint(
        lambda y, t, w: -y * w.sum() * 0.1, b["y"], jnp.array([0.0, 0.5]), w
    )
    return path[-1] * z(w, b)


def _jet(w: Any, b: Batch) -> Any:
    primal, series = jet.jet(jnp.sin, (z(w, b),), ((b["y"], jnp.zeros_like(b["y"])),))
    return primal + series[0] + series[1]


def _vjp(w: Any, b: Batch) -> Any:
    out, pullback = jax.vjp(lambda x: jnp.sin(x @ w), b["x"])
    return out + pullback(b["y"])[0].sum(1)


def _linearize(w: Any, b: Batch) -> Any:
    out, push = jax.linearize(lambda x: jnp.sin(x @ w), b["x"])
    return out + push(b["x"] ** 2)


def _transpose(w: Any, b: Batch) -> Any:
    (back,) = jax.linear_transpose(lambda x: x @ w, b["x"])(b["y"])
    return back.sum(1) + z(w, b)


def _per_row_jacobian(jacobian: Any) -> Losses:
    return lambda w, b: jax.vmap(lambda x: jacobian(lambda x: jnp.sin(x * w))(x).sum())(
        b["x"]
    )


def _ref(w: Any, b: Batch) -> Any:
    total = jax.new_ref(jnp.zeros_like(b["y"]) + 0 * b["y"])
    total[...] += b["y"]
    return total[...] * z(w, b)


AUTODIFF = {
    "jax.grad (with respect to the batch)": _penalty,
    "jax.value_and_grad (with respect to the batch)": lambda w, b: sum(
        part.reshape(len(b["y"]), -1).sum(1)
        for part in jax.vmap(jax.value_and_grad(lambda x: jnp.tanh(x @ w)))(b["x"])
    ),
    "jax.vjp": _vjp,
    "jax.jvp": lambda w, b: jax.jvp(lambda x: jnp.sin(x @ w), (b["x"],), (b["x"],))[1],
    "jax.jvp (along parameters)": lambda w, b: jax.jvp(
        lambda w: jnp.sin(z(w, b)), (w,), (jnp.ones_like(w),)
    )[1],
    "jax.jacfwd": _per_row_jacobian(jax.jacfwd),
    "jax.jacrev": _per_row_jacobian(jax.jacrev),
    "jax.jacobian": _per_row_jacobian(jax.jacobian),
    "jax.hessian": _per_row(
        lambda w, x, y: jax.hessian(lambda x: jnp.tanh(x @ w))(x).sum()
    ),
    "jax.hessian (times a vector)": _hvp,
    "jax.linearize": _linearize,
    "jax.linear_transpose": _transpose,
    "jax.checkpoint": lambda w, b: jax.checkpoint(squared)(w, b),
    "jax.checkpoint (policy)": lambda w, b: jax.checkpoint(
        squared, policy=jax.checkpoint_policies.dots_saveable
    )(w, b),
    "jax.remat": lambda w, b: jax.remat(lambda w: jnp.sin(z(w, b)))(w),
    "jax.custom_jvp": lambda w, b: _smooth(z(w, b)),
    "jax.custom_vjp (of parameters and batch)": lambda w, b: _scaled(w, b["x"]),
    "jax.custom_vjp (zero gradient)": lambda w, b: _no_gradient(w, b["x"]) + z(w, b),
    "jax.custom_vjp (nondiff_argnums)": lambda w, b: _powered(2, w, b["x"]),
    "jax.custom_vjp (of activations)": lambda w, b: _clipped_locally(z(w, b) * 0.001),
    "jax.custom_gradient": lambda w, b: _straight(z(w, b)) * b["y"],
    "jax.closure_convert": _closure,
    "jax.jit": lambda w, b: jax.jit(squared)(w, b),
    "jax.named_call": lambda w, b: jax.named_call(squared)(w, b),
    "jax.named_scope": lambda w, b: _in_scope(w, b),
    "jax.vmap (nested)": lambda w, b: jax.vmap(
        jax.vmap(lambda x, w: jnp.sin(x * w)), (0, None)
    )(b["x"], w).sum(1),
    "jax.vmap (out_axes)": lambda w, b: jax.vmap(lambda x: x * w, out_axes=1)(
        b["x"]
    ).sum(0),
    "jax.eval_shape": lambda w, b: z(w, b) * len(jax.eval_shape(z, w, b).shape),
    "jax.make_jaxpr": lambda w, b: z(w, b) * len(jax.make_jaxpr(z)(w, b).out_avals),
    "jax.new_ref": _ref,
    "jax.lax.custom_root": _root,
    "jax.lax.custom_linear_solve": _linear_solve,
    "fixed point with an implicit gradient": _fixed_point,
    "jax.experimental.ode.odeint": _odeint,
    "jax.experimental.jet": _jet,
    "straight-through estimator": lambda w, b: (
        z(w, b) + jax.lax.stop_gradient(jnp.round(z(w, b)) - z(w, b))
    ),
}

# JAX 0.12 has these.
INLINED: dict[str, Losses] = {
    "jax.Inline (XLA_EARLY)": lambda w, b: jax.jit(
        squared, inline=jax.Inline.XLA_EARLY
    )(w, b),
    "jax.Inline (JAX_EARLY, of a loop)": lambda w, b: jax.jit(
        _doubled_in_a_loop, inline=jax.Inline.JAX_EARLY
    )(w, b),
}


def _doubled_in_a_loop(w: Any, b: Batch) -> Any:
    return jax.lax.fori_loop(0, 2, lambda _, v: 2 * v, squared(w, b))


def _in_scope(w: Any, b: Batch) -> Any:
    with jax.named_scope("transpose"):
        return squared(w, b)


def _host_square(v: Any) -> Any:
    return np.asarray(v) ** 2


def _called(callback: Any, v: Any, **options: Any) -> Any:
    """Calls the host in float32: the thread of callbacks knows no `enable_x64`."""
    shape = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    return callback(_host_square, shape, v.astype("float32"), **options).astype(v.dtype)


def _pure(v: Any, **options: Any) -> Any:
    return _called(jax.pure_callback, v, **options)


def _io(v: Any) -> Any:
    return _called(io_callback, v)


def _debugged(fn: Callable[[Any], None]) -> Losses:
    def losses(w: Any, b: Batch) -> Any:
        fn(z(w, b))
        return squared(w, b)

    return losses


@jax.custom_vjp
def _on_host(v: Any) -> Any:
    return _pure(v)


_on_host.defvjp(lambda v: (_pure(v), v), lambda v, g: (2 * g * v,))


def _checked(w: Any, b: Batch) -> Any:
    def f(v: Any) -> Any:
        checkify.check(jnp.all(v < 1e9), "too large")
        return v**2

    failure, out = checkify.checkify(f)(z(w, b))
    del failure
    return out


CALLBACKS = {
    "jax.pure_callback (of the batch)": lambda w, b: z(w, b) * _pure(b["y"]),
    "jax.pure_callback (times a parameter)": lambda w, b: (
        (w * _pure(b["y"]).sum()).sum() * 0 + z(w, b)
    ),
    "jax.pure_callback under vmap": lambda w, b: (
        z(w, b) * jax.vmap(lambda y: _pure(y, vmap_method="sequential"))(b["y"])
    ),
    "jax.pure_callback (with a gradient by custom_vjp)": lambda w, b: _on_host(z(w, b)),
    "jax.pure_callback (of parameters, with a gradient)": lambda w, b: (
        b["x"] @ _on_host(w)
    ),
    "jax.experimental.io_callback": lambda w, b: z(w, b) * _io(b["y"]),
    "jax.debug.callback": _debugged(lambda v: jax.debug.callback(lambda v: None, v)),
    "jax.debug.print": _debugged(lambda v: jax.debug.print("{}", jnp.sum(v) * 0)),
    "jax.experimental.checkify": _checked,
}


def _bcoo(b: Batch) -> Any:
    return sparse.BCOO.fromdense(b["x"], nse=b["x"].size)


SPARSE = {
    "sparse.BCOO (of the batch, times a parameter)": lambda w, b: _bcoo(b) @ w,
    "sparse.BCOO (of parameters)": lambda w, b: (
        b["x"] @ (sparse.BCOO.fromdense(jnp.diag(w), nse=WIDTH) @ jnp.ones(WIDTH))
    ),
    "sparse.bcoo_todense": lambda w, b: _bcoo(b).todense() @ w,
    "sparse.bcoo_dot_general": lambda w, b: sparse.bcoo_dot_general(
        _bcoo(b), w, dimension_numbers=(((1,), (0,)), ((), ()))
    ),
    "sparse.BCSR": lambda w, b: sparse.BCSR.fromdense(b["x"], nse=b["x"].size) @ w,
    "sparse.sparsify": lambda w, b: sparse.sparsify(lambda m, w: (m * 2.0) @ w)(
        _bcoo(b), w
    ),
}


def _model() -> Network:
    return Network()


def nnx_case(
    name: str, losses: Losses, make: Callable[[], Any] = _model, **options: Any
) -> Case:
    """Returns a case that applies a transformation of NNX to a model."""
    return training(name, make, losses, **options)


def _ensemble() -> Any:
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Any:
        return Stackable(rngs)

    return make(nnx.Rngs(0))


class Stackable(nnx.Module):
    """A layer whose output fits its input."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(jnp.tanh(self.linear(x)))


def _dropout_stack() -> Any:
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Any:
        return Stackable(rngs, 0.5)

    return make(nnx.Rngs(0))


def _vmap_losses(model: Any, b: Batch) -> Any:
    outputs = nnx.vmap(lambda model, x: model(x), in_axes=(0, None))(model, b["x"])
    return error(outputs.mean(0), b)


def _scan_losses(remat: bool) -> Losses:
    def losses(model: Any, b: Batch) -> Any:
        def body(x: Any, layer: Any) -> Any:
            return layer(x)

        body = nnx.remat(body) if remat else body
        scan = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return error(scan(b["x"], model), b)

    return losses


def _nnx_cond(predicate: Callable[[Any, Batch], Any]) -> Losses:
    def losses(model: Any, b: Batch) -> Any:
        return error(
            nnx.cond(
                predicate(model, b),
                lambda m, x: m(x),
                lambda m, x: x[:, :1],
                model,
                b["x"],
            ),
            b,
        )

    return losses


def _shared_predicate(model: Any, b: Batch) -> Any:
    del b
    return is_shared(model.first.kernel[...])


def _nnx_switch(model: Any, b: Batch) -> Any:
    branches = [lambda m, x: x[:, :1], lambda m, x: m(x), lambda m, x: 0.0 * x[:, :1]]
    index = _shared_predicate(model, b).astype("int32")
    return error(nnx.switch(index, branches, model, b["x"]), b)


def _nnx_while(model: Any, b: Batch) -> Any:
    def body(carry: Any) -> Any:
        count, x, model = carry
        return count + 1, x + jax.lax.stop_gradient(model(x)), model

    _, x, _ = nnx.while_loop(lambda carry: carry[0] < 2, body, (0, b["x"], model))
    return error(model(jax.lax.stop_gradient(x)), b)


def _nnx_fori(model: Any, b: Batch) -> Any:
    def body(_: Any, carry: Any) -> Any:
        x, model = carry
        return x + model(x), model

    x, _ = nnx.fori_loop(0, 2, body, (b["x"], model))
    return error(x, b)


@nnx.custom_vjp
def _doubled(model: Any, x: Any) -> Any:
    return model(x)


def _doubled_forward(model: Any, x: Any) -> Any:
    return _doubled(model, x), (model, x)


def _doubled_backward(residual: Any, cotangent: Any) -> Any:
    (model_cotangent, output_cotangent), (model, x) = cotangent, residual
    del model_cotangent
    grads = nnx.grad(lambda m: jnp.sum(m(x) * output_cotangent))(model)
    return jax.tree.map(lambda g: 2 * g, grads), jnp.zeros_like(x)


_doubled.defvjp(_doubled_forward, _doubled_backward)


def _nnx_vjp(model: Any, b: Batch) -> Any:
    result: Any = nnx.vjp(lambda x: model(x), b["x"], graph_updates=False)
    out, pullback = result
    return error(out + pullback(jnp.ones_like(out))[0].sum(1, keepdims=True), b)


def _nnx_jvp(model: Any, b: Batch) -> Any:
    return error(
        nnx.jvp(lambda x: model(x), (b["x"],), (b["x"],), graph_updates=False)[1], b
    )


def _nnx_split(model: Any, b: Batch) -> Any:
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return error(nnx.merge(graph, params, rest)(b["x"]), b)


def _nnx_call(model: Any, b: Batch) -> Any:
    out, _ = nnx.call(nnx.split(model))(b["x"])
    return error(out, b)


def _nnx_eval_shape(model: Any, b: Batch) -> Any:
    shape = nnx.eval_shape(lambda m, x: m(x), model, b["x"]).shape
    return error(model(b["x"]) * len(shape), b)


def _grad_case(name: str, grad: Callable[[Any, Batch, Replica], Any]) -> Case:
    def step(model: Any, batch: Batch, replica: Replica) -> None:
        grads = replica.total(nnx.state(grad(model, batch, replica)))
        params = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
        for path, value in nnx.to_flat_state(grads):
            params[path][...] -= 0.1 * value[...]

    return Case(name=name, make=lambda: Network(), step=step)


def _loss_of(batch: Batch, replica: Replica) -> Callable[[Any], Any]:
    return lambda model: replica.average(error(model(batch["x"]), batch))


def _argnums(model: Any, batch: Batch, replica: Replica) -> Any:
    def loss(scale: Any, model: Any) -> Any:
        return _loss_of(batch, replica)(model) * scale

    return nnx.grad(loss, argnums=1)(2.0, model)


def _diff_state(model: Any, batch: Batch, replica: Replica) -> Any:
    only = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("last")))
    return nnx.grad(_loss_of(batch, replica), argnums=only)(model)


def _has_aux(model: Any, batch: Batch, replica: Replica) -> Any:
    def loss(model: Any) -> Any:
        return _loss_of(batch, replica)(model), batch["y"]

    (_, _), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    return grads


class Counted(nnx.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        self.inner, self.calls = Network(), nnx.Variable(jnp.zeros((), "int32"))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.inner(x)


def _with_rngs() -> Any:
    return nnx.Dict(net=Network(nnx.Dropout(0.5)), rngs=nnx.Rngs(dropout=1))


def _rngs_losses(model: Any, b: Batch) -> Any:
    x = model.net.first(b["x"])
    x = model.net.between[0](x, rngs=model.rngs)
    return error(model.net.last(x), b)


def _apply(transform: Callable[[Any], Any]) -> Losses:
    return lambda model, b: error(transform(lambda m, x: m(x))(model, b["x"]), b)


def _partially(bind: Any) -> Losses:
    return lambda model, b: error(bind(lambda m, x: m(x), model)(b["x"]), b)


NNX = [
    nnx_case("nnx.jit", _apply(nnx.jit)),
    nnx_case("nnx.jit (changing state)", _apply(nnx.jit), Counted),
    nnx_case(
        "nnx.jit_partial",
        _partially(
            functools.partial(nnx.jit_partial, graph=False, graph_updates=False)
        ),
    ),
    nnx_case(
        "nnx.cached_partial",
        _partially(lambda f, model: nnx.cached_partial(nnx.jit(f), model)),
    ),
    nnx_case("nnx.remat", _apply(nnx.remat)),
    nnx_case("nnx.remat (changing state)", _apply(nnx.remat), Counted),
    nnx_case(
        "nnx.vmap (over examples)",
        lambda model, b: error(
            nnx.vmap(lambda m, x: m(x[None])[0], in_axes=(None, 0))(model, b["x"]), b
        ),
    ),
    nnx_case("nnx.vmap (an ensemble)", _vmap_losses, _ensemble),
    nnx_case("nnx.scan (over layers)", _scan_losses(False), _ensemble),
    nnx_case("nnx.scan (over rematerialized layers)", _scan_losses(True), _ensemble),
    by_shard(
        "nnx.scan (over layers with dropout)",
        _dropout_stack,
        _scan_losses(False),
        note=KEY_NOTE,
    ),
    nnx_case("nnx.cond (shared predicate)", _nnx_cond(_shared_predicate)),
    nnx_case("nnx.cond (local predicate)", _nnx_cond(lambda m, b: is_local(b))),
    nnx_case("nnx.switch", _nnx_switch),
    nnx_case("nnx.while_loop", _nnx_while, lambda: Stackable(nnx.Rngs(0))),
    nnx_case("nnx.fori_loop", _nnx_fori, lambda: Stackable(nnx.Rngs(0))),
    nnx_case("nnx.custom_vjp", lambda m, b: error(_doubled(m, b["x"]), b)),
    nnx_case("nnx.vjp", _nnx_vjp),
    nnx_case("nnx.jvp", _nnx_jvp),
    nnx_case("nnx.split and nnx.merge", _nnx_split),
    nnx_case("nnx.call", _nnx_call),
    nnx_case("nnx.eval_shape", _nnx_eval_shape),
    by_shard("nnx.Rngs (given to a call)", _with_rngs, _rngs_losses, note=KEY_NOTE),
    nnx_case("nnx.clone", lambda m, b: error(nnx.clone(m)(b["x"]) + m(b["x"]), b)),
    nnx_case(
        "nnx.view",
        lambda m, b: error(
            nnx.view(m, deterministic=True, only=nnx.Dropout)(b["x"]), b
        ),
        lambda: Network(nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
    ),
    nnx_case(
        "nnx.with_attributes",
        lambda m, b: error(
            nnx.with_attributes(m, deterministic=True, only=nnx.Dropout)(b["x"]), b
        ),
        lambda: Network(nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
    ),
    _grad_case("nnx.grad (argnums)", _argnums),
    _grad_case("nnx.grad (argnums=nnx.DiffState(...))", _diff_state),
    _grad_case("nnx.value_and_grad (has_aux)", _has_aux),
]

CONTROL_CASES = functions("", CONTROL)
AUTODIFF_CASES = [
    *functions("", AUTODIFF),
    *functions("", INLINED, is_here=hasattr(jax, "Inline")),
]
CALLBACK_CASES = functions("", CALLBACKS)
SPARSE_CASES = functions("", SPARSE)
CASES: list[Case] = [
    *CONTROL_CASES,
    *AUTODIFF_CASES,
    *CALLBACK_CASES,
    *SPARSE_CASES,
    *NNX,
]
