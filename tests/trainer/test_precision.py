"""Tests of `precision`: a step whose products compute in half precision."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.extend import core

import armillary
from armillary._jaxpr import walk_equations
from armillary.data import from_arrays
from armillary.xla._precision import compute_in
from tests.problems import make_strategy
from tests.tiers import slow_after_first

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(64, 8)).astype("float32"),
    "y": RNG.normal(size=(64, 4)).astype("float32"),
}
WORDS = ["bf16", "bfloat16", "params=f32,compute=bf16,output=f32", "p=f32,c=bf16,o=f32"]
A = jnp.asarray(RNG.normal(size=(8, 8)), "float32")
V = A[0]
BF16 = armillary.StandardTrainerOptions(precision="bf16")


def make_data(repeat=True):
    return from_arrays(DATA, batch_size=16, repeat=repeat)


class Net(nnx.Module):
    def __init__(self, dtype=None):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 32, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(32, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(32, 4, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


class Trainer(armillary.StandardTrainer):
    def __init__(self, options=None, dtype=None):
        super().__init__(make_data(), options)
        self.model = Net(dtype)
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.01), wrt=nnx.Param)
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self):
        self.loss.reset()

    def train_step(self, iterator):
        def run(batch):
            def loss_fn(model):
                return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

            loss, gradients = nnx.value_and_grad(loss_fn)(self.model)
            assert loss.dtype == "float32"
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)
            self.loss.update(loss=loss)

        armillary.get_strategy().run(run, args=(next(iterator),))

    def train_loop_end(self):
        return {"loss": self.loss.compute()}


class Evaluator(armillary.StandardEvaluator):
    def __init__(self, model, options=None):
        super().__init__(make_data(repeat=False), options)
        self.model = nnx.view(model, use_running_average=True)
        self.loss = nnx.metrics.Average("loss")

    def eval_begin(self):
        self.loss.reset()

    def eval_step(self, iterator):
        batch = next(iterator)
        outputs = self.model(batch["x"])
        assert outputs.dtype == "float32"
        self.loss.update(loss=(outputs - batch["y"]) ** 2)

    def eval_end(self, *state):
        del state
        return {"loss": self.loss.compute()}


def read(trainer):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(trainer.model)))


def check_near(found, wanted):
    """Checks values that differ by the rounding of bfloat16, and not by nothing."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    differences = [np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs]
    assert 0 < max(differences) < 0.05


@slow_after_first("word", WORDS)
def test_one_word_trains_near_float32_with_a_state_in_float32(word):
    trainer = Trainer(armillary.StandardTrainerOptions(precision=word))
    whole = Trainer()
    output = trainer.train(20)
    check_near(output["loss"], whole.train(20)["loss"])
    assert output["loss"].dtype == "float32"
    check_near(read(trainer), read(whole))
    state = nnx.state((trainer.model, trainer.optimizer))
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(state)}
    assert dtypes == {"float32", "int32", "uint32"}


def train_without_statistics(strategy):
    with strategy.scope():
        trainer = Trainer(BF16)
        # The statistics of a batch depend on the number of its examples.
        trainer.model.norm.use_running_average = True
        trainer.train(5)
    return read(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True])
def test_several_devices_equal_one(is_sharded):
    strategy = make_strategy(4)
    if is_sharded:
        strategy = armillary.ShardedStrategy({"data": 2, "fsdp": 4})
    several = train_without_statistics(strategy)
    one = train_without_statistics(make_strategy(1))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(several), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2)


def test_an_evaluation_has_a_precision_of_its_own():
    model = Net()
    whole = Evaluator(model).evaluate(-1)
    options = armillary.StandardEvaluatorOptions(precision="bf16")
    narrow = Evaluator(model, options).evaluate(-1)
    check_near(narrow["loss"], whole["loss"])


def make_linen():
    model = linen.Sequential([linen.Dense(32), linen.relu, linen.Dense(4)])
    params = model.init(jax.random.key(0), DATA["x"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.01))

    def step(state, batch):
        def loss_fn(params):
            outputs = state.apply_fn({"params": params}, batch["x"])
            return jnp.mean((outputs - batch["y"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=gradients), {"loss": loss}

    return step, state


def make_equinox():
    model = equinox.nn.MLP(8, 4, 32, 1, key=jax.random.key(0))
    optimizer = optax.adam(0.01)
    state = model, optimizer.init(equinox.filter(model, equinox.is_inexact_array))

    def step(state, batch):
        def loss_fn(model):
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        model, opt_state = state
        loss, gradients = equinox.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (equinox.apply_updates(model, updates), opt_state), {"loss": loss}

    return step, state


@pytest.mark.parametrize("make", [make_linen, make_equinox])
def test_a_pure_step_takes_the_word_for_any_library(make):
    outputs = []
    for options in (BF16, None):
        step, state = make()
        trainer = armillary.StepTrainer(step, state, make_data(), options=options)
        outputs.append(trainer.train(20)["loss"])
        leaves = filter(equinox.is_inexact_array, jax.tree.leaves(trainer.state))
        assert {leaf.dtype.name for leaf in leaves} == {"float32"}
    check_near(*outputs)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_float16_trains_with_a_dynamic_scale(num_replicas):
    """Half precision overflows in the first steps, which change no parameter."""

    def step(state, batch):
        params, scale = state

        def loss_fn(params):
            return jnp.mean(
                (jnp.tanh(batch["x"] @ params) @ A[:, :4] - batch["y"]) ** 2
            )

        gradient_fn = scale.value_and_grad(loss_fn, axis_name="replica")
        scale, is_finite, loss, gradient = gradient_fn(params)
        new = jnp.where(is_finite, params - 0.05 * gradient, params)
        return (new, scale), {"loss": loss, "is_finite": is_finite}

    params = jnp.full((8, 8), 0.1)
    options = armillary.StandardTrainerOptions(precision="f16")
    trainer = armillary.StepTrainer(
        step,
        (params, DynamicScale(scale=2.0**22)),
        make_data(),
        strategy=make_strategy(num_replicas),
        options=options,
    )
    assert trainer.train(1)["is_finite"] == 0
    np.testing.assert_array_equal(trainer.state[0], params)
    assert trainer.state[1].scale == 2.0**21
    outputs = [trainer.train(20) for _ in range(2)]
    assert outputs[1]["is_finite"] == 1
    assert outputs[1]["loss"] < outputs[0]["loss"]
    assert trainer.state[1].scale < 2.0**21
    assert trainer.state[0].dtype == "float32"


def lower(fn, *arguments):
    """Returns the number of products that change, and the result after the change."""
    program = jax.make_jaxpr(fn)(*arguments)
    edited = compute_in(program, "bfloat16", "cpu")
    results = jax.jit(core.jaxpr_as_fun(edited.program))(*arguments)
    return edited.num_products, results[0]


multiply_by_jvp = jax.custom_jvp(jnp.matmul)
multiply_by_jvp.defjvps(None, None)
multiply_by_vjp = jax.custom_vjp(jnp.matmul)
multiply_by_vjp.defvjp(lambda a, b: (a @ b, None), lambda _, g: (g, g))


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda: A @ A, 1),
        (lambda: A @ V, 1),
        (lambda: V @ V, 0),
        (lambda: jnp.einsum("i,j->ij", V, V), 0),
        (lambda: jnp.einsum("bi,bi->b", A, A), 0),
        (lambda: jnp.dot(A, A, precision="highest"), 0),
        (lambda: A.astype("bfloat16") @ A.astype("bfloat16"), 0),
        (lambda: A.astype("int32") @ A.astype("int32"), 0),
        (lambda: jnp.convolve(V, V[:3]), 1),
        (lambda: jax.lax.ragged_dot(A, A[None], jnp.array([8])), 1),
        (lambda: jax.lax.scan(lambda x, _: (x @ A, None), A, length=2)[0], 1),
        (lambda: jax.lax.cond(True, lambda: A @ A, lambda: A), 1),
        (lambda: jax.lax.fori_loop(0, 2, lambda i, x: x @ A, A), 1),
        (lambda: jax.jit(jnp.matmul)(A, A), 1),
        (lambda: jax.checkpoint(jnp.matmul)(A, A), 1),
        (lambda: multiply_by_jvp(A, A), 1),
        (lambda: multiply_by_vjp(A, A), 1),
        (lambda: jnp.linalg.solve(A, A), 0),
    ],
)
def test_only_products_of_matrices_change(fn, count):
    found, result = lower(fn)
    assert found == count
    wanted = fn()
    assert result.dtype == wanted.dtype
    np.testing.assert_allclose(result, wanted, atol=0.3)
    is_same = bool(jnp.allclose(result, wanted, rtol=1e-5, atol=1e-5))
    assert is_same == (count == 0)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.checkpoint, jax.jit])
def test_an_optimizer_keeps_float32(wrap):
    def update(x):
        def loss_fn(weights):
            return jnp.sum(wrap(lambda w: jnp.tanh(x @ w))(weights))

        gradient = jax.grad(loss_fn)(A)
        return gradient @ gradient.T @ A, gradient

    # The forward pass, again in a backward pass of `checkpoint`, and the gradient.
    count, _ = lower(update, A)
    assert count == (3 if wrap is jax.checkpoint else 2)


def test_other_platforms_multiply_the_dtype_itself():
    def fn(x):
        kernel = jnp.ones((3, 3, 4, 4))
        images = jnp.tile(x.reshape(2, 4, 2, 4), (1, 1, 2, 1))
        numbers = ("NHWC", "HWIO", "NHWC")
        return x @ x, jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=numbers
        )

    program = compute_in(jax.make_jaxpr(fn)(A), "bfloat16", "cuda").program
    products = [
        equation
        for equation in walk_equations(program)
        if equation.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    dtypes = [
        [variable.aval.dtype.name for variable in (*each.invars, *each.outvars)]
        for each in products
    ]
    half = ["bfloat16", "bfloat16"]
    assert dtypes == [[*half, "float32"], [*half, "bfloat16"]]
    assert [aval.dtype for aval in program.out_avals] == ["float32", "float32"]
    compiled = jax.jit(core.jaxpr_as_fun(program))
    exported = jax.export.export(compiled, platforms=["cuda", "tpu"])(A)
    assert "bf16>) -> tensor<8x8xf32>" in exported.mlir_module()
    narrow, _ = compiled(A)
    np.testing.assert_allclose(narrow, lower(lambda: A @ A)[1], rtol=1e-5, atol=1e-5)


def test_values_that_fit_into_bfloat16_give_the_same_sums():
    rows = jnp.asarray(RNG.integers(-100, 100, (64, 64)), "float32")
    _, result = lower(lambda: rows @ rows)
    np.testing.assert_array_equal(result, rows @ rows)


def test_gradients_of_convolutions_are_near_float32():
    kernel = jnp.asarray(RNG.normal(size=(3, 3, 4, 8)), "float32")
    images = jnp.asarray(RNG.normal(size=(2, 8, 8, 4)), "float32")

    def gradient(kernel):
        def loss_fn(kernel):
            numbers = ("NHWC", "HWIO", "NHWC")
            return jnp.sum(
                jax.lax.conv_general_dilated(
                    images, kernel, (1, 1), "SAME", dimension_numbers=numbers
                )
                ** 2
            )

        return jax.grad(loss_fn)(kernel)

    count, result = lower(gradient, kernel)
    wanted = gradient(kernel)
    assert count == 2
    assert result.dtype == "float32"
    np.testing.assert_allclose(result, wanted, atol=0.02 * np.abs(wanted).max())


class Wide(armillary.StandardTrainer):
    def __init__(self, strategy):
        super().__init__(make_data(), BF16)
        self.strategy = strategy
        self.kernel = jnp.ones((8, 2**16))

    def train_step(self, iterator):
        def run(batch):
            def loss_fn(kernel):
                return jnp.mean((batch["x"] @ kernel) ** 2)

            self.kernel = self.kernel - jax.grad(loss_fn)(self.kernel)

        self.strategy.run(run, args=(next(iterator),))


def test_a_divided_parameter_is_exchanged_in_half_the_bytes():
    trainer = Wide(armillary.ShardedStrategy({"fsdp": 8}))
    trainer.train(1)
    (program,) = trainer._train_setup.loop._programs.current.values()
    collected: list[str] = []
    for equation in walk_equations(program.step.program):
        is_constraint = equation.primitive.name == "sharding_constraint"
        if is_constraint and not any(equation.params["sharding"].spec):
            collected += [each.aval.dtype.name for each in equation.outvars]
    assert collected == ["bfloat16"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("bf16-mixed", r"`precision` is 'bf16-mixed', .* Write `precision=\"bf16\"`"),
        ("compute=bf8", r"`precision` is 'compute=bf8', but it must be"),
        ("params=bf16,compute=bf16", r"`params` must be f32.*`param_dtype`"),
        ("compute=bf16,output=bf16", r"`output` must be f32.*cast the outputs"),
    ],
)
def test_another_word_is_refused(word, message):
    with pytest.raises(ValueError, match=message):
        armillary.StandardTrainerOptions(precision=word)


def test_a_dtype_is_refused():
    with pytest.raises(
        TypeError, match=r"must be a string. Write `precision=\"bf16\"`"
    ):
        armillary.StandardEvaluatorOptions(precision=jnp.bfloat16)


def test_a_step_that_is_not_compiled_has_no_precision():
    with pytest.raises(ValueError, match="`compile_step` is False, but `precision`"):
        armillary.StandardTrainerOptions(precision="bf16", compile_step=False)


def test_layers_with_a_dtype_are_named():
    with pytest.raises(ValueError, match="2 layers that `train_step`") as caught:
        Trainer(BF16, dtype="float32").train(1)
    message = str(caught.value)
    assert "model/first: `dtype=float32`" in message
    assert "model/norm" not in message
    assert 'write `precision="highest"`' in message


def test_a_step_without_products_is_refused():
    with pytest.raises(ValueError, match="`train_step` has no product of float32"):
        Trainer(BF16, dtype="bfloat16").train(1)


def test_float32_changes_nothing():
    trainer = Trainer(armillary.StandardTrainerOptions(precision="f32"))
    whole = Trainer()
    assert trainer.train(5)["loss"] == whole.train(5)["loss"]


def test_the_policy_of_keras_is_named(keras):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    data = from_arrays((DATA["x"], DATA["y"]), batch_size=16)
    trainer = armillary.keras.KerasTrainer(model, data, options=BF16)
    with pytest.raises(ValueError, match="the policy 'float32'") as caught:
        trainer.train(1)
    line = 'keras.config.set_dtype_policy("mixed_bfloat16")'
    assert line in str(caught.value)
