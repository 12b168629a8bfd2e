"""Tests of `ShardedStrategy`: equal numbers, with a fraction of the memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import armillary
from armillary import ShardedStrategy
from armillary.data import InputOptions, from_arrays
from armillary.distribute.program import _function_program
from armillary.errors import StateStructureError
from tests.distribute.sharded_trainers import (
    CUBE,
    FIRST_RULES,
    MAKERS,
    RULES,
    Linear,
    Wide,
    make_trainer,
    specs_of,
)
from tests.mistakes import mistakes
from tests.problems import (
    Classifier,
    Metrics,
    make_digits,
    read_leaves,
    read_state,
)


class Evaluator(Metrics):
    """The metrics of a model's outputs."""

    def __init__(self, strategy, model, dataset):
        super().__init__(strategy, dataset)
        self.model = nnx.view(model, deterministic=True, use_running_average=True)

    def add(self, batch):
        logits, label = self.model(batch["image"]), batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        super().add(
            {"value": losses.astype(jnp.float32), "logits": logits, "label": label}
        )


def bytes_on_devices(root):
    leaves = read_leaves(root).values()
    data = [jax.random.key_data(x) if "key" in str(x.dtype) else x for x in leaves]
    total = sum(leaf.nbytes for leaf in data)
    held = dict.fromkeys(jax.devices(), 0)
    for shard in (shard for leaf in data for shard in leaf.addressable_shards):
        held[shard.device] += shard.data.nbytes
    return total, held


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_numbers_with_uneven_batches_equal_one_device():
    def run(name):
        strategy = MAKERS[name]()
        digits = make_digits(70)
        digits["image"] = digits["image"].astype(np.float64)
        model = Wide(jnp.float64, has_conv=True)
        # Five batches, of 16, 16, 16, 16 and 6 examples.
        data = strategy.distribute_dataset(from_arrays(digits, batch_size=16))
        transform = optax.sgd(0.1, momentum=0.9)
        trainer = Classifier(strategy, model, transform, data)
        outputs = [jax.device_get(trainer.train(n)) for n in (2, 3)]
        evaluated = strategy.distribute_dataset(from_arrays(digits, batch_size=16))
        evaluator = Evaluator(strategy, model, evaluated)
        outputs.append(jax.device_get(evaluator.evaluate(-1)))
        assert evaluator.counts == (70, 70)
        return read_state(trainer), outputs

    expected, numbers = run("one device")
    before = read_state(Wide(jnp.float64, has_conv=True))
    moved = np.abs(expected["model/first/kernel"] - before["first/kernel"]).max()
    assert moved > 1e-2
    for name in ("fsdp", "cube"):
        state, outputs = run(name)
        assert state.keys() == expected.keys()
        for path, value in expected.items():
            is_narrow = value.dtype == np.float32  # metrics, and the list of losses
            bound = 1e-5 if is_narrow else 1e-11
            np.testing.assert_allclose(state[path], value, bound, bound, err_msg=path)
        for output, number in zip(outputs, numbers, strict=True):
            assert output.keys() == number.keys()
            for key, value in number.items():
                np.testing.assert_allclose(output[key], value, 1e-6)


def test_each_device_holds_its_share():
    whole = Linear(armillary.OneDeviceStrategy("cpu:0"))
    total, _ = bytes_on_devices([whole.model, whole.optimizer])
    for shape, count in ({"fsdp": 8}, 8), ({"data": 2, "fsdp": 4}, 4):
        trainer = Linear(ShardedStrategy(shape))
        trainer.train(2)
        sizes, held = bytes_on_devices([trainer.model, trainer.optimizer])
        assert sizes == total
        kernel = trainer.model["first"].kernel[...]
        split = 3 * kernel.nbytes  # With both moments: most of all there is.
        assert set(held.values()) == {total - split + split // count}
        assert split > 0.9 * total
        moments = trainer.optimizer.opt_state[0]
        for leaf in (
            kernel,
            moments.mu["first"].kernel[...],
            moments.nu["first"].kernel[...],
        ):
            parts = [shard.data for shard in leaf.addressable_shards]
            assert {part.shape for part in parts} == {(64 // count, 64)}


@pytest.mark.slow
def test_programs_take_and_give_parts_in_place(monkeypatch):
    compiled = []

    def spy(*args, **kwargs):
        program: Any = compile_step(*args, **kwargs)

        def call(*inputs):
            compiled.append(program.lower(*inputs).compile())
            return program(*inputs)

        return call

    compile_step = _function_program.compile_step
    monkeypatch.setattr(_function_program, "compile_step", spy)

    def measure(strategy):
        model = nnx.Linear(256, 256, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        def step_fn(x):
            def loss(model):
                return jnp.mean(model(x) ** 2)

            optimizer.update(model, armillary.all_reduce("sum", nnx.grad(loss)(model)))

        batch = strategy.layout.place(np.ones((8, 256), np.float32))
        strategy.run(step_fn, args=(batch,))
        before = model.kernel[...], optimizer.opt_state[0].mu.kernel[...]
        strategy.run(step_fn, args=(batch,))
        assert all(array.is_deleted() for array in before)
        return compiled[-1].memory_analysis()

    whole = 3 * 256 * 256 * 4
    small = 8 * 256 * 4 + 1000  # the batch, and counters
    for strategy, count in (armillary.MirroredStrategy(), 1), (ShardedStrategy(), 8):
        memory = measure(strategy)
        assert whole / count <= memory.argument_size_in_bytes < whole / count + small
        assert memory.alias_size_in_bytes == whole // count


@pytest.mark.slow
def test_rules_say_how_parameters_and_their_optimizer_state_are_split():
    trainer = make_trainer(
        ShardedStrategy(CUBE, {"^model/first/k": RULES["first/kernel"]})
    )
    trainer.train(2)
    specs = specs_of(trainer)
    split = {path for path, spec in specs.items() if spec == RULES["first/kernel"]}
    moments = {f"optimizer/opt_state/0/{m}/first/kernel" for m in ("mu", "nu")}
    assert split == {"model/first/kernel", *moments}
    assert all(not spec for path, spec in specs.items() if path not in split)

    class Plain(armillary.StandardTrainer):
        def __init__(self, strategy):
            super().__init__([np.ones((8, 64), np.float32)] * 2)
            self.strategy = strategy
            self.params = {"a": jnp.ones((64, 32)), "b": jnp.ones((64, 32))}
            self.transform = optax.adafactor(0.1, min_dim_size_to_factor=8)
            self.state = optax.chain(self.transform, optax.trace(0.9)).init(self.params)

        def train_step(self, iterator):
            def step_fn(x):
                def loss(params):
                    return jnp.mean((x @ params["a"] + x @ params["b"]) ** 2)

                grads = armillary.all_reduce("sum", jax.grad(loss)(self.params))
                transform = optax.chain(self.transform, optax.trace(0.9))
                updates, self.state = transform.update(grads, self.state, self.params)
                self.params = optax.apply_updates(self.params, updates)

            self.strategy.run(step_fn, args=(next(iterator),))

    rules = {"/a": PartitionSpec(None, "tensor"), "/": PartitionSpec("fsdp")}
    trainer = Plain(ShardedStrategy(CUBE, rules))
    trainer.train(2)
    trace = {
        path.rpartition("/")[2]: spec
        for path, spec in specs_of(trainer).items()
        if "trace" in path
    }
    assert trace == {"a": rules["/a"], "b": rules["/"]}
    factored = [spec for path, spec in specs_of(trainer).items() if "v_row" in path]
    assert factored == [PartitionSpec()] * 2


@pytest.mark.slow
def test_arrays_that_no_rule_names_are_split_along_their_longest_axis():
    sizes = {
        "long": ((8, 256), PartitionSpec(None, "fsdp")),
        "odd": ((1024, 1031), PartitionSpec("fsdp")),
        "vector": ((1024,), PartitionSpec("fsdp")),
        "small": ((8, 120), PartitionSpec()),
        "prime": ((1031, 3), PartitionSpec()),
    }
    state = {name: nnx.Variable(jnp.ones(shape)) for name, (shape, _) in sizes.items()}
    keys = nnx.Variable(jax.random.split(jax.random.key(0), 1024))

    def step_fn():
        for variable in state.values():
            variable[...] = variable[...] + 1
        keys[...] = keys[...][::-1]

    ShardedStrategy().run(step_fn)
    assert specs_of(state) == {name: spec for name, (_, spec) in sizes.items()}
    assert keys[...].sharding.is_fully_replicated
    assert all(np.all(variable[...] == 2) for variable in state.values())


@pytest.mark.slow
def test_data_may_stay_on_the_devices():
    states = []
    for is_placed in (False, True):
        strategy = ShardedStrategy({"data": 2, "fsdp": 4})
        source = from_arrays(make_digits(70), batch_size=16, shuffle_seed=0)
        options = InputOptions(place_on_device=is_placed)
        dataset = strategy.distribute_dataset(source, options)
        trainer = Linear(strategy, dataset)
        trainer.train(5)
        states.append(read_state(trainer))
        sizes = [len(batch["label"]) for batch in strategy.distribute_dataset(source)]
        assert sizes == [16, 16, 16, 16, 6]
    for path, value in states[0].items():
        np.testing.assert_allclose(states[1][path], value, 1e-5, 1e-5, err_msg=path)


@pytest.mark.parametrize(
    ("num_examples", "spec"),
    [
        (12, PartitionSpec(("data", "fsdp"))),
        (8, PartitionSpec("fsdp")),
        (9, PartitionSpec("data")),
        (5, PartitionSpec(())),
    ],
)
def test_a_batch_is_split_over_as_many_devices_as_can_share_it(num_examples, spec):
    strategy = ShardedStrategy({"data": 3, "fsdp": 2}, devices=jax.devices()[:6])
    if num_examples == 8:
        spec = PartitionSpec("fsdp")
    rows = np.arange(num_examples * 2.0, dtype=np.float32).reshape(-1, 2)
    batch = strategy.layout.place({"x": rows, "n": np.float32(3)})
    expected = jax.sharding.NamedSharding(strategy.mesh, spec)
    assert batch["x"].sharding.is_equivalent_to(expected, 2)
    np.testing.assert_array_equal(batch["x"], rows)
    chunk = strategy.layout.place(rows[None], leading_axes=1)
    chunked = jax.sharding.NamedSharding(strategy.mesh, PartitionSpec(None, *spec))
    assert chunk.sharding.is_equivalent_to(chunked, 3)


@pytest.mark.slow
def test_a_bad_step_is_undone():
    images = make_digits(32)
    images["image"][16:] = np.nan
    strategy = ShardedStrategy(CUBE, FIRST_RULES)
    dataset = strategy.distribute_dataset(from_arrays(images, batch_size=16))
    trainer = Linear(strategy, dataset, on_non_finite="raise")
    trainer.train(1)
    before = read_state(trainer.model)
    with pytest.raises(armillary.errors.NonFiniteError, match="model/first/kernel"):
        trainer.train(1)
    after = read_state(trainer.model)
    assert np.isfinite(after["first/kernel"]).all()
    np.testing.assert_array_equal(after["first/kernel"], before["first/kernel"])


def test_a_step_that_changes_the_structure_gets_the_usual_error():
    strategy, held = ShardedStrategy(), nnx.Variable({"a": jnp.ones(2048)})

    def step_fn():
        held.set_value({"a": jnp.ones(2048), "b": jnp.ones(1)})

    with pytest.raises(StateStructureError, match="held: tree structure"):
        strategy.run(step_fn)


def train_with(rules, shape=None):
    return make_trainer(ShardedStrategy(shape or CUBE, rules)).train(1)


NO_RULE = (
    r"`rules` has '\^first', found in none of these paths:\n  losses\n  model/first/"
)
BAD_RANK = r"`rules` has 'bias': .*, which does not fit model/first/bias, float32 \(64,"
BAD_SIZE = r"does not fit model/last/kernel, float32 \(64, 3\): 4 devices cannot share"
SPEC = PartitionSpec


@mistakes(
    {
        TypeError: {
            r"is \('fsdp', None\) of type tuple, but it must be a `PartitionSpec`": (
                lambda: ShardedStrategy(rules={"x": ("fsdp", None)})
            ),
        },
        ValueError: {
            r'`mesh\["fsdp"\]` is 0, but it must be a positive integer': (
                lambda: ShardedStrategy({"fsdp": 0})
            ),
            "for 4 devices, but there are 8. Choose sizes whose product is 8": (
                lambda: ShardedStrategy({"data": 2, "fsdp": 2})
            ),
            r"or use fewer devices: `devices=jax\.devices\(\)\[:4\]`": (
                lambda: ShardedStrategy({"fsdp": 4})
            ),
            "for 8 devices, but there are 2": (
                lambda: ShardedStrategy({"fsdp": 8}, devices=["cpu:0", "cpu:1"])
            ),
            "`devices` is .*, which repeats a device": (
                lambda: ShardedStrategy({"fsdp": 2}, devices=["cpu:0", "cpu:0"])
            ),
            "tensor_not": lambda: ShardedStrategy(rules={"x": SPEC("tensor_not")}),
            NO_RULE: lambda: train_with({"first": SPEC(), "^first": SPEC()}),
            BAD_RANK: lambda: train_with({"bias": SPEC(None, "tensor")}),
            BAD_SIZE: lambda: train_with(
                {"last/kernel": SPEC(None, "tensor")}, {"data": 2, "tensor": 4}
            ),
        },
    }
)
def test_mistakes_are_reported_before_anything_runs(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_mesh_without_fsdp_divides_nothing_and_the_table_says_why():
    mesh = jax.make_mesh((2, 4), ("rows", "columns"))
    trainer = make_trainer(ShardedStrategy(mesh))
    reasons = {row.place.decided_by for row in armillary.summarize(trainer).parameters}
    assert reasons == {"automatic: the mesh has no axis 'fsdp'"}


def test_metrics_are_whole_so_that_each_process_can_read_them():
    auc = armillary.metrics.AUC()
    labels = np.arange(8) % 2
    batch = {"logits": labels.astype(np.float32), "labels": labels}
    ShardedStrategy().run(lambda batch: auc.update(**batch), args=(batch,))
    specs = specs_of(auc)
    assert specs and not any(specs.values())
    assert auc.compute() == 1


def test_its_repr_has_the_whole_mesh():
    strategy = ShardedStrategy({"fsdp": 4, "data": 2})
    shown = "ShardedStrategy(data=2, fsdp=4, tensor=1, cpu, 1 replica)"
    assert repr(strategy) == shown
    assert strategy.num_replicas_in_sync == 1
    assert strategy.mesh.axis_names == ("data", "fsdp", "tensor")
    assert ShardedStrategy(devices=["cpu:3", "cpu:4"]).mesh.shape["fsdp"] == 2
