"""Tests of Python state in a checkpoint: arrays, generators and objects."""

import json
import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import armillary
from armillary.checkpoint._packed import find_names, pack, unpack
from armillary.errors import CheckpointError, CheckpointMismatchError
from tests.command import run_command
from tests.mistakes import mistakes
from tests.peers import run_together


class Buffer:
    """A replay buffer: a large array, small ones, and a generator that draws of it."""

    def __init__(self) -> None:
        self.rows = np.zeros((600, 4))
        self.size = 0
        self.games: list[Any] = []
        self.rng = np.random.Generator(np.random.MT19937(1))

    def play(self) -> None:
        self.rows[self.size] = self.rng.normal(size=4)
        self.games.append((np.arange(3, dtype="int8"), 2.5, None, {3: b"ab"}))
        self.size += 1

    def get_state(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "size": np.int64(self.size),
            "games": self.games,
            "rng": self.rng.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.rows[...] = state["rows"]
        self.size = int(state["size"])
        self.games = state["games"]
        self.rng.bit_generator.state = state["rng"]


class Loader:
    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def draw_of_generator(rng: np.random.Generator) -> Any:
    return rng.integers(0, 100, 3), rng.normal(size=3)


def draw_of_python(rng: Any) -> Any:
    return rng.random(), rng.gauss(0, 1)


def draw_of_old_numpy(rng: Any) -> Any:
    return rng.normal(size=3)


def make_generator(kind: Any) -> np.random.Generator:
    return np.random.Generator(kind(0))


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "PCG64": (np.random.default_rng, draw_of_generator),
    "MT19937": (lambda: make_generator(np.random.MT19937), draw_of_generator),
    "Philox": (lambda: make_generator(np.random.Philox), draw_of_generator),
    "SFC64": (lambda: make_generator(np.random.SFC64), draw_of_generator),
    "BitGenerator": (np.random.PCG64DXSM, lambda bits: bits.random_raw(3)),
    "RandomState": (np.random.RandomState, draw_of_old_numpy),
    "np.random": (lambda: np.random, draw_of_old_numpy),
    "Random": (random.Random, draw_of_python),
    "random": (lambda: random, draw_of_python),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_continues_bit_for_bit(kind, tmp_path):
    make, draw = GENERATORS[kind]
    generator = make()
    draw(generator)  # Some keep half of what they have drawn.
    path = armillary.Checkpoint(rng=generator).write(tmp_path / "saved")
    expected = draw(generator)

    other = make()
    draw(other)
    draw(other)
    armillary.Checkpoint(rng=other).read(path)
    for found, wanted in zip(draw(other), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_states_with_arrays_are_restored_in_place(tmp_path):
    def make() -> dict[str, Any]:
        return {
            "model": nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
            "buffer": Buffer(),
            "loader": Loader(),
            "counts": np.zeros(5, "int64"),
            "scale": np.array(1.0, ml_dtypes.bfloat16),
        }

    old, new = make(), make()
    for _ in range(40):
        old["buffer"].play()
    old["loader"].place = 7
    old["counts"][2] = 2**40
    old["scale"][...] = 3
    rows, counts = new["buffer"].rows, new["counts"]
    manager = armillary.CheckpointManager(armillary.Checkpoint(**old), tmp_path)
    path = manager.save(1)
    old["buffer"].rows[...] = 99  # A save that runs holds the values of its moment.
    manager.sync()
    report = armillary.Checkpoint(**new).read(path)

    assert {"buffer", "loader", "counts", "scale"} < {*report.restored}
    assert new["buffer"].rows is rows and new["counts"] is counts
    expected = Buffer()
    for _ in range(40):
        expected.play()
    new["buffer"].play()
    expected.play()
    np.testing.assert_array_equal(rows, expected.rows)
    assert new["buffer"].size == 41
    numbers, *rest = new["buffer"].games[0]
    assert numbers.dtype == np.int8 and numbers.tolist() == [0, 1, 2]
    assert rest == [2.5, None, {3: b"ab"}]
    assert type(new["buffer"].games[0]) is tuple
    assert new["loader"].place == 7
    assert counts.tolist() == [0, 0, 2**40, 0, 0]
    assert new["scale"] == 3


def test_the_content_of_a_state_is_shown_by_dtype_and_shape(tmp_path, capsys):
    buffer = Buffer()
    buffer.play()
    path = armillary.Checkpoint(buffer=buffer).write(tmp_path / "saved")
    assert run_command(["checkpoint", "show", path]) == 0
    printed = capsys.readouterr().out
    assert '"rows": "float64 (600, 4)"' in printed
    assert '"key": "uint32 (624,)"' in printed
    assert "int8 (3,)" in printed


def test_an_object_with_arrays_of_jax_is_saved_by_these():
    class Both(Loader):
        def __init__(self) -> None:
            super().__init__()
            self.weights = jnp.zeros(2)

    checkpoint = armillary.Checkpoint(both=Both())
    assert not checkpoint.states
    assert set(checkpoint.read_leaves()) == {"both/weights"}


DTYPES = ["bool", "int8", "uint64", "float16", "float64", "complex64", "bfloat16"]
NUMBERS = st.sampled_from(DTYPES).flatmap(
    lambda name: hnp.arrays(
        np.uint8 if name == "bfloat16" else name,
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
    ).map(
        lambda array: array.astype(ml_dtypes.bfloat16) if name == DTYPES[-1] else array
    )
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**130), 2**130),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.binary(max_size=5),
    NUMBERS,
    st.sampled_from([np.float32(1.5), np.int64(2**60), np.bool_(True)]),
)
KEYS = st.one_of(
    st.sampled_from(["__armillary__", "a", "a/b", "name"]), st.integers(0, 3)
)
STATES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=4),
        st.lists(parts, max_size=4).map(tuple),
        st.dictionaries(KEYS, parts, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(state=STATES, repeats=st.integers(1, 300))
def test_any_state_comes_back_as_it_was(state, repeats):
    state = [state, np.arange(repeats)]
    packed = pack("thing", state, lambda: "it")
    text = json.dumps(packed.state)
    assert set(find_names(json.loads(text))) == packed.arrays.keys()
    assert_same(unpack(json.loads(text), packed.arrays), state)
    assert packed.fingerprint() == pack("thing", state, lambda: "it").fingerprint()


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, part in expected.items():
            assert_same(found[key], part)
    elif isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


def test_a_state_that_does_not_fit_changes_nothing(tmp_path):
    old = {"buffer": Buffer(), "counts": np.arange(3), "rng": np.random.default_rng(1)}
    path = armillary.Checkpoint(**old).write(tmp_path / "saved")

    def read(**changed: Any) -> None:
        buffer = Buffer()
        buffer.play()
        rows = buffer.rows.copy()
        new = {"buffer": buffer, "counts": np.zeros(3, int), **changed}
        try:
            armillary.Checkpoint(**{**old, **new}).read(path)
        finally:
            np.testing.assert_array_equal(buffer.rows, rows)
            assert buffer.size == 1

    with pytest.raises(CheckpointMismatchError, match=r"`counts` is int64 \(4,\) in"):
        read(counts=np.zeros(4, int))
    with pytest.raises(CheckpointMismatchError, match=r"`counts` is float32 \(3,\) in"):
        read(counts=np.zeros(3, "float32"))
    with pytest.raises(CheckpointMismatchError, match="`rng` of type MT19937 refuses"):
        read(rng=np.random.Generator(np.random.MT19937(0)))

    class Other(Buffer):
        def set_state(self, state: dict[str, Any]) -> None:
            raise KeyError("columns")

    with pytest.raises(KeyError) as caught:
        armillary.Checkpoint(**{**old, "buffer": Other()}).read(path)
    assert "That is `buffer`, so nothing was restored" in caught.value.__notes__[0]


def test_a_state_that_may_differ_stays(tmp_path):
    path = armillary.Checkpoint(counts=np.arange(3), w={"w": jnp.ones(1)}).write(
        tmp_path / "saved"
    )
    counts = np.zeros(4, int)
    holder = {"w": jnp.zeros(1)}
    checkpoint = armillary.Checkpoint(counts=counts, w=holder)
    report = checkpoint.read(path, may_differ="counts")
    assert report.kept == ("counts",)
    assert not counts.any() and holder["w"] == 1


@pytest.mark.parametrize("is_alike", [True, False])
def test_processes_must_have_the_same_state(is_alike):
    def check(peers: Any) -> str:
        seed = 0 if is_alike else peers.index
        checkpoint = armillary.Checkpoint(
            counts=np.arange(3),
            rng=np.random.default_rng(seed),
            clock=Returns({"seconds": peers.index}),  # JSON may differ.
        )
        packed = {
            name: pack(name, value.get_state(), lambda: "it")
            for name, value in checkpoint.states.items()
        }
        try:
            checkpoint._check_agreed(packed, peers)
        except CheckpointError as error:
            return str(error)
        return ""

    messages = run_together(check)
    if is_alike:
        assert messages == ["", ""]
    else:
        for text in messages:
            assert "`rng` has another state in process 1 than in process 0" in text


class Returns:
    def __init__(self, state: Any) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
READ_ONLY = np.arange(3)
READ_ONLY.setflags(write=False)


def save(state: Any) -> None:
    armillary.Checkpoint(game=Returns(state)).read_content()


@mistakes(
    {
        TypeError: {
            r"`get_state` of `game`, of type Returns, returned \{1\} of type set at "
            "`a/0`, which": lambda: save({"a": [{1}]}),
            "returned Array.* of type ArrayImpl at `a`": (
                lambda: save({"a": jnp.zeros(2)})
            ),
            "returned array.* of type ndarray, which": lambda: save(np.array(["a"])),
            "of type MaskedArray": lambda: save(np.ma.array([1.0], mask=[True])),
            "a state that holds itself": lambda: save(CYCLE),
            r"`names` is an array of dtype object and shape \(1,\) that does not": (
                lambda: armillary.Checkpoint(names=np.array([None]))
            ),
            r"`x` is an array of dtype int64 and shape \(3,\) that cannot be written": (
                lambda: armillary.Checkpoint(x=READ_ONLY)
            ),
            "`x` is of type SystemRandom": (
                lambda: armillary.Checkpoint(x=random.SystemRandom())
            ),
        }
    }
)
def test_objects_that_a_checkpoint_cannot_hold(call, error, message):
    with pytest.raises(error, match=message):
        call()
