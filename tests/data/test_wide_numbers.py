"""Tests that 64-bit numbers which do not fit on a device are errors."""

import grain
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

import armillary
from armillary.data import (
    FixedLenFeature,
    InputOptions,
    from_arrays,
    from_tfrecords,
)
from armillary.data.feed._gather import Gather
from armillary.data.sources._batch import as_device_values
from armillary.distribute.strategies._layouts import MeshLayout
from tests.problems import make_strategy
from tests.records import make_record, write_records

IDS = np.arange(12) + 2**31 - 6
"""The first that does not fit is example 6."""
DTYPES = [np.int64, np.uint64, np.float64, np.complex128, ml_dtypes.bfloat16]


def number_for(dtype):
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        lowest, highest = int(limits.min), int(limits.max)
        near = st.sampled_from([lowest, 0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, highest])
        return near | st.integers(lowest, highest)
    largest = float(np.finfo(np.float32).max)
    # The last is the first that becomes infinite.
    near = [largest, -largest, np.inf, -np.inf, np.nan, 3.4028235677973364e38]
    return st.sampled_from(near) | st.floats(width=64)


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_a_number_stays_what_it_is_or_is_named(data, dtype):
    values = data.draw(st.lists(number_for(dtype), max_size=5))
    with np.errstate(over="ignore"):
        array = np.array(values, dtype)
        # The array on the device, which is as wide as it can be.
        narrow = array.astype(jax.dtypes.canonicalize_dtype(dtype))
    if array.dtype.kind in "iu":
        wrong = np.flatnonzero(narrow.astype(object) != array.astype(object))
    else:
        wrong = np.flatnonzero(np.isfinite(array) & ~np.isfinite(narrow))
    batch = {"x": {"y": array}, "z": np.zeros(len(array), bool)}
    if not len(wrong):
        cast = as_device_values(batch, lambda: "B")["x"]["y"]
        assert cast.dtype == narrow.dtype
        assert cast.tobytes() == narrow.tobytes()
        return
    with pytest.raises(ValueError, match=r"^B has numbers of 64 bits") as caught:
        as_device_values(batch, lambda: "B")
    place = wrong[0]
    line = f"x/y: {array[place]} in example {place}, {array.dtype} that becomes"
    assert f"  {line} {narrow.dtype}\n" in str(caught.value)
    assert "z:" not in str(caught.value)


def make_records(tmp_path):
    path = write_records(
        tmp_path / "a.tfrecord", [make_record({"id": int(value)}) for value in IDS]
    )
    return from_tfrecords(path, {"id": FixedLenFeature((), np.int64)}, batch_size=4)


def batches():
    for start in range(0, 12, 4):
        yield {"id": IDS[start : start + 4]}


# By kind, the source and what its first example that does not fit is called.
SOURCES = {
    "arrays": (lambda _: from_arrays({"id": IDS}, batch_size=4), 6),
    "list": (lambda _: list(batches()), 2),
    "generator": (lambda _: batches, 2),
    "grain": (lambda _: grain.MapDataset.source(list(batches())), 2),
    "tfrecord": (make_records, 2),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_names_the_example(kind, prefetch, tmp_path):
    make, example = SOURCES[kind]
    strategy = make_strategy(2)
    options = InputOptions(prefetch=prefetch)
    iterator = iter(strategy.distribute_dataset(make(tmp_path), options))
    np.testing.assert_array_equal(strategy.gather(next(iterator)["id"], 0), IDS[:4])
    message = rf"\n  id: 2147483648 in example {example}, int64 that becomes int32"
    with pytest.raises(ValueError, match=message) as caught:
        next(iterator)
    assert 'jax.config.update("jax_enable_x64", True)' in str(caught.value)
    with jax.enable_x64(True):
        wide = [
            strategy.gather(batch["id"], axis=0)
            for batch in strategy.distribute_dataset(make(tmp_path))
        ]
    np.testing.assert_array_equal(np.concatenate(wide), IDS)


def test_shuffled_arrays_name_the_row():
    arrays = {"x": np.zeros((12, 2)), "id": np.zeros((12, 3), np.uint64)}
    arrays["id"][7, 1] = 2**63
    arrays["x"][3, 0] = -1e300
    source = from_arrays(arrays, batch_size=12, shuffle_seed=0)
    for strategy in (armillary.distribute.DefaultStrategy(), make_strategy(4)):
        for is_resident in (False, True):
            options = InputOptions(place_on_device=is_resident)
            with pytest.raises(ValueError, match=r"^`arrays` has numbers") as caught:
                next(iter(strategy.distribute_dataset(source, options)))
            text = str(caught.value)
            assert "  id: 9223372036854775808 in example 7, uint64 that becomes" in text
            assert "  x: -1e+300 in example 3, float64 that becomes float32\n" in text


class Processes:
    """Several processes, for a layout that asks nothing else of them."""

    is_alone = False


def test_rows_that_a_process_takes_for_its_own_devices_are_looked_at_too():
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
    layout = MeshLayout(mesh, Processes(), ("data",))  # pyright: ignore[reportArgumentType]
    gather = Gather(layout, from_arrays({"a": {"id": IDS}}, batch_size=1))
    fits = gather.send({"rows": np.array([5, 0, 1, 2])}, 0, 1)
    np.testing.assert_array_equal(fits["a"]["id"], IDS[[5, 0, 1, 2]])
    with pytest.raises(ValueError, match="  a/id: 2147483649 in example 7, int64"):
        gather.send({"rows": np.array([0, 1, 2, 7])}, 0, 1)


class Trainer(armillary.StandardTrainer):
    def __init__(self, source, **options):
        super().__init__(source, armillary.StandardTrainerOptions(**options))
        self.last = jnp.zeros((), jnp.int32)

    def train_step(self, iterator):
        self.last = jnp.max(next(iterator)["id"])


@pytest.mark.parametrize("compile_step", [True, False])
def test_a_trainer_stops_before_the_step_that_would_be_wrong(compile_step):
    trainer = Trainer(batches, compile_step=compile_step)
    with pytest.raises(ValueError, match=r"^Batch 1 of the source \(generator func"):
        trainer.train(3)
    assert int(trainer.last) == IDS[3]
