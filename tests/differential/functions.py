"""Functions of JAX and Optax of every kind, one loss for each.

Each loss uses its function on something made of the parameters and the batch, so that
both the values and the gradients through it must be right.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import optax
from flax import nnx
from jax.scipy.optimize import minimize
from jax.scipy.spatial import transform

from tests.differential.harness import (
    CLASSES,
    WIDTH,
    Batch,
    Case,
    Losses,
    by_shard,
    functions,
)
from tests.differential.layers import KEY_NOTE
from tests.differential.programs import z

Function = Callable[..., Any]


def unit(w: Any, b: Batch) -> Any:
    """Returns a number between 0.1 and 0.9 per example."""
    return 0.1 + 0.8 * jax.nn.sigmoid(z(w, b))


def positive(w: Any, b: Batch) -> Any:
    """Returns a number above 0.5 per example."""
    return 0.5 + jax.nn.softplus(z(w, b))


def matrix(w: Any, b: Batch) -> Any:
    """Returns a well-conditioned 3 x 3 matrix per example."""
    outer = b["x"][:, :3, None] * b["x"][:, None, 3:] * w[:3]
    return 0.1 * outer + jnp.diag(2 + w[3:] * jnp.arange(3))


def definite(w: Any, b: Batch) -> Any:
    """Returns a positive definite 3 x 3 matrix per example."""
    m = matrix(w, b)
    return m @ m.mT + jnp.diag(jnp.arange(3.0))


def rows(w: Any, b: Batch) -> Any:
    """Returns a vector per example."""
    return b["x"] * w


def logits(w: Any, b: Batch) -> Any:
    """Returns three numbers per example."""
    return rows(w, b)[:, :CLASSES]


def total(value: Any) -> Any:
    """Returns one real number per example, of any real or complex arrays."""
    parts = [
        jnp.abs(leaf).reshape(len(leaf), -1).sum(1)
        if jnp.iscomplexobj(leaf)
        else jnp.asarray(leaf, "float64").reshape(len(leaf), -1).sum(1)
        for leaf in jax.tree.leaves(value)
    ]
    return sum(parts)


def of(argument: Losses, fn: Function) -> Losses:
    """Returns the loss that applies `fn` to an argument for all examples at once."""
    return lambda w, b: total(fn(argument(w, b)))


def each(argument: Losses, fn: Function) -> Losses:
    """Returns the loss that applies `fn` to an argument of each example."""
    return lambda w, b: total(jax.vmap(fn)(argument(w, b)))


def weighed(argument: Losses, fn: Function) -> Losses:
    """Returns the loss that weighs each example by `fn`, which has no gradient."""
    return lambda w, b: (
        z(w, b) * total(jax.vmap(fn)(jax.lax.stop_gradient(argument(w, b))))
    )


def features(w: Any, b: Batch) -> Any:
    """Returns what the batch holds, without any parameter."""
    del w
    return b["x"]


def nearest(x: Any, start: Any) -> Any:
    """Returns the vector that is nearest to `x`, as an optimizer finds it."""
    return minimize(lambda v: jnp.sum((v - x) ** 2), start, method="BFGS").x


def targets(b: Batch) -> Any:
    """Returns one-hot labels."""
    return jax.nn.one_hot(b["label"], CLASSES)


def _loss(fn: Function) -> Losses:
    return lambda w, b: fn(logits(w, b), targets(b))


def _binary(fn: Function) -> Losses:
    return lambda w, b: fn(z(w, b), (b["label"] > 0).astype("float64"))


def _distribution(fn: Function) -> Losses:
    return lambda w, b: fn(
        jax.nn.log_softmax(logits(w, b)), jax.nn.softmax(b["x"][:, 3:])
    )


def _labeled(fn: Function) -> Losses:
    return lambda w, b: fn(logits(w, b), b["label"])


def _ctc(fn: Function) -> Losses:
    def loss(w: Any, b: Batch) -> Any:
        scores = jnp.stack([logits(w, b)] * 4, 1)
        labels = jnp.stack([b["label"], b["label"]], 1)
        zeros = jnp.zeros(scores.shape[:2]), jnp.zeros(labels.shape)
        return fn(scores, zeros[0], labels, zeros[1])

    return loss


def _with_label(fn: Function) -> Losses:
    """Applies a function of one vector of scores and one label to each example."""
    return lambda w, b: jax.vmap(fn)(logits(w, b), b["label"])


def named(module: Any, names: str) -> list[tuple[str, Function]]:
    """Returns functions of a module, with their names."""
    return [(name, getattr(module, name)) for name in names.split()]


OPTAX: dict[str, Losses] = {
    "l2_loss": lambda w, b: optax.l2_loss(z(w, b), b["y"]),
    "squared_error": lambda w, b: optax.squared_error(z(w, b), b["y"]),
    "huber_loss": lambda w, b: optax.huber_loss(z(w, b), b["y"]),
    "log_cosh": lambda w, b: optax.log_cosh(z(w, b), b["y"]),
    "cosine_similarity": _loss(optax.cosine_similarity),
    "cosine_distance": _loss(optax.cosine_distance),
    "hinge_loss": lambda w, b: optax.hinge_loss(z(w, b), jnp.sign(b["y"])),
    "losses.perceptron_loss": lambda w, b: optax.losses.perceptron_loss(
        z(w, b), jnp.sign(b["y"])
    ),
    "losses.sparsemax_loss": _binary(optax.losses.sparsemax_loss),
    "sigmoid_binary_cross_entropy": _binary(optax.sigmoid_binary_cross_entropy),
    "sigmoid_focal_loss": _binary(optax.sigmoid_focal_loss),
    "softmax_cross_entropy": _loss(optax.softmax_cross_entropy),
    "softmax_cross_entropy_with_integer_labels": _labeled(
        optax.softmax_cross_entropy_with_integer_labels
    ),
    "safe_softmax_cross_entropy": _loss(optax.safe_softmax_cross_entropy),
    "smooth_labels": lambda w, b: optax.softmax_cross_entropy(
        logits(w, b), optax.smooth_labels(targets(b), 0.1)
    ),
    "losses.poly_loss_cross_entropy": _loss(optax.losses.poly_loss_cross_entropy),
    "losses.multiclass_hinge_loss": _with_label(optax.losses.multiclass_hinge_loss),
    "losses.multiclass_perceptron_loss": _with_label(
        optax.losses.multiclass_perceptron_loss
    ),
    "losses.multiclass_sparsemax_loss": _labeled(
        optax.losses.multiclass_sparsemax_loss
    ),
    "kl_divergence": _distribution(optax.kl_divergence),
    "losses.kl_divergence_with_log_targets": lambda w, b: (
        optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(logits(w, b)), jax.nn.log_softmax(b["x"][:, 3:])
        )
    ),
    "convex_kl_divergence": _distribution(optax.convex_kl_divergence),
    "generalized_kl_divergence": _distribution(optax.generalized_kl_divergence),
    "ctc_loss": _ctc(optax.ctc_loss),
    "ctc_loss_with_forward_probs": _ctc(
        lambda *args: optax.ctc_loss_with_forward_probs(*args)[0]
    ),
    "losses.ranking_softmax_loss": lambda w, b: optax.losses.ranking_softmax_loss(
        logits(w, b), b["x"][:, 3:] ** 2, reduce_fn=None
    ),
    "losses.triplet_margin_loss": lambda w, b: optax.losses.triplet_margin_loss(
        logits(w, b), b["x"][:, :3], b["x"][:, 3:]
    ),
    **{
        f"losses.{name}": lambda w, b, f=f: jax.vmap(
            lambda p, t: f(p[None], t[None]).sum()
        )(logits(w, b), targets(b))
        for name, f in named(
            optax.losses, "dice_loss binary_dice_loss multiclass_generalized_dice_loss"
        )
    },
    "losses.make_fenchel_young_loss": lambda w, b: jax.vmap(
        optax.losses.make_fenchel_young_loss(jax.nn.logsumexp)
    )(logits(w, b), targets(b)),
    "ntxent": lambda w, b: jax.vmap(
        lambda r: optax.ntxent(r.reshape(3, 2), jnp.array([0, 0, 1]))
    )(rows(w, b)),
    "scale_gradient": lambda w, b: optax.scale_gradient(z(w, b), 0.5),
    "safe_norm": each(rows, lambda r: optax.safe_norm(r, 0.1)[None]),
    "safe_root_mean_squares": each(
        rows, lambda r: optax.safe_root_mean_squares(r, 0.1)[None]
    ),
    "multi_normal": lambda w, b: optax.multi_normal(w, 0 * w).log_prob(b["x"]),
    "matrix_inverse_pth_root": weighed(
        definite, lambda m: optax.matrix_inverse_pth_root(m, 2)[0]
    ),
    "nnls": lambda w, b: (
        z(w, b)
        * jax.lax.stop_gradient(
            jax.vmap(lambda m, y: optax.nnls(m, y, 20).sum())(
                definite(w, b), b["x"][:, :3]
            )
        )
    ),
    "power_iteration": weighed(definite, lambda m: optax.power_iteration(m)[0]),
    **{
        f"assignment.{name}": lambda w, b, f=f: (
            z(w, b) + jax.vmap(lambda m: m[f(m)].sum())(matrix(w, b))
        )
        for name, f in named(
            optax.assignment, "hungarian_algorithm base_hungarian_algorithm"
        )
    },
    "second_order.hvp": lambda w, b: total(
        jax.vmap(
            lambda x, y: optax.second_order.hvp(
                lambda p, w, y: jnp.sum(jnp.tanh(p * w) - y) ** 2, x, x, w, y
            )
        )(b["x"], b["y"])
    ),
    "microbatch": lambda w, b: optax.microbatch(
        lambda x: x @ w, 0, 1, accumulator=optax.microbatching.AccumulationType.CONCAT
    )(b["x"]),
    "perturbations.make_perturbed_fun": lambda w, b: (
        total(
            optax.perturbations.make_perturbed_fun(
                lambda v: jax.nn.one_hot(jnp.argmax(v, -1), CLASSES), 10, 0.5
            )(jax.random.key(0), logits(w, b))
        )
        * 0
        + z(w, b)
    ),
    **{
        f"projections.{name}": each(rows, lambda r, f=f: f(r))
        for name, f in named(
            optax.projections,
            """
            projection_non_negative projection_simplex projection_l1_ball
            projection_l1_sphere projection_l2_ball projection_l2_sphere
            projection_linf_ball
            """,
        )
    },
    "projections.projection_box": of(
        rows, lambda r: optax.projections.projection_box(r, 0.0, 1.0)
    ),
    "projections.projection_hypercube": of(
        rows, optax.projections.projection_hypercube
    ),
    **{
        f"projections.{name}": each(rows, lambda r, f=f: f(r, jnp.ones(WIDTH), 0.5))
        for name, f in named(
            optax.projections, "projection_halfspace projection_hyperplane"
        )
    },
}
ACTIVATIONS = """
    celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu
    log_sigmoid mish relu relu6 selu sigmoid silu soft_sign softplus sparse_plus
    sparse_sigmoid squareplus swish tanh
"""
NN: dict[str, Losses] = {
    **{name: of(z, getattr(jax.nn, name)) for name in ACTIVATIONS.split()},
    **{
        name: of(rows, getattr(jax.nn, name))
        for name in ("glu", "softmax", "log_softmax", "standardize")
    },
    "logsumexp": of(rows, lambda r: jax.nn.logsumexp(r, -1)),
    "logmeanexp": of(rows, lambda r: jax.nn.logmeanexp(r, -1)),
    "log1mexp": of(positive, jax.nn.log1mexp),
    "one_hot": lambda w, b: total(jax.nn.one_hot(b["label"], WIDTH) * w),
    "scaled_dot_general": lambda w, b: (
        z(w, b)
        + 0
        * total(
            jax.nn.scaled_dot_general(
                b["x"], jnp.stack([w] * 2, 1), (((1,), (0,)), ((), ()))
            )
        )
    ),
}

# Computed in float32 inside.
ATTENTION: dict[str, Losses] = {
    "dot_product_attention": lambda w, b: total(
        jax.nn.dot_product_attention(
            *[rows(w, b).reshape(-1, 3, 2, 1)] * 3, is_causal=True
        )
    ),
}

# One for each primitive, or solver behind one: what is made of others runs inside a
# step as JAX has made it.
SPECIAL: dict[str, Losses] = {
    **{
        name: of(positive, getattr(jsp.special, name))
        for name in [
            "digamma",
            "erf",
            "erfc",
            "expi",
            "gammaln",
            "i0e",
            "i1e",
            "spence",
        ]
    },
    "erfinv": of(unit, jsp.special.erfinv),
    "betainc": lambda w, b: jsp.special.betainc(2.0, 3.0, unit(w, b)),
    "gammainc": lambda w, b: jsp.special.gammainc(2.0, positive(w, b)),
    "gammaincc": lambda w, b: jsp.special.gammaincc(2.0, positive(w, b)),
    "hyp1f1": lambda w, b: jsp.special.hyp1f1(1.5, 2.5, unit(w, b)),
    "polygamma": lambda w, b: jsp.special.polygamma(1, positive(w, b)),
    "zeta": lambda w, b: z(w, b) * jsp.special.zeta(2 + b["y"] ** 2, 1.0),
}

LINALG: dict[str, Losses] = {
    "cholesky": of(definite, jnp.linalg.cholesky),
    "det": of(matrix, jnp.linalg.det),
    "eig": each(
        matrix, lambda m: jnp.abs(jnp.linalg.eig(jax.lax.stop_gradient(m))[0]) * m.sum()
    ),
    "eigh": each(definite, lambda m: jnp.linalg.eigh(m)[0] ** 2),
    "inv": of(matrix, jnp.linalg.inv),
    "lstsq": each(matrix, lambda m: jnp.linalg.lstsq(m, jnp.ones(3))[0]),
    "matrix_rank": lambda w, b: z(w, b) * jnp.linalg.matrix_rank(matrix(w, b)),
    "qr": of(matrix, lambda m: jnp.abs(jnp.linalg.qr(m)[1])),
    "solve": lambda w, b: total(jnp.linalg.solve(matrix(w, b), b["x"][:, :3, None])),
    "svd": of(matrix, lambda m: jnp.linalg.svd(m)[1]),
}

SCIPY_LINALG: dict[str, Losses] = {
    "eigh_tridiagonal": weighed(
        features, lambda x: jsp.linalg.eigh_tridiagonal(x, x[1:], eigvals_only=True)[0]
    ),
    "expm": of(matrix, lambda m: jsp.linalg.expm(0.1 * m)),
    "hessenberg": weighed(matrix, lambda m: jnp.abs(jsp.linalg.hessenberg(m))),
    "lu": each(matrix, lambda m: jsp.linalg.lu(m)[2]),
    "polar": weighed(matrix, lambda m: jsp.linalg.polar(m)[1]),
    "qr_multiply": weighed(
        matrix, lambda m: jnp.abs(jsp.linalg.qr_multiply(m, jnp.eye(3))[1])
    ),
    "schur": weighed(definite, lambda m: jnp.diag(jsp.linalg.schur(m)[0])),
    "solve_triangular": each(
        matrix, lambda m: jsp.linalg.solve_triangular(m, jnp.ones(3))
    ),
    "sqrtm": weighed(definite, lambda m: jnp.abs(jsp.linalg.sqrtm(m))),
}

SCIPY: dict[str, Losses] = {
    "signal.fftconvolve": each(rows, lambda r: jsp.signal.fftconvolve(r, r[:3])),
    "ndimage.map_coordinates": each(
        rows, lambda r: jsp.ndimage.map_coordinates(r, [jnp.array([0.5, 1.5])], order=1)
    ),
    "spatial.transform.Rotation": each(
        logits, lambda v: transform.Rotation.from_rotvec(v).as_matrix()
    ),
    "optimize.minimize": weighed(features, lambda x: nearest(x, 0 * x)),
    "optimize.minimize (under vmap, a shared start)": weighed(
        features, lambda x: nearest(x, jnp.zeros(6))
    ),
    "sparse.linalg.cg": each(
        definite, lambda m: jsp.sparse.linalg.cg(lambda v: m @ v, jnp.ones(3))[0]
    ),
    "sparse.linalg.bicgstab": each(
        definite,
        lambda m: jsp.sparse.linalg.bicgstab(lambda v: m @ v, m[0], tol=1e-12)[0],
    ),
    "sparse.linalg.bicgstab (a shared right-hand side)": each(
        definite,
        lambda m: jsp.sparse.linalg.bicgstab(lambda v: m @ v, jnp.ones(3), tol=1e-12)[
            0
        ],
    ),
    "sparse.linalg.gmres": each(
        definite, lambda m: jsp.sparse.linalg.gmres(lambda v: m @ v, m[0], tol=1e-12)[0]
    ),
    "sparse.linalg.cg (a system of parameters)": lambda w, b: (
        b["x"]
        @ jsp.sparse.linalg.cg(lambda v: (2 + w**2) * v, jnp.ones(6), tol=1e-14)[0]
    ),
    "sparse.linalg.cg (of the batch)": lambda w, b: jsp.sparse.linalg.cg(
        lambda v: v * (2 + b["y"] ** 2), z(w, b), tol=1e-14
    )[0],
}

FFT: dict[str, Losses] = {
    name: of(rows, getattr(jnp.fft, name)) for name in ("fft", "rfft", "irfft")
}

ARRAYS: dict[str, Losses] = {
    "jax.image.resize": of(
        lambda w, b: rows(w, b).reshape(-1, 3, 2),
        lambda m: jax.image.resize(m, (len(m), 6, 4), "cubic"),
    ),
    "jax.image.scale_and_translate": each(
        matrix,
        lambda m: jax.image.scale_and_translate(
            m, (4, 4), (0, 1), jnp.array([1.2, 0.9]), jnp.array([0.1, 0.2]), "linear"
        ),
    ),
    **{
        f"jax.ops.{name}": each(
            rows,
            lambda r, f=f: f(r, jnp.array([0, 0, 1, 1, 2, 2]), 3),
        )
        for name, f in named(jax.ops, "segment_max segment_min segment_sum")
    },
    "jax.ops.segment_prod": weighed(
        features, lambda x: jax.ops.segment_prod(x, jnp.array([0, 0, 1, 1, 2, 2]), 3)
    ),
    "jnp.argsort (indices of parameters)": lambda w, b: total(
        w[jnp.argsort(b["x"], 1)] * b["x"]
    ),
    "jnp.argsort (ranks weigh parameters)": lambda w, b: total(
        w * jnp.argsort(b["x"], 1)
    ),
    "jnp.sort (of the batch)": lambda w, b: jnp.sort(b["x"], 1) @ w,
    "jnp.sort (of activations)": of(rows, lambda r: jnp.sort(r, 1) * jnp.arange(6)),
    "jnp.lexsort": lambda w, b: total(
        jax.vmap(lambda x: w[jnp.lexsort((x, -x))])(b["x"]) * jnp.arange(6)
    ),
    "lax.sort (several operands)": lambda w, b: total(
        jax.lax.sort((b["x"], rows(w, b)), dimension=1, num_keys=1)[1] * jnp.arange(6)
    ),
    "lax.sort_key_val": lambda w, b: total(
        jax.lax.sort_key_val(b["x"], rows(w, b))[1] * jnp.arange(6)
    ),
    "lax.top_k": of(rows, lambda r: jax.lax.top_k(r, 2)[0]),
    "lax.top_k (indices of parameters)": lambda w, b: total(
        w[jax.lax.top_k(b["x"], 2)[1]]
    ),
    "lax.approx_max_k": of(rows, lambda r: jax.lax.approx_max_k(r, 2)[0]),
    "jnp.argmax (index of a parameter)": lambda w, b: w[jnp.argmax(b["x"], 1)] * b["y"],
    "jnp.argpartition": lambda w, b: total(w[jnp.argpartition(b["x"], 2, 1)] * b["x"]),
    "jnp.partition": of(rows, lambda r: jnp.partition(r, 2, 1)[:, :2]),
    "jnp.searchsorted": lambda w, b: w[
        jnp.clip(jnp.searchsorted(jnp.arange(6.0), b["y"]), 0, 5)
    ],
    "jnp.searchsorted (method=sort)": lambda w, b: (
        w[jnp.clip(jnp.searchsorted(jnp.arange(6.0), b["y"], method="sort"), 0, 5)]
        * b["y"]
    ),
    "jnp.digitize": lambda w, b: w[jnp.digitize(b["y"], jnp.arange(5.0))],
    "jnp.unique (size)": lambda w, b: total(
        jax.vmap(lambda x: jnp.unique(jnp.round(x), size=6))(b["x"]) * w
    ),
    "jnp.percentile": of(rows, lambda r: jnp.percentile(r, 30, axis=1)),
    "jnp.median": of(rows, lambda r: jnp.median(r, axis=1)),
    "jnp.quantile": of(
        rows, lambda r: jnp.quantile(r, jnp.array([0.2, 0.7]), axis=1).T
    ),
    "jnp.histogram": lambda w, b: total(
        jax.vmap(lambda x: jnp.histogram(x, 6)[0])(b["x"]) * w
    ),
    "jnp.bincount": lambda w, b: total(
        jax.vmap(lambda x: jnp.bincount(x, length=6))(
            jnp.stack([b["label"], b["label"] + 1], 1)
        )
        * w
    ),
    "jnp.nonzero (size)": lambda w, b: total(
        jax.vmap(lambda x: w[jnp.nonzero(x > 0, size=6, fill_value=0)[0]])(b["x"])
    ),
    "jnp.cumsum": of(rows, lambda r: jnp.cumsum(r, 1)),
    "jnp.cumprod": of(rows, lambda r: jnp.cumprod(r, 1)),
    "lax.cummax": of(rows, lambda r: jax.lax.cummax(r, 1)),
    "lax.cumlogsumexp": of(rows, lambda r: jax.lax.cumlogsumexp(r, 1)),
    "jnp.interp": lambda w, b: jnp.interp(b["y"], jnp.arange(6.0), w),
    "jnp.einsum": lambda w, b: jnp.einsum("bi,bj,i,j->b", b["x"], b["x"], w, w),
    "jnp.convolve": each(rows, lambda r: jnp.convolve(r, r)),
    "jnp.polyfit": lambda w, b: total(
        jax.vmap(lambda r: jnp.polyfit(jnp.arange(6.0), r, 1))(rows(w, b))
    ),
    "jnp.polyval": lambda w, b: jnp.polyval(w, b["y"] * 0.1),
    "jnp.kron": each(rows, lambda r: jnp.kron(r, r)),
    "jnp.gradient": of(rows, lambda r: jnp.gradient(r, axis=1)),
    "jnp.roll": of(rows, lambda r: jnp.roll(r, 1, 1) * jnp.arange(6)),
    "jnp.take": lambda w, b: jnp.take(w, b["label"]) * b["y"],
    "jnp.take_along_axis": lambda w, b: jnp.take_along_axis(
        rows(w, b), b["label"][:, None], 1
    )[:, 0],
    "array.at[].add (of parameters)": lambda w, b: total(
        jax.vmap(lambda i, y: w.at[i].add(y))(b["label"], b["y"]) ** 2
    ),
    "array.at[].set (of activations)": lambda w, b: total(
        rows(w, b).at[:, 1].set(b["y"])
    ),
    "array.at[].max": lambda w, b: total(rows(w, b).at[:, 1].max(b["y"])),
    "lax.dynamic_slice": lambda w, b: total(
        jax.vmap(lambda i: jax.lax.dynamic_slice(w, (i,), (2,)))(b["label"])
    ),
    "lax.dynamic_update_slice": lambda w, b: total(
        jax.vmap(lambda i, x: jax.lax.dynamic_update_slice(w, x[:2], (i,)))(
            b["label"], b["x"]
        )
    ),
    "lax.conv_general_dilated": lambda w, b: total(
        jax.lax.conv_general_dilated(
            b["x"][:, None], w.reshape(1, 1, 6)[..., :3], (1,), "SAME"
        )
    ),
    "lax.reduce": of(rows, lambda r: jax.lax.reduce(r, 0.0, jax.lax.add, (1,))),
    "lax.reduce_window": of(
        rows,
        lambda r: jax.lax.reduce_window(
            r, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID"
        ),
    ),
    "lax.ragged_dot": lambda w, b: total(
        jax.lax.ragged_dot(
            b["x"].reshape(-1, 2),
            jnp.stack([w.reshape(2, 3)] * 2),
            jnp.array([1, b["x"].size // 2 - 1]),
        ).reshape(len(b["y"]), -1)
    ),
    "lax.linalg.triangular_solve": lambda w, b: total(
        jax.lax.linalg.triangular_solve(
            jnp.tril(matrix(w, b)), b["x"][:, :3, None], left_side=True, lower=True
        )
    ),
    "lax.linalg.tridiagonal_solve": lambda w, b: (
        z(w, b)
        * total(
            jax.lax.linalg.tridiagonal_solve(
                b["x"], 9 + b["x"], b["x"], b["x"][..., None]
            )
        )
    ),
    "lax.rng_bit_generator": lambda w, b: (
        z(w, b)
        + 0
        * jax.lax.rng_bit_generator(jnp.zeros(4, "uint32"), (2,))[1][0].astype(
            "float64"
        )
    ),
    "jnp.nan_to_num": lambda w, b: jnp.nan_to_num(
        jnp.where(b["y"] > 0, z(w, b), jnp.nan)
    ),
    "complex numbers": lambda w, b: jnp.abs(z(w, b) * jnp.exp(1j * b["y"])) ** 2,
    "bfloat16 and back": lambda w, b: (
        (z(w, b) * 0 + b["y"]).astype("bfloat16").astype("float64") * z(w, b)
    ),
    "expert choice (argsort over experts)": lambda w, b: total(
        jax.vmap(lambda x: w[jnp.argsort(-x)[:2]] * jax.nn.softmax(x)[:2])(b["x"])
    ),
    "Sinkhorn iterations (scan)": each(
        matrix,
        lambda m: (
            jax.lax.scan(
                lambda c, _: (c / c.sum(0) / c.sum(1, keepdims=True), None),
                jnp.exp(0.1 * m),
                None,
                3,
            )[0]
            ** 2
        ),
    ),
}


class Chancy(nnx.Module):
    """Weights, and a stored key."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))
        self.key = nnx.Variable(jax.random.key(7))


def _drawing(name: str, draw: Callable[[Any, Any, Any, Batch], Any]) -> Case:
    def losses(model: Any, b: Batch) -> Any:
        return draw(model.key[...], b["y"].shape, model.w[...], b)

    note = CONSTANT_NOTE if name in CONSTANT else KEY_NOTE
    return by_shard(f"jax.random.{name}", Chancy, losses, note=note)


def _sampled(sample: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Weighs parameters by numbers of the replica's own."""
    return lambda key, shape, w, b: (
        z(w, b) * jnp.asarray(sample(key, shape), "float64") + z(w, b)
    )


CONSTANT = ("key (a constant key)", "PRNGKey (a constant key)")
CONSTANT_NOTE = "every replica draws the same number, which all examples share"
R = jax.random
SAMPLERS: dict[str, Callable[[Any, Any], Any]] = {
    "ball": lambda k, s: R.ball(k, 2, shape=s).sum(1),
    "bernoulli": lambda k, s: R.bernoulli(k, 0.5, s),
    "beta": lambda k, s: R.beta(k, 2.0, 3.0, s),
    "binomial": lambda k, s: R.binomial(k, 5.0, 0.5, s),
    "bits": lambda k, s: R.bits(k, s, "uint8"),
    "categorical": lambda k, s: R.categorical(k, jnp.arange(3.0), shape=s),
    "cauchy": lambda k, s: R.cauchy(k, s),
    "chisquare": lambda k, s: R.chisquare(k, 3.0, shape=s),
    "dirichlet": lambda k, s: R.dirichlet(k, jnp.ones(3), s)[:, 0],
    "double_sided_maxwell": lambda k, s: R.double_sided_maxwell(k, 0.0, 1.0, s),
    "exponential": lambda k, s: R.exponential(k, s),
    "f": lambda k, s: R.f(k, 3.0, 4.0, shape=s),
    "gamma": lambda k, s: R.gamma(k, 2.0, s),
    "generalized_normal": lambda k, s: R.generalized_normal(k, 1.5, s),
    "geometric": lambda k, s: R.geometric(k, 0.3, shape=s),
    "gumbel": lambda k, s: R.gumbel(k, s),
    "laplace": lambda k, s: R.laplace(k, s),
    "loggamma": lambda k, s: R.loggamma(k, 2.0, s),
    "logistic": lambda k, s: R.logistic(k, s),
    "lognormal": lambda k, s: R.lognormal(k, shape=s),
    "maxwell": lambda k, s: R.maxwell(k, s),
    "multinomial": lambda k, s: R.multinomial(k, 5, jnp.ones(3) / 3, shape=(*s, 3))[
        :, 0
    ],
    "multivariate_normal": lambda k, s: R.multivariate_normal(
        k, jnp.zeros(2), jnp.eye(2), s
    )[:, 0],
    "normal": lambda k, s: R.normal(k, s),
    "orthogonal": lambda k, s: R.orthogonal(k, 2, s)[:, 0, 0],
    "pareto": lambda k, s: R.pareto(k, 3.0, s),
    "poisson": lambda k, s: R.poisson(k, 2.0, s),
    "rademacher": lambda k, s: R.rademacher(k, s),
    "randint": lambda k, s: R.randint(k, s, 0, 5),
    "rayleigh": lambda k, s: R.rayleigh(k, 1.0, s),
    "t": lambda k, s: R.t(k, 3.0, s),
    "triangular": lambda k, s: R.triangular(k, 0.0, 0.5, 1.0, s),
    "truncated_normal": lambda k, s: R.truncated_normal(k, -1.0, 1.0, s),
    "uniform": lambda k, s: R.uniform(k, s),
    "wald": lambda k, s: R.wald(k, 1.0, s),
    "weibull_min": lambda k, s: R.weibull_min(k, 1.0, 2.0, s),
    "split": lambda k, s: R.uniform(R.split(k, 3)[1], s),
    "fold_in": lambda k, s: R.uniform(R.fold_in(k, 3), s),
    "clone": lambda k, s: R.uniform(R.clone(k), s),
    "key_data": lambda k, s: R.uniform(R.wrap_key_data(R.key_data(k)), s),
    "wrap_key_data": lambda k, s: R.normal(R.wrap_key_data(R.key_data(k)), s),
    "permutation": lambda k, s: R.permutation(k, s[0]),
    "choice": lambda k, s: R.choice(k, 20, s),
    "choice (replace=False)": lambda k, s: R.choice(k, 20, s, replace=False),
}
RANDOM: dict[str, Callable[..., Any]] = {
    **{name: _sampled(sample) for name, sample in SAMPLERS.items()},
    "permutation (indices of parameters)": lambda k, s, w, b: total(
        w[R.permutation(k, WIDTH)] * b["x"]
    ),
    "permutation (of parameters)": lambda k, s, w, b: R.permutation(k, w) @ b["x"].T,
    "choice (negative samples of parameters)": lambda k, s, w, b: (
        z(w, b) + w[R.choice(k, WIDTH, (3,), replace=False)].sum()
    ),
    "categorical (of learned logits, REINFORCE)": lambda k, s, w, b: jax.nn.log_softmax(
        rows(w, b)
    )[jnp.arange(s[0]), R.categorical(k, jax.lax.stop_gradient(rows(w, b)))],
    "gamma (reparameterized)": lambda k, s, w, b: R.gamma(k, positive(w, b)),
    "normal (reparameterized)": lambda k, s, w, b: z(w, b) * R.normal(k, s) + z(w, b),
    "key (a constant key)": lambda k, s, w, b: (
        z(w, b) * (R.uniform(R.key(3)) + 0 * b["y"])
    ),
    "PRNGKey (a constant key)": lambda k, s, w, b: z(w, b) * R.uniform(R.PRNGKey(3)),
}

OPTAX_CASES = functions("optax.", OPTAX)
JAX_CASES: list[Case] = [
    *functions("jax.nn.", NN),
    *functions("jax.nn.", ATTENTION, tolerance=1e-5),
    *functions("jax.scipy.special.", SPECIAL),
    *functions("jnp.linalg.", LINALG),
    *functions("jax.scipy.linalg.", SCIPY_LINALG),
    *functions("jax.scipy.", SCIPY),
    *functions("jnp.fft.", FFT),
    *functions("", ARRAYS),
]
RANDOM_CASES = [_drawing(name, draw) for name, draw in RANDOM.items()]
CASES: list[Case] = [*OPTAX_CASES, *JAX_CASES, *RANDOM_CASES]
