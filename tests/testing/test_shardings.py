"""Tests of the table of places, and of the file that guards it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import armillary
from armillary.testing import assert_shardings

SIZE = 64


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, names=(None, None)):
        super().__init__([np.ones((8, SIZE), np.float32)])
        self.strategy = strategy
        with nnx.use_eager_sharding(False):
            init = nnx.with_partitioning(nnx.initializers.ones, names)
            self.model = nnx.Linear(SIZE, SIZE, kernel_init=init, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1, 0.9), wrt=nnx.Param)
        self.loss = nnx.metrics.Average("loss")

    def train_step(self, iterator):
        def step_fn(batch):
            gradients = nnx.grad(lambda model: model(batch).mean())(self.model)
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)

        self.strategy.run(step_fn, args=(next(iterator),))


def places_of(found):
    return {row.path: row.place for row in found.rows}


def test_the_table_of_a_trainer_has_the_place_of_each_array():
    rules = {"bias": PartitionSpec("tensor")}
    strategy = armillary.ShardedStrategy({"fsdp": 4, "tensor": 2}, rules)
    trainer = Trainer(strategy, (None, "fsdp"))

    summary = armillary.summarize(trainer)

    places = places_of(summary)
    kernel = places["model/kernel"]
    assert kernel.spec == (None, "fsdp")
    assert kernel.bytes_on_device == 4 * SIZE * SIZE // 4
    assert kernel.decided_by == "annotation (None, 'fsdp')"
    assert places["model/bias"].decided_by == "rule 'bias'"
    moment = places["optimizer/opt_state/0/trace/kernel"]
    assert moment.decided_by == "like model/kernel"
    assert moment.spec == kernel.spec
    assert places["loss/total"].spec == ()
    text = str(summary)
    for part in ("divided over", "on each device", "decided by", "-, fsdp", "whole"):
        assert part in text


def test_the_places_are_places_of_the_arrays_after_a_step():
    strategy = armillary.ShardedStrategy({"fsdp": 4, "tensor": 2})
    trainer = Trainer(strategy)
    places = places_of(armillary.summarize(trainer))

    trainer.train(1)
    for path, array in (
        ("model/kernel", trainer.model.kernel[...]),
        ("model/bias", trainer.model.bias[...]),
        (
            "optimizer/opt_state/0/trace/kernel",
            trainer.optimizer.opt_state[0].trace.kernel[...],
        ),
    ):
        assert array.sharding.spec == PartitionSpec(*places[path].spec)
        part = array.addressable_shards[0].data
        assert part.nbytes == places[path].bytes_on_device


def test_a_model_or_a_pytree_has_places_with_a_strategy():
    arrays = {"w": jnp.ones((8, 128)), "b": jnp.ones(8), "odd": jnp.ones((1025,))}
    assert all(row.place is None for row in armillary.summarize(arrays).rows)

    sharded = places_of(armillary.summarize(arrays, armillary.ShardedStrategy()))
    assert sharded["w"].spec == (None, "fsdp")
    assert "1024 values" in sharded["b"].decided_by
    assert "8 divides no axis" in sharded["odd"].decided_by

    mirrored = armillary.MirroredStrategy(jax.devices()[:2])
    whole = places_of(armillary.summarize(arrays, mirrored))
    assert whole["w"].bytes_on_device == 4 * 8 * 128
    assert whole["w"].decided_by == "a copy on each device"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: armillary.OneDeviceStrategy("cpu:1"), "on the only device"),
        (
            lambda: armillary.distribute.CentralStorageStrategy(
                jax.devices()[:2], parameter_device="cpu:3"
            ),
            "on cpu:3 between programs",
        ),
        (armillary.ParameterServerStrategy, "on parameter servers while workers train"),
    ],
    ids=["one device", "central", "server"],
)
def test_the_place_of_undivided_arrays_is_named(make, reason):
    (place,) = places_of(armillary.summarize({"w": jnp.ones(3)}, make())).values()
    assert place.decided_by == reason
    assert place.spec == ()


def test_shapes_and_arrays_of_numpy_have_places():
    def make():
        params = {"kernel": jnp.ones((8, 128)), "bias": jnp.ones(8)}
        return {"params": params, "moments": optax.adam(1.0).init(params)}

    strategy = armillary.ShardedStrategy(
        {"fsdp": 4, "tensor": 2}, {"kernel": PartitionSpec("tensor", "fsdp")}
    )
    expected = places_of(armillary.summarize(make(), strategy))
    assert expected["moments/0/mu/kernel"].spec == ("tensor", "fsdp")
    assert expected["moments/0/mu/kernel"].decided_by == "like params/kernel"

    shapes = jax.eval_shape(make)
    assert places_of(armillary.summarize(shapes, strategy)) == expected
    numbers = jax.tree.map(np.asarray, make())
    assert places_of(armillary.summarize(numbers, strategy)) == expected


def test_no_strategy_is_an_error():
    with pytest.raises(TypeError, match="`strategy` is 'fsdp'"):
        armillary.summarize(jnp.ones(3), "fsdp")
    with pytest.raises(TypeError, match=r"`trainer` .* holds no strategy"):
        assert_shardings(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "places.json")


def test_a_file_guards_the_places(tmp_path):
    path = tmp_path / "shardings.json"
    strategy = armillary.ShardedStrategy({"fsdp": 4, "tensor": 2})
    trainer = Trainer(strategy, ("tensor", None))
    with pytest.raises(AssertionError, match="did not exist"):
        assert_shardings(trainer, path)
    assert json.loads(path.read_text())["model/kernel"] == ["tensor", None]
    assert_shardings(trainer, str(path))

    changed = Trainer(strategy, (None, ("fsdp", "tensor")))
    changed.extra = nnx.Param(jnp.ones(3))
    with pytest.raises(AssertionError) as caught:
        assert_shardings(changed, path)
    text = str(caught.value)
    # The kernel, its moment, and the new array.
    assert text.startswith("3 of ")
    assert "model/kernel: ['tensor', None] became [None, ['fsdp', 'tensor']]" in text
    assert "extra: not there became []" in text
