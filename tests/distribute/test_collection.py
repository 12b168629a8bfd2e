"""Tests of where the program of a step collects its divided parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import core
from jax.sharding import PartitionSpec as P

import armillary
from armillary._jaxpr import programs_in
from armillary.distribute.strategies._collection import collect_at_use
from armillary.plan._compile_worker import compile_exported
from armillary.plan._compiler import export_loop
from armillary.trainer._described import described

AXES = ("data", "fsdp")
DEPTH = 3
SIZE = 8


def make_mesh():
    return jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 4), AXES)


def edit(fn, specs, *arguments):
    """Returns the edited program of a function, whose first arguments have specs."""
    program = jax.make_jaxpr(fn)(*arguments)
    missing = len(program.jaxpr.invars) - len(specs)
    edited = collect_at_use(program, [*specs, *[None] * missing], make_mesh(), AXES)
    expected = jax.jit(core.jaxpr_as_fun(program))(*jax.tree.leaves(arguments))
    results = jax.jit(core.jaxpr_as_fun(edited))(*jax.tree.leaves(arguments))
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-6, atol=1e-6)
    return edited


def is_held_row(equation, jaxpr, within):
    """Returns whether an equation holds a row of a stack in parts, before its use."""
    is_input = within[-1:] == ("scan",) and equation.invars[0] in jaxpr.invars
    return is_input and any(equation.params["sharding"].spec)


def find_equations(program, within=()):
    """Yields the equations that collect a value, each with the operations around it."""
    jaxpr = getattr(program, "jaxpr", program)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "sharding_constraint" and not is_held_row(equation, jaxpr, within):
            yield "/".join(each for each in within if each != "jit"), equation
        for inner in programs_in(equation):
            yield from find_equations(inner, (*within, name))


def find_constraints(program):
    """Returns the place and the type of each collected value."""
    return [
        (place, equation.invars[0].aval.str_short())
        for place, equation in find_equations(program)
    ]


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


WEIGHT = draw(SIZE, SIZE)
STACK = draw(DEPTH, SIZE, SIZE)
X = draw(4, SIZE)


def test_a_product_collects_its_parameter_after_the_cast():
    def fn(weight, x):
        return x.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16).T

    edited = edit(lambda w, x: fn(w, x).astype(jnp.float32), [P("fsdp")], WEIGHT, X)
    assert find_constraints(edited) == [("", "bfloat16[8,8]")]


def test_a_collected_parameter_stays_divided_over_axes_without_batches():
    program = jax.make_jaxpr(lambda w, x: x @ w)(WEIGHT, X)
    edited = collect_at_use(program, [P("fsdp", "data"), None], make_mesh(), ("fsdp",))
    ((_, constraint),) = find_equations(edited)
    assert constraint.params["sharding"].spec == P(None, ("data",))


def test_layers_of_a_loop_are_collected_one_at_a_time_in_both_passes():
    def loss(stack, x):
        def layer(x, weight):
            return jnp.tanh(x @ weight), None

        return jax.lax.scan(jax.checkpoint(layer), x, stack)[0].sum()

    edited = edit(jax.grad(loss), [P(None, None, "fsdp")], STACK, X)
    places = find_constraints(edited)
    # Forward, again in the backward pass, and for the gradient of the input.
    assert {place for place, _ in places} == {"scan", "scan/remat2"}
    assert {kind for _, kind in places} == {"float32[8,8]"}


def test_a_stack_that_devices_share_by_layers_is_collected_before_the_loop():
    def fn(stack, x):
        return jax.lax.scan(lambda x, weight: (x @ weight, None), x, stack)[0]

    edited = edit(fn, [P("fsdp")], draw(4, SIZE, SIZE), X)
    assert find_constraints(edited) == [("", "float32[4,8,8]")]


def test_a_weight_that_every_iteration_uses_is_collected_once_before_the_loop():
    def fn(weight, rows):
        def step(hidden, row):
            return jnp.tanh(hidden @ weight + row), None

        return jax.lax.scan(step, jnp.zeros(SIZE), rows)[0]

    edited = edit(fn, [P("fsdp")], WEIGHT, X)
    assert find_constraints(edited) == [("", "float32[8,8]")]


def test_a_loop_over_tokens_still_collects_one_layer_at_a_time():
    def fn(stack, x):
        def layer(x, weight):
            return x @ weight, None

        def token(_, x):
            return jnp.tanh(jax.lax.scan(layer, x, stack)[0])

        return jax.lax.fori_loop(0, 2, token, x)

    edited = edit(fn, [P(None, "fsdp")], STACK, X)
    assert find_constraints(edited) == [("scan/scan", "float32[8,8]")]


def test_a_condition_loop_keeps_a_carried_parameter_divided():
    def fn(weight, x):
        def body(carry):
            number, weight, total = carry
            return number + 1, weight * 0.5, total + (x @ weight).sum()

        _, weight, total = jax.lax.while_loop(
            lambda carry: carry[0] < 2, body, (0, weight, 0.0)
        )
        return weight * 2, total

    edited = edit(fn, [P("fsdp")], WEIGHT, X)
    assert find_constraints(edited) == [("while", "float32[8,8]")]


def test_a_parameter_that_a_loop_changes_is_collected_before_it():
    def fn(weight, x):
        def step(weight, row):
            return jnp.outer(row, row) + weight @ weight, None

        return jax.lax.scan(step, weight, x)[0]

    edited = edit(fn, [P("fsdp")], WEIGHT, X)
    assert find_constraints(edited) == [("", "float32[8,8]")]


def test_an_optimizer_collects_nothing():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = optimizer.init(WEIGHT)

    def fn(weight, gradient):
        updates, _ = optimizer.update(gradient, state, weight)
        return optax.apply_updates(weight, updates)

    assert find_constraints(edit(fn, [P("fsdp")], WEIGHT, WEIGHT)) == []


def test_branches_collect_their_own_parameters():
    def fn(weight, x):
        return jax.lax.cond(x.sum() > 0, lambda: x @ weight, lambda: x)

    edited = edit(fn, [P("fsdp")], WEIGHT, X)
    assert find_constraints(edited) == [("cond", "float32[8,8]")]


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("embedding", lambda w, x: w[jnp.arange(3)]),
        ("sort", lambda w, x: jnp.sort(w, axis=0)),
        ("broadcast", lambda w, x: jnp.broadcast_to(w, (4, 8, 8))),
        ("sum over the divided axis", lambda w, x: jnp.cumsum(w, axis=0)),
        ("cut along the divided axis", lambda w, x: w[:3]),
        ("joined along the divided axis", lambda w, x: jnp.concatenate([w, w])),
        ("custom gradient", lambda w, x: jax.nn.relu(w)),
        ("inverse", lambda w, x: jnp.linalg.inv(w)),
    ],
)
def test_an_operation_that_needs_all_of_a_parameter_gets_it(name, fn):
    edited = edit(fn, [P("fsdp")], WEIGHT, X)
    assert {kind for _, kind in find_constraints(edited)} == {"float32[8,8]"}


@pytest.mark.parametrize(
    ("fn", "entries"),
    [
        (lambda w: w.reshape(8, 2, 4), ("data", None, None)),
        (lambda w: w.reshape(64), ("data",)),
        (lambda w: w.reshape(1, 8, 8), (None, "data", None)),
        (lambda w: w[None], (None, "data", None)),
        (lambda w: w[None][0], ("data", None)),
        (lambda w: w[:, 2:5], ("data", None)),
        (lambda w: jnp.concatenate([w, w], axis=1), ("data", None)),
        (lambda w: w.T * 2, (None, "data")),
        (lambda w: jnp.where(w > 0, w, 0), ("data", None)),
    ],
)
def test_a_value_made_from_a_parameter_stays_divided_like_it(fn, entries):
    program = jax.make_jaxpr(lambda weight: jnp.cumsum(fn(weight), axis=-1))(WEIGHT)
    edited = collect_at_use(program, [P("data")], make_mesh(), ("fsdp",))
    ((_, constraint),) = find_equations(edited)
    found = tuple(constraint.params["sharding"].spec)
    assert (constraint.invars[0].aval.shape, found) == (fn(WEIGHT).shape, entries)


def test_a_reshape_that_divides_a_shared_axis_gets_the_whole_parameter():
    edited = edit(lambda w: w.reshape(2, 4, 8) * 2, [P("fsdp")], WEIGHT)
    assert find_constraints(edited) == [("", "float32[8,8]")]


def test_a_loop_that_returns_its_layers_holds_no_copy_of_them():
    def fn(stack, x):
        def layer(x, weight):
            return x @ weight, weight

        x, stack = jax.lax.scan(layer, x, stack)
        return stack * 2, x

    edited = edit(fn, [P(None, "fsdp")], STACK, X)
    double = edited.jaxpr.eqns[-1]
    assert edited.jaxpr.invars[0] in double.invars


def test_a_constraint_of_the_user_in_a_compiled_function_stays():
    own = jax.sharding.NamedSharding(make_mesh(), P(None, "data"))

    @jax.jit
    def divide(weight):
        return jax.lax.with_sharding_constraint(weight, own)

    edited = edit(lambda weight, x: x @ divide(weight), [P("fsdp")], WEIGHT, X)
    product = edited.jaxpr.eqns[-1]
    (call,) = [each for each in edited.jaxpr.eqns if each.primitive.name == "jit"]
    assert call.outvars[0] in product.invars


# Whole trainings


class Layer(nnx.Module):
    def __init__(self, size, rngs):
        self.up = nnx.Linear(size, 4 * size, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * size, size, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Layers(nnx.Module):
    def __init__(self, size, count):
        @nnx.split_rngs(splits=count)
        @nnx.vmap
        def make(rngs):
            return Layer(size, rngs)

        self.layers = make(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return layer(x)

        return run(x.astype(jnp.bfloat16), self.layers)


class Regression(armillary.StandardTrainer):
    """Trains layers to return their inputs."""

    def __init__(self, strategy, size, count, num_parts=1, compiler_options=None):
        x = np.random.default_rng(0).normal(size=(64, size)).astype(np.float32)
        options = armillary.StandardTrainerOptions(
            accumulate_steps=num_parts, compiler_options=compiler_options
        )
        data = armillary.data.from_arrays({"x": x}, batch_size=64, repeat=True)
        super().__init__(data, options)
        self.strategy = strategy
        self.model = Layers(size, count)
        optimizer = optax.sgd(1e-3)
        self.optimizer = nnx.Optimizer(self.model, optimizer, wrt=nnx.Param)

    def train_step(self, iterator):
        self.strategy.run(self.step_fn, args=(next(iterator),))

    def step_fn(self, batch):
        def loss(batch):
            return ((self.model(batch["x"]) - batch["x"]) ** 2).mean()

        _, gradients = armillary.value_and_grad(
            loss, self.model, batch=batch, op="mean"
        )
        self.optimizer.update(self.model, armillary.all_reduce("mean", gradients))


# Only the compiler for CPUs waits for both gradients of a layer, to sum them at once.
ONE_BY_ONE = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}


def measure_temporaries(count, num_parts=1, size=128, compiler_options=None):
    """Returns the bytes of temporaries, in parts of the bytes of the parameters."""
    strategy = armillary.ShardedStrategy({"fsdp": 8})
    trainer = Regression(strategy, size, count, num_parts, compiler_options)
    mesh = strategy.mesh
    with described(trainer, 8, "cpu") as loop:
        program = export_loop(loop, "cpu")
        compiled = compile_exported(program, mesh, "cpu", loop.compiler_options)
    leaves = jax.tree.leaves(nnx.state(trainer.model, nnx.Param))
    parameters = sum(leaf.nbytes for leaf in leaves)
    return compiled.memory_analysis().temp_size_in_bytes / parameters


@pytest.mark.slow
def test_temporaries_of_a_step_are_a_layer_and_a_share_of_the_gradients():
    # An eighth is the gradient of a device's own share. A layer of 8 is an eighth, too.
    assert measure_temporaries(8, compiler_options=ONE_BY_ONE) < 0.35
    assert measure_temporaries(32) < 0.25
    # The sum of the gradients of several parts is another eighth.
    assert measure_temporaries(32, num_parts=2) < 0.35


def test_no_device_copies_its_part_of_a_whole_stack():
    stack = jnp.zeros((64, 64, 64))
    x = jnp.zeros((8, 64))

    def fn(stack, x):
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, stack)[0]

    program = jax.make_jaxpr(fn)(stack, x)
    spec = P(None, AXES)
    edited = collect_at_use(program, [spec, None], make_mesh(), AXES)
    shardings = [
        jax.sharding.NamedSharding(make_mesh(), each) for each in (spec, P(AXES))
    ]
    step = jax.jit(core.jaxpr_as_fun(edited), in_shardings=shardings)
    memory = step.lower(stack, x).compile().memory_analysis()
    part = stack.nbytes // 8
    assert memory.temp_size_in_bytes < part / 2
