"""One contract for all sources, then what each of them says when it is misused."""

import json
import subprocess
import sys

import grain
import jax.numpy as jnp
import numpy as np
import pytest

from armillary.data import DistributedDataset, Source, as_source, from_arrays
from armillary.data.feed._position import Position, decode_position, encode_position
from armillary.errors import DatasetStateError
from tests import problems

BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def make_list():
    return [np.array(batch) for batch in BATCHES]


def generate():
    yield from make_list()


class Positioned(problems.Positioned):
    batches = BATCHES


class PositionedIterable:
    def __iter__(self):
        return Positioned()


def make_grain_loader():
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 10, 1),
        sampler=grain.samplers.IndexSampler(10, shuffle=False, seed=0, num_epochs=1),
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )


REPOSITIONABLE = {
    "arrays": lambda: from_arrays(np.arange(10), batch_size=4),
    "grain map": lambda: grain.MapDataset.range(10).batch(4),
    "grain iter": lambda: grain.MapDataset.range(10).to_iter_dataset().batch(4),
    "grain loader": make_grain_loader,
    "positioned iterable": PositionedIterable,
    "positioned iterator": Positioned,
    "positioned function": lambda: Positioned,
    "made source": lambda: as_source(PositionedIterable()),
}
OTHERS = {
    "list": make_list,
    "list of jax arrays": lambda: [jnp.array(batch) for batch in BATCHES],
    "generator function": lambda: generate,
}
EVERY = REPOSITIONABLE | OTHERS


def read(iterator):
    batches = []
    while True:
        try:
            batches.append(next(iterator).tolist())
        except StopIteration:
            return batches


@pytest.mark.parametrize("kind", EVERY)
def test_every_pass_gives_every_batch(kind):
    source = as_source(EVERY[kind]())
    assert isinstance(source, Source)
    assert isinstance(source.name, str)
    for epoch in range(3):
        assert read(source.make_iterator(epoch)) == BATCHES


@pytest.mark.parametrize("kind", EVERY)
def test_is_repositionable_says_whether_there_is_a_position(kind):
    source = as_source(EVERY[kind]())
    assert source.is_repositionable == (kind in REPOSITIONABLE)
    assert read(source.make_iterator(0)) == BATCHES


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("kind", REPOSITIONABLE)
def test_positions_survive_json_and_resume_in_a_new_source(kind, count):
    source = as_source(REPOSITIONABLE[kind]())
    iterator = source.make_iterator(0)
    for _ in range(count):
        next(iterator)
    state = encode_position(Position(source=iterator.get_state()), source.name)
    rest = read(iterator)
    assert rest == BATCHES[count:]
    again = as_source(REPOSITIONABLE[kind]()).make_iterator(0)
    again.set_state(decode_position(json.loads(json.dumps(state)), source.name).source)
    assert read(again) == rest


@pytest.mark.parametrize("kind", REPOSITIONABLE)
def test_positions_do_not_change_when_the_iterator_moves_on(kind):
    iterator = as_source(REPOSITIONABLE[kind]()).make_iterator(0)
    next(iterator)
    state = iterator.get_state()
    copy = json.dumps(encode_position(Position(source=state), ""))
    read(iterator)
    assert json.dumps(encode_position(Position(source=state), "")) == copy


def test_buffers_that_a_generator_fills_again_are_copied():
    def fill_again():
        buffer = np.zeros(2, int)
        for value in range(3):
            buffer[:] = value
            yield {"x": buffer}

    iterator = as_source(fill_again).make_iterator(0)
    batches = [next(iterator)["x"] for _ in range(3)]
    assert [batch.tolist() for batch in batches] == [[0, 0], [1, 1], [2, 2]]


def test_a_generator_can_be_read_once():
    source = as_source(generate())
    assert not source.is_repositionable
    assert read(source.make_iterator(0)) == BATCHES
    with pytest.raises(
        DatasetStateError, match=r"iterator of type generator.*once.*function"
    ):
        source.make_iterator(1)


def test_unbatched_arrays_point_to_from_arrays(make_layout):
    for arrays in [
        {"x": np.zeros(3)},
        np.zeros(3),
        jnp.zeros(3),
        (np.zeros(3), np.zeros(3)),
    ]:
        with pytest.raises(TypeError, match="of arrays, but it must give batches"):
            as_source(arrays)
    dataset = DistributedDataset(make_list(), make_layout())
    with pytest.raises(
        TypeError, match="The data set is a distributed dataset already"
    ):
        as_source(dataset)


@pytest.mark.parametrize("value", [3, None, "data.csv", b"x"])
def test_other_types_are_errors(value):
    with pytest.raises(
        TypeError, match=r"The data set is .*it must give batches. Pass the"
    ):
        as_source(value)


def test_a_function_must_return_an_iterator():
    source = as_source(lambda: 3)
    with pytest.raises(TypeError, match="returned 3 of type int, but it must return"):
        source.make_iterator(0)


@pytest.mark.slow
def test_grain_is_not_imported_for_other_sources():
    program = (
        "import sys, armillary.data; armillary.data.as_source([1]); "
        "sys.exit('grain' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_unbatched_grain_elements_are_named(make_layout):
    dataset = DistributedDataset(grain.MapDataset.range(3), make_layout())
    with pytest.raises(Exception, match=r"Batch 0 of the source \(grain.MapDataset\)"):
        next(iter(dataset))
