"""Tests of `remat`: the values of a forward pass that a backward pass keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary._jaxpr import walk_equations
from armillary.data import from_arrays
from armillary.xla._remat import find_policy, rematerialized
from tests.problems import make_strategy, read_state
from tests.tiers import slow_after_first

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(64, 8)).astype("float32"),
    "y": RNG.normal(size=(64, 8)).astype("float32"),
}
NAMES = ["dots_saveable", "full", "everything_saveable"]
DEPTH = 5


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.last = nnx.Linear(16, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        y = nnx.gelu(self.first(self.norm(x)))
        return x + self.dropout(jnp.tanh(self.last(y)))


class Model(nnx.Module):
    """Layers one after the other, or in a loop, and a statistic of the batch."""

    def __init__(self, is_scanned):
        rngs = nnx.Rngs(0)
        self.is_scanned = is_scanned
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        if is_scanned:
            make_blocks = nnx.split_rngs(splits=DEPTH)(nnx.vmap(Block))
            self.blocks = make_blocks(rngs)
        else:
            self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        x = self.norm(x)
        if self.is_scanned:
            return nnx.scan(
                lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )(x, self.blocks)
        for block in iter(self.blocks):
            x = block(x)
        return x


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, is_scanned=False, **options):
        options = armillary.StandardTrainerOptions(**options)
        super().__init__(from_arrays(DATA, batch_size=32, repeat=True), options)
        self.strategy = strategy
        self.model = Model(is_scanned)
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.01), wrt=nnx.Param)
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self):
        self.loss.reset()

    def train_step(self, iterator):
        def run(batch):
            def loss_fn(batch):
                losses = jnp.mean((self.model(batch["x"]) - batch["y"]) ** 2, axis=1)
                self.loss.update(loss=losses)
                return losses.mean()

            _, gradients = armillary.value_and_grad(
                loss_fn, self.model, batch=batch, op="mean"
            )
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)

        self.strategy.run(run, args=(next(iterator),))

    def train_loop_end(self):
        return {"loss": self.loss.compute()}


def count_checkpoints(program):
    names = [each.primitive.name for each in walk_equations(program)]
    return sum(name in ("checkpoint", "remat2") for name in names)


def check_equal(found, wanted):
    for path, array in wanted.items():
        np.testing.assert_allclose(
            found[path], array, rtol=1e-5, atol=1e-6, err_msg=path
        )


CASES = [("one", False), ("mirrored", False), ("sharded", True), ("one", True)]


@slow_after_first("name", NAMES)
@slow_after_first(("strategy", "is_scanned"), CASES)
def test_no_number_changes(name, strategy, is_scanned):
    strategies = {
        "one": make_strategy(1),
        "mirrored": make_strategy(4),
        "sharded": armillary.ShardedStrategy({"data": 2, "fsdp": 4}),
    }
    states: list[dict[str, np.ndarray]] = []
    for remat in (name, None):
        trainer = Trainer(strategies[strategy], is_scanned, remat=remat)
        trainer.train(3)
        states.append(read_state(trainer))
    check_equal(*states)


@pytest.mark.slow
def test_no_number_changes_with_accumulation():
    states: list[dict[str, np.ndarray]] = []
    for remat in ("full", None):
        trainer = Trainer(make_strategy(2), remat=remat, accumulate_steps=4)
        trainer.train(3)
        states.append(read_state(trainer))
    check_equal(*states)


@pytest.mark.parametrize("remat", ["full", None])
def test_the_option_of_a_trainer_reaches_its_gradients(remat):
    trainer = Trainer(make_strategy(1), remat=remat)
    trainer.train(1)
    (program,) = trainer._train_setup.loop._programs.current.values()
    count = count_checkpoints(program.step.program)
    assert (count > 0) == (remat is not None)


@pytest.mark.usefixtures("optimized")
def test_a_loop_over_layers_needs_less_memory():
    weights = jnp.ones((16, 64, 64))

    def loss_fn(weights):
        def apply(y, weight):
            return y + jnp.tanh(nnx.gelu(y @ weight)), None

        y, _ = jax.lax.scan(apply, jnp.ones((256, 64)), weights)
        return jnp.mean(y**2)

    sizes: list[int] = []
    for name in ("everything_saveable", "dots_saveable", "full"):
        fn = jax.jit(jax.grad(rematerialized(loss_fn, find_policy(name))))
        analysis = fn.lower(weights).compile().memory_analysis()
        sizes.append(analysis.temp_size_in_bytes)
    everything, dots, full = sizes
    assert dots < 0.5 * everything
    assert full < 0.7 * dots


def make_layers():
    """Returns a function of layers that are written one after the other."""
    weights = [jnp.asarray(RNG.normal(size=(64, 64)), "float32") for _ in range(16)]
    x = jnp.asarray(RNG.normal(size=(256, 64)), "float32")

    def loss_fn(weights):
        y = x
        for weight in weights:
            y = y + jnp.tanh(nnx.gelu(y @ weight))
        return jnp.mean(y**2)

    return loss_fn, weights


def count_kept(fn, arguments):
    """Returns the bytes that a backward pass keeps, without the arguments."""
    _, backward = jax.vjp(fn, arguments)
    kept = {id(leaf): leaf for leaf in jax.tree.leaves(backward)}
    for leaf in arguments:
        kept.pop(id(leaf), None)
    return sum(leaf.nbytes for leaf in kept.values())


def test_layers_one_after_the_other_keep_fewer_values():
    # XLA's CPU compiler merges the values that are computed again with the first ones,
    # so the memory of a compiled program would show nothing.
    loss_fn, weights = make_layers()
    without = count_kept(loss_fn, weights)
    dots = count_kept(rematerialized(loss_fn, find_policy("dots_saveable")), weights)
    full = count_kept(rematerialized(loss_fn, find_policy("full")), weights)
    one_value = 256 * 64 * 4
    assert without > 100 * one_value
    assert dots <= 20 * one_value
    assert full <= 8 * one_value


def test_a_policy_of_jax_is_taken():
    from jax.ad_checkpoint import checkpoint_name

    def loss_fn(weights):
        y = jnp.ones((256, 64))
        for weight in weights:
            y = checkpoint_name(jnp.tanh(jnp.tanh(y @ weight)), "layer")
        return jnp.mean(y**2)

    _, weights = make_layers()
    policy = find_policy(jax.checkpoint_policies.save_only_these_names("layer"))
    fn = rematerialized(loss_fn, policy)
    assert count_kept(fn, weights) <= 20 * 256 * 64 * 4 < count_kept(loss_fn, weights)
    pairs = zip(jax.grad(fn)(weights), jax.grad(loss_fn)(weights), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_checkpoint_of_the_users_own_stays_as_it_is():
    @jax.checkpoint
    def own(x):
        return jnp.tanh(jnp.tanh(x))

    def loss_fn(x):
        y, _ = jax.lax.scan(lambda y, _: (own(y), None), x, length=3)
        return jnp.sum(own(y))

    fn = rematerialized(loss_fn, find_policy("full"))
    programs = [jax.make_jaxpr(each)(jnp.ones(3)) for each in (loss_fn, fn)]
    counts = list(map(count_checkpoints, programs))
    # One more, for the sum.
    assert counts == [2, 3]


def test_an_effect_happens_once(capfd):
    def loss_fn(x):
        y = jnp.sin(x)
        jax.debug.print("seen {}", y[0])
        return jnp.sum(jnp.sin(y))

    fn = rematerialized(loss_fn, find_policy("full"))
    jax.block_until_ready(jax.jit(jax.grad(fn))(jnp.zeros(3)))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 1


def test_a_gradient_of_its_own_takes_the_word():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def loss_fn():
        return jnp.mean(jnp.tanh(model(DATA["x"])) ** 2)

    results = [
        armillary.value_and_grad(loss_fn, model, remat=remat)
        for remat in ("full", None)
    ]
    leaves = map(jax.tree.leaves, results)
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_another_name_is_refused():
    with pytest.raises(ValueError, match=r"`remat` is 'minimal', but .*\"full\""):
        armillary.StandardTrainerOptions(remat="minimal")
    with pytest.raises(TypeError, match=r"Write `remat=\"dots_saveable\"`"):
        armillary.StandardTrainerOptions(remat=True)


def test_a_step_whose_gradients_do_not_follow_is_refused():
    class Own(Trainer):
        def train_step(self, iterator):
            def run(batch):
                gradients = nnx.grad(lambda m: m(batch["x"]).sum())(self.model)
                self.optimizer.update(self.model, gradients)

            self.strategy.run(run, args=(next(iterator),))

    with pytest.raises(ValueError, match=r"`train_step` makes no gradient with"):
        Own(make_strategy(1), remat="full").train(1)


def test_a_pure_step_is_told_the_line():
    options = armillary.StandardTrainerOptions(remat="full")
    with pytest.raises(ValueError, match=r"write `jax.checkpoint\(loss_fn, policy="):
        armillary.StepTrainer(lambda state: (state, {}), jnp.zeros(3), options=options)
