"""Tests of who decides where an array lies: the array, the model, a rule, or nobody."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec

import armillary
from armillary import ShardedStrategy
from armillary.distribute.strategies._rules import _Leaders
from armillary.state._lift import State
from tests.distribute.identity import IdentityTrainer
from tests.tiers import slow_after_first

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
LOGICAL = {"embed": "fsdp", "mlp": "tensor", "batch": None}
SIZE = 64
X = np.random.default_rng(0).normal(size=(32, SIZE)).astype(np.float32)


def make_linear(names, **options):
    """Returns a layer whose kernel has names for its axes."""
    with nnx.use_eager_sharding(False):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names, **options)
        return nnx.Linear(SIZE, SIZE, kernel_init=init, rngs=nnx.Rngs(0))


def train(strategy, model):
    """Returns the loss after some steps, and the divisions of kernel and moment."""
    trainer = IdentityTrainer(strategy, model, X)
    loss = trainer.train(4)["loss"]
    moment = trainer.optimizer.opt_state[0].mu.kernel[...]
    kernel = trainer.model.kernel[...]
    assert kernel.sharding == moment.sharding
    return float(loss), kernel.sharding.spec


def decide(strategy, root):
    """Returns what has decided about each array of an object, by path."""
    state = State([(root, "")])
    rules = strategy.placement.rules
    decisions = rules.decide(state, strategy.mesh)
    return dict(zip(state.paths, decisions, strict=True))


@slow_after_first(
    ("names", "expected"),
    [
        (("embed", "mlp"), PartitionSpec("fsdp", "tensor")),
        ((None, "tensor"), PartitionSpec(None, "tensor")),
        (("batch", ("embed", "mlp")), PartitionSpec(None, ("fsdp", "tensor"))),
    ],
)
def test_the_annotation_of_a_model_divides_it_and_changes_no_number(names, expected):
    strategy = ShardedStrategy(MESH, logical_rules=LOGICAL)
    loss, spec = train(strategy, make_linear(names))
    assert spec == expected

    alone, _ = train_alone(names)
    assert loss == pytest.approx(alone, rel=1e-5)


def train_alone(names):
    strategy = armillary.OneDeviceStrategy("cpu:0")
    trainer = IdentityTrainer(strategy, make_linear(names), X)
    return float(trainer.train(4)["loss"]), None


def test_rules_that_come_with_a_variable_count_before_rules_of_the_strategy():
    model = make_linear(("embed", None), sharding_rules=(("embed", "tensor"),))
    strategy = ShardedStrategy(MESH, logical_rules=LOGICAL)
    assert decide(strategy, model)["kernel"].spec == PartitionSpec("tensor", None)


def test_two_names_of_one_axis_of_the_mesh_divide_only_the_first():
    strategy = ShardedStrategy(MESH, logical_rules={"embed": "fsdp", "heads": "fsdp"})
    decision = decide(strategy, make_linear(("embed", "heads")))["kernel"]
    assert decision.spec == PartitionSpec("fsdp", None)


def test_boxes_of_linen_divide_the_state_of_a_pure_step():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            init = linen.with_logical_partitioning(
                linen.initializers.lecun_normal(), ("embed", "mlp")
            )
            return linen.Dense(SIZE, kernel_init=init)(x)

    net = Net()
    optimizer = optax.adam(1e-2)
    params = net.init(jax.random.key(0), X)["params"]
    state = {"params": params, "opt": optimizer.init(params)}

    def step(state, batch):
        def loss_fn(params):
            return (
                (net.apply({"params": params}, batch["x"]) - batch["x"]) ** 2
            ).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(state["params"])
        gradients = armillary.all_reduce("mean", gradients)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    strategy = ShardedStrategy(MESH, logical_rules=LOGICAL)
    data = armillary.data.from_arrays({"x": X}, batch_size=16, repeat=True)
    with strategy.scope():
        trainer = armillary.StepTrainer(step, state, data)
        trainer.train(2)
    kernel = trainer.state["params"]["Dense_0"]["kernel"].value
    moment = trainer.state["opt"][0].mu["Dense_0"]["kernel"].value
    expected = PartitionSpec("fsdp", "tensor")
    assert (kernel.sharding.spec, moment.sharding.spec) == (expected, expected)


def test_the_layout_of_a_keras_variable_divides_it():
    keras = pytest.importorskip("keras")
    devices = [f"cpu:{i}" for i in range(4)]
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel"] = (None, "model")
    parallel = keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch"
    )
    with parallel.scope():
        layer = keras.layers.Dense(SIZE)
        layer.build((None, SIZE))
    strategy = ShardedStrategy(MESH, logical_rules={"model": "tensor"})
    decision = decide(strategy, layer)["kernel"]
    assert decision.spec == PartitionSpec(None, "tensor")


def test_an_array_that_is_divided_already_stays_where_it_is():
    strategy = ShardedStrategy(MESH, {"kernel": PartitionSpec("fsdp")})
    model = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
    own = NamedSharding(strategy.mesh, PartitionSpec("tensor", "data"))
    model.kernel[...] = jax.device_put(model.kernel[...], own)
    _, spec = train(strategy, model)
    assert spec == PartitionSpec("tensor", "data")


def test_an_array_that_is_whole_everywhere_is_divided_by_the_rules():
    strategy = ShardedStrategy(MESH, {"kernel": PartitionSpec("fsdp")})
    model = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
    whole = NamedSharding(strategy.mesh, PartitionSpec())
    model.kernel[...] = jax.device_put(model.kernel[...], whole)
    assert train(strategy, model)[1] == PartitionSpec("fsdp")


def test_each_array_has_a_reason():
    strategy = ShardedStrategy(MESH, {"plain": PartitionSpec()}, logical_rules=LOGICAL)

    class Model(nnx.Module):
        def __init__(self):
            self.named = make_linear(("embed", "mlp"))
            self.plain = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
            self.other = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
            self.optimizer = nnx.Optimizer(self.named, optax.adam(1.0), wrt=nnx.Param)

    decisions = decide(strategy, Model())
    reasons = {path: decision.reason for path, decision in decisions.items()}
    assert reasons["named/kernel"] == "annotation ('embed', 'mlp')"
    assert reasons["plain/kernel"] == "rule 'plain'"
    assert reasons["other/kernel"] == "automatic"
    assert reasons["optimizer/opt_state/0/mu/kernel"] == "like named/kernel"
    assert "whole" in reasons["optimizer/opt_state/0/count"]


@pytest.mark.parametrize(
    ("names", "logical_rules", "parts"),
    [
        (("embed", None), None, ["kernel", "'embed'", "logical_rules", "tensor"]),
        (("embed", None), {"embed": ("data", "fsdp", "tensor")}, ["kernel", "62"]),
    ],
)
def test_an_annotation_that_the_mesh_cannot_follow_is_an_error(
    names, logical_rules, parts
):
    init = nnx.with_partitioning(nnx.initializers.zeros, names)
    with nnx.use_eager_sharding(False):
        model = nnx.Linear(62, 62, kernel_init=init, rngs=nnx.Rngs(0))
    strategy = ShardedStrategy(MESH, logical_rules=logical_rules)
    with pytest.raises(ValueError) as caught:
        decide(strategy, model)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("logical_rules", "kind", "part"),
    [
        ({"embed": "model"}, ValueError, "'model'"),
        ({3: "fsdp"}, TypeError, "logical_rules"),
        ("embed", TypeError, "logical_rules"),
    ],
)
def test_wrong_logical_rules_are_named(logical_rules, kind, part):
    with pytest.raises(kind, match=part):
        ShardedStrategy(MESH, logical_rules=logical_rules)


def test_the_leader_is_the_first_parameter_that_shares_the_most_names():
    random_ = random.Random(0)
    names = "abc"
    shapes = [(2,), (3,)]

    def draw_path():
        return "/".join(random_.choices(names, k=random_.randint(1, 4)))

    def count_shared(path, other):
        pairs = zip(path.split("/")[::-1], other.split("/")[::-1], strict=False)
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    for _ in range(300):
        paths = [draw_path() for _ in range(8)]
        leaves = [jnp.zeros(random_.choice(shapes)) for _ in paths]
        leaders = _Leaders(paths, leaves, range(6))
        for index in (6, 7):
            alike = [i for i in range(6) if leaves[i].shape == leaves[index].shape]
            shared = {i: count_shared(paths[index], paths[i]) for i in alike}
            most = max(shared.values(), default=0)
            first = next((i for i in alike if shared[i] == most), None)
            expected = first if most else None
            assert leaders.find(paths[index], leaves[index]) == expected
