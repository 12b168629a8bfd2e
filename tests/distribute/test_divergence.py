"""Tests that a flipped bit in one copy of mirrored state is found and located."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.distribute.program._replica_copies import ReplicaComparison, check_copies
from armillary.errors import ReplicaDivergenceError
from tests.problems import MLP, Classifier, make_strategy

DTYPES = [
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "complex64"),
    *("int32", "uint8", "int16", "bool"),
]


def make_copies(strategy: Any, copies: Sequence[np.ndarray]) -> jax.Array:
    """Returns a replicated array whose copies are what they are."""
    mesh = strategy.mesh
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = [
        jax.device_put(copy, device)
        for copy, device in zip(copies, mesh.devices.flat, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(copies[0].shape, sharding, placed)


def flip_bit(array: Any, byte: int, bit: int) -> np.ndarray:
    flipped = np.array(array)
    flipped.reshape(-1).view(np.uint8)[byte] ^= np.uint8(1 << bit)
    return flipped


def with_flip(strategy: Any, array: Any, replica: int, byte: int, bit: int) -> Any:
    """Returns an array in whose copy on one replica a bit is flipped."""
    copies = [np.array(array) for _ in strategy.mesh.devices.flat]
    copies[replica] = flip_bit(array, byte, bit)
    return make_copies(strategy, copies)


def compare(strategy: Any, arrays: dict[str, jax.Array]) -> None:
    comparison = ReplicaComparison(strategy.placement.replica_mesh, strategy.dispatch)
    sums = comparison.start(list(arrays.values()))
    assert sums is not None
    check_copies(np.asarray(sums), list(arrays), "after step 7")


def make_trainer(num_replicas: int = 4, **options: Any) -> Classifier:
    strategy = make_strategy(num_replicas)
    with strategy.scope():
        return Classifier(strategy, MLP(nnx.Rngs(0)), optax.adam(1e-2), **options)


# The checksum


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_is_found(dtype):
    strategy = make_strategy(2)
    array = np.arange(2).astype(jnp.dtype(dtype))
    if dtype == "bool":
        flips = [(byte, 0) for byte in range(array.nbytes)]
    else:
        flips = [(byte, bit) for byte in range(array.nbytes) for bit in range(8)]
    arrays = [with_flip(strategy, array, 1, *flip) for flip in flips]

    comparison = ReplicaComparison(strategy.placement.replica_mesh, strategy.dispatch)
    sums = np.asarray(comparison.start(arrays))

    assert sums.shape == (2, len(flips))
    assert (sums[0] == sums[0, 0]).all()
    assert (sums[1] != sums[0]).all()


def test_keys_are_compared():
    strategy = make_strategy(2)
    data = np.array(jax.random.key_data(jax.random.key(3)))
    same = make_copies(strategy, [data, data])
    other = with_flip(strategy, data, 1, 5, 2)

    compare(strategy, {"key": jax.random.wrap_key_data(same)})
    with pytest.raises(ReplicaDivergenceError, match="  key: no majority"):
        compare(strategy, {"key": jax.random.wrap_key_data(other)})


def test_arrays_and_replicas_that_differ_are_named():
    strategy = make_strategy(4)
    one = np.ones((3, 5), np.float32)
    zero = np.zeros((3, 5), np.float32)
    arrays = {
        "a": with_flip(strategy, one, 2, 7, 6),
        "b": make_copies(strategy, [one] * 4),
        "c": make_copies(strategy, [one, zero, one, zero]),
        "d": make_copies(strategy, [one, one * 2, zero, one]),
    }

    with pytest.raises(
        ReplicaDivergenceError,
        match=r"3 of 4 arrays of the state must be equal on all 4 replicas, but after "
        r"step 7 they are not:\n  a: replica 2\n  c: no majority of replicas agrees\n"
        r"  d: no majority of replicas agrees\n.*Restore an earlier checkpoint",
    ) as caught:
        compare(strategy, arrays)

    everyone = (0, 1, 2, 3)
    assert caught.value.leaves == {"a": (2,), "c": everyone, "d": everyone}
    assert isinstance(caught.value, RuntimeError)


def test_nan_is_equal_to_itself():
    strategy = make_strategy(2)
    nan = np.full(3, np.nan, np.float32)

    compare(strategy, {"x": make_copies(strategy, [nan, nan])})


def test_there_is_nothing_to_compare_on_one_replica():
    for strategy in (make_strategy(1), armillary.distribute.DefaultStrategy()):
        comparison = ReplicaComparison(
            strategy.placement.replica_mesh, strategy.dispatch
        )
        assert comparison.start([jnp.ones(3)]) is None


# The trainer


def test_a_flipped_bit_in_a_parameter_is_reported():
    trainer = make_trainer(check_replicas_every=2)
    trainer.train(2)
    kernel = trainer.model.first.kernel
    # The highest bit of the exponent of one value.
    kernel.set_value(with_flip(trainer.strategy, kernel[...], 3, 7, 5))

    with pytest.raises(
        ReplicaDivergenceError,
        match=r"but after step 2 of the 2 of this loop they are not:\n"
        r"(.*\n)*  model/first/kernel: replica 3\n",
    ):
        trainer.train(2)


def test_the_first_loop_of_a_process_is_compared():
    trainer = make_trainer(2, check_replicas_every=1000)
    trainer.train(1)

    # A preempted job begins again with copies of the state that differ.
    trainer = make_trainer(2, check_replicas_every=1000)
    kernel = trainer.model.first.kernel
    kernel.set_value(with_flip(trainer.strategy, kernel[...], 1, 7, 5))

    with pytest.raises(ReplicaDivergenceError, match="first/kernel"):
        trainer.train(1)


@pytest.mark.slow
def test_copies_are_compared_when_a_loop_passes_a_multiple():
    trainer = make_trainer(check_replicas_every=5)
    kernel = trainer.model.first.kernel
    trainer.train(2)
    kernel.set_value(with_flip(trainer.strategy, kernel[...], 1, 7, 5))

    trainer.train(2)
    with pytest.raises(ReplicaDivergenceError, match="first/kernel: replica 1\n"):
        trainer.train(2)


@pytest.mark.slow
def test_equal_copies_pass_and_the_comparison_changes_nothing(no_retrace):
    plain, watched = make_trainer(), make_trainer(check_replicas_every=1)
    plain.train(9)
    watched.train(3)

    with no_retrace():
        watched.train(3)
        watched.train(3)

    np.testing.assert_array_equal(plain.losses, watched.losses)


@pytest.mark.slow
def test_a_controller_saves_nothing_that_differs(tmp_path):
    trainer = make_trainer(check_replicas_every=2)
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer), tmp_path, checkpoint_interval=2
    )

    def flip(output: Any) -> None:
        if int(trainer.optimizer.step[...]) == 4:
            kernel = trainer.model.first.kernel
            kernel.set_value(with_flip(trainer.strategy, kernel[...], 3, 7, 5))

    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=trainer.strategy,
        steps_per_loop=2,
        checkpoint_manager=manager,
        train_actions=[flip],
    )
    controller.train(2)

    with pytest.raises(ReplicaDivergenceError, match="after step 6 they are not"):
        controller.train(20)

    assert manager.latest_checkpoint == str(tmp_path / "checkpoint_4")
