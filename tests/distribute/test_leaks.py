"""Programs that leak from one replica to another if a reduction is not the one meant.

Each is a loss for every example, of a parameter `w` with shape `(3,)` and rows `x` with
shape `(batch, 3)`. The gradient on several replicas is that on one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import sparse
from jax.experimental.ode import odeint
from jax.lax import scan as scan_bound_at_import

import armillary
from armillary import ReduceOp
from armillary.errors import DoubleReductionError, ReplicaMismatchError

ROWS = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
W = np.array([0.5, -1.0, 0.75], np.float32)


def each(fn):
    """Returns a loss of a batch from one of a row."""

    def losses(w, x):
        return jnp.stack([fn(w, row) for row in x])

    return losses


def ranked(w, row):
    return jnp.sum(w * jnp.argsort(row))


def taken(w, row):
    return jnp.sum(w[jnp.argsort(row)] * row)


def permuted(w, row):
    return row @ w[jax.random.permutation(jax.random.key(jnp.int32(9 * row[0])), 3)]


def sorted_pairs(w, row):
    _, values = jax.lax.sort_key_val(row, w)
    return values @ jnp.arange(3.0)


def branch_of_parameter(w, row):
    return jax.lax.cond(row[0] > 0, lambda: jnp.sum(w * row), lambda: w[0])


def branch_of_constant(w, row):
    chosen = jax.lax.cond(row[0] > 0, lambda: 2.0, lambda: 1.0)
    return chosen * jnp.sum(w)


def switched(w, row):
    index = jnp.argmax(row)
    return jax.lax.switch(index, [lambda: w[0], lambda: w[1] ** 2, lambda: jnp.sum(w)])


def constant_branch_of_shared_predicate(w, row):
    return jax.lax.cond(jnp.float32(1) > 0, lambda: row @ w, lambda: 0.0)


def counted(w, row):
    steps = jax.lax.while_loop(lambda n: n < jnp.sum(row > 0), lambda n: n + 1, 0)
    return steps * jnp.sum(w**2)


def looped(w, row):
    count = jnp.sum(row > 0)
    return jnp.sum(w) * jax.lax.fori_loop(0, count, lambda i, c: c + 1.5, 0.0)


def called_back(w, row):
    kind = jax.ShapeDtypeStruct((3,), jnp.float32)
    return w @ jax.pure_callback(lambda v: np.asarray(v) ** 2, kind, row)


def sparse_product(w, row):
    return jnp.sum(sparse.BCOO.fromdense(row[None], nse=3) @ w[:, None])


def scanned(w, row):
    return scan_bound_at_import(lambda c, y: (c + y * w[0], None), 0.0, row)[0]


def scanned_no_steps(w, row):
    carry, _ = jax.lax.scan(lambda c, y: (c + y * row, y), w, jnp.zeros((0, 3)))
    return jnp.sum(carry)


def solved(w, row):
    matrix = jnp.outer(w, w) + 5 * jnp.eye(3)
    solution, _ = jax.scipy.sparse.linalg.cg(lambda v: v @ matrix, row, maxiter=5)
    return jnp.sum(solution)


def rooted(w, row):
    def solve(f, y0):
        return jax.lax.fori_loop(0, 9, lambda i, y: y - f(y) / (3 * y**2 + 1), y0)

    return jax.lax.custom_root(
        lambda y: y**3 + y - row @ w, 0.0, solve, lambda g, y: y / g(1.0)
    )


def integrated(w, row):
    path = odeint(lambda y, t, w: -y * w[0] ** 2, row, jnp.array([0.0, 1.0]), w)
    return jnp.sum(path[-1])


def inverted(w, row):
    return jax.scipy.special.erfinv(0.5 * jnp.tanh(row @ w))


def incomplete_beta(w, row):
    return jax.scipy.special.betainc(2.0, 3.0, jax.nn.sigmoid(row @ w))


def gamma_drawn(w, row):
    key = jax.random.key(jnp.int32(9 * row[0]))
    return jax.random.gamma(key, jax.nn.softplus(row @ w))


def with_own_backward(backward):
    @jax.custom_vjp
    def product(w, row):
        return row @ w

    product.defvjp(lambda w, row: (row @ w, (w, row)), backward)
    return product


unsummed_backward = with_own_backward(lambda res, g: (g * res[1], g * res[0]))
zero_backward = with_own_backward(lambda res, g: (g * res[1], jnp.zeros(3)))
local_constant_backward = with_own_backward(lambda res, g: (g * res[1], jnp.ones(3)))


def through_a_constant_backward(w, row):
    return local_constant_backward(jnp.ones(3), w * row)


LOSSES = [
    ranked,
    taken,
    permuted,
    sorted_pairs,
    branch_of_parameter,
    branch_of_constant,
    switched,
    constant_branch_of_shared_predicate,
    counted,
    looped,
    called_back,
    sparse_product,
    scanned,
    scanned_no_steps,
    solved,
    rooted,
    integrated,
    inverted,
    incomplete_beta,
    gamma_drawn,
    unsummed_backward,
    zero_backward,
    through_a_constant_backward,
]


def gradient(strategy, losses, w=W):
    """Returns the gradient of the average loss over `ROWS`, on each replica."""
    (batch,) = strategy.distribute_dataset([ROWS])

    def step_fn(w, x):
        return armillary.all_reduce(
            "sum", jax.grad(lambda w: armillary.compute_average_loss(losses(w, x)))(w)
        )

    result = strategy.run(step_fn, args=(jnp.asarray(w), batch))
    return [np.asarray(part) for part in strategy.local_results(result)]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_the_gradient_is_that_of_one_replica(loss, make_mirrored):
    losses = each(loss)
    expected = jax.jit(jax.grad(lambda w: jnp.mean(losses(w, ROWS))))(W)
    for part in gradient(make_mirrored(2), losses):
        np.testing.assert_allclose(part, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.slow
def test_a_branch_for_each_example(make_mirrored):
    def losses(w, x):
        return jax.vmap(
            lambda row: jax.lax.cond(row[0] > 0, lambda: row @ w, lambda: w[0])
        )(x)

    expected = jax.grad(lambda w: jnp.mean(losses(w, ROWS)))(W)
    for part in gradient(make_mirrored(4), losses):
        np.testing.assert_allclose(part, expected, rtol=1e-5)


def test_what_a_backward_pass_has_summed_is_not_summed_again(make_mirrored):
    def backward(res, g):
        context = armillary.get_replica_context()
        return context.all_reduce(ReduceOp.SUM, g * res[1]), g * res[0]

    losses = each(with_own_backward(backward))
    with pytest.raises(DoubleReductionError, match=r"was reduced at .*test_leaks"):
        gradient(make_mirrored(2), losses)


STATES = {
    "cond": lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: w, lambda: w - 1),
    "sort": lambda w, x: w[jnp.argsort(x[0])],
    "while": lambda w, x: jax.lax.while_loop(
        lambda v: jnp.sum(v) < jnp.sum(x > 0), lambda v: v + 1, w
    ),
    "callback": lambda w, x: jax.pure_callback(
        lambda v: np.asarray(v), jax.ShapeDtypeStruct((3,), jnp.float32), w
    ),
    "callback without operands": lambda w, x: (
        w
        + jax.pure_callback(
            lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32)
        )
    ),
    "maximum within groups": lambda w, x: jax.lax.pmax(
        x[0], "replica", axis_index_groups=[[0], [1]]
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_mirrored_state_that_may_differ_is_refused(name, make_mirrored):
    strategy = make_mirrored(2)
    variable = nnx.Variable(jnp.asarray(W))
    (batch,) = strategy.distribute_dataset([ROWS])

    def step_fn(x):
        variable[...] = STATES[name](variable[...], x)

    with pytest.raises(ReplicaMismatchError, match=r"variable \(plain, mirrored\)"):
        strategy.run(step_fn, args=(batch,))
    np.testing.assert_array_equal(variable[...], W)


def test_gradients_of_single_examples_are_the_replicas(make_mirrored):
    strategy = make_mirrored(2)
    (batch,) = strategy.distribute_dataset([ROWS])

    def total(w, x):
        grads = jax.vmap(jax.grad(lambda w, row: jnp.tanh(row @ w)), (None, 0))(w, x)
        return jnp.sum(grads / jnp.linalg.norm(grads, axis=1, keepdims=True), axis=0)

    result = strategy.run(
        lambda w, x: armillary.all_reduce("sum", total(w, x)),
        args=(jnp.asarray(W), batch),
    )
    expected = total(jnp.asarray(W), ROWS)
    np.testing.assert_allclose(strategy.local_results(result)[1], expected, rtol=1e-5)


@pytest.mark.slow
def test_members_of_an_ensemble_are_no_examples(make_mirrored):
    strategy = make_mirrored(2)
    (batch,) = strategy.distribute_dataset([ROWS])
    members = jnp.stack([jnp.asarray(W), 2 * jnp.asarray(W)])

    def gradients(average, x):
        def loss(w):
            return average(jnp.tanh(x @ w))

        return jax.vmap(jax.grad(loss))(members)

    def step_fn(x):
        own = gradients(armillary.compute_average_loss, x)
        return armillary.all_reduce("sum", own)

    result = strategy.run(step_fn, args=(batch,))
    expected = gradients(jnp.mean, ROWS)
    np.testing.assert_allclose(strategy.local_results(result)[0], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")  # One of the numbers is close to 0.
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_state_that_is_returned_and_passed_in_again_stays_shared(
    num_replicas, make_mirrored
):
    strategy = make_mirrored(num_replicas)
    (batch,) = strategy.distribute_dataset([ROWS])

    def update(w, average, x):
        return w - 0.5 * armillary.all_reduce(
            "sum", jax.grad(lambda w: average(jnp.tanh(x @ w - 1) ** 2))(w)
        )

    @armillary.function
    def step(w, batch):
        return strategy.run(
            lambda w, x: update(w, armillary.compute_average_loss, x), args=(w, batch)
        )

    w = expected = jnp.asarray(W)
    for _ in range(4):
        w, expected = step(w, batch), update(expected, jnp.mean, ROWS)
    for part in strategy.local_results(w):
        np.testing.assert_allclose(part, expected, rtol=1e-5)


def test_state_that_no_share_of_a_batch_reaches_is_equal(make_mirrored):
    strategy = make_mirrored(2)
    (batch,) = strategy.distribute_dataset([ROWS])
    weights = nnx.Variable(jnp.asarray(W))
    optimizer_key = nnx.OptVariable(jax.random.key(0))
    first = jax.random.split(optimizer_key[...], 2)[1]

    def step_fn(x):
        del x
        weights[...] = weights[...] + 1
        optimizer_key[...] = jax.random.split(optimizer_key[...])[1]

    strategy.run(step_fn, args=(batch,))
    np.testing.assert_array_equal(weights[...], W + 1)
    assert jnp.array_equal(
        jax.random.key_data(optimizer_key[...]), jax.random.key_data(first)
    )
