"""The classes of JAX's operations, by which the analyses of a step follow numbers."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.distribute.replica._linearity import CURVED, LINEAR, SCALING

# Operations of one number whose class does not matter: they give integers or flags, or
# random bits.
OTHER = {"is_finite", "population_count", "clz", "not", "bitcast_convert_type"}


def find_operations():
    """Returns the function of each operation of one number, by its name."""
    found = {}
    for name, fn in inspect.getmembers(jax.lax, callable):
        if name.startswith("_") or inspect.isclass(fn):
            continue
        try:
            program = jax.make_jaxpr(fn)(0.5)
        except Exception:  # It is not a function of one number.
            continue
        equations = program.jaxpr.eqns
        is_one = len(equations) == 1 and len(equations[0].invars) == 1
        if is_one and [each.dtype for each in program.out_avals] == [np.float32]:
            found[equations[0].primitive.name] = fn
    return found


OPERATIONS = find_operations()


def test_operations_of_one_number_have_a_class():
    assert len(OPERATIONS) > 30
    assert OPERATIONS.keys() <= LINEAR | SCALING | CURVED | OTHER


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - OTHER))
def test_only_curved_operations_lose_a_factor(name):
    fn = OPERATIONS[name]
    one = fn(jnp.float32(0.3))

    # Two factors, because `ceil(0.6)` is `2 * ceil(0.3)` by chance, and `floor` is 0.
    scaled = [fn(jnp.float32(0.3 * factor)) for factor in (2.0, 5.0)]
    keeps = np.allclose(scaled, [2 * one, 5 * one], rtol=1e-5)

    assert keeps == (name not in CURVED)


@pytest.mark.parametrize("fn", [jnp.tan, jnp.sinh, jnp.floor, jax.lax.erfc, jnp.tanh])
def test_a_function_of_a_divided_loss_may_be_averaged(fn):
    strategy = armillary.MirroredStrategy(jax.devices()[:2])
    (batch,) = strategy.distribute_dataset([np.arange(4.0, dtype=np.float32)])

    def step(x):
        loss = armillary.compute_average_loss(x)
        return armillary.all_reduce("mean", fn(loss))

    value = strategy.reduce("mean", strategy.run(step, args=(batch,)))
    np.testing.assert_allclose(value, np.mean([fn(0.25), fn(1.25)]), rtol=1e-5)
