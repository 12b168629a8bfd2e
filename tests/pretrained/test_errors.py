"""Tests that everything that does not fit is an error, and changes nothing."""

import json
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from armillary import pretrained
from armillary.errors import (
    CheckpointDamageError,
    CheckpointError,
    CheckpointMismatchError,
)
from armillary.pretrained import _arrays, _files
from tests.pretrained.models import (
    NAMES,
    ROWS,
    Model,
    make_tensors,
    read_model,
)


def test_everything_that_differs_is_one_error_and_nothing_changes(tmp_path):
    tensors = make_tensors(num_layers=4)
    del tensors["k.weight"], tensors["h.1.up.bias"]
    tensors["wte.weight"] = tensors["wte.weight"].astype(np.float16)
    tensors["q.weight"] = tensors["q.weight"][:3]
    tensors["visual.weight"] = np.zeros(2, np.float32)
    tensors["norm.2.weight"] = np.zeros(2, np.float32)
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    model = Model()
    before = read_model(model)
    with pytest.raises(CheckpointMismatchError) as caught:
        pretrained.load(model, path, NAMES)
    text = str(caught.value)
    assert text.startswith(f"`path` is {str(path)!r}, and 7 arrays differ between it")
    for line in (
        "+ blocks/up/bias: float32 (3, 8)  the file lacks h.1.up.bias\n",
        "~ blocks/up/kernel: float32 (4, 4, 8) in the file, float32 (3, 4, 8) in the",
        "~ embed/embedding: float16 (6, 4) in the file, float32 (6, 4) in the model",
        "+ key/kernel: float32 (4, 2)  the file lacks k.weight\n",
        "- norms/2/scale: float32 (2,)  only in the file\n",
        "~ query/kernel: q.weight does not fit: the axis of size 3 is no heads x size",
        "- visual.weight: float32 (2,)  only in the file\n",
        "Nothing was loaded.",
    ):
        assert line in text, text
    for name, value in read_model(model).items():
        np.testing.assert_array_equal(value, before[name])


def test_a_tensor_with_the_name_of_an_array_needs_a_row():
    names = pretrained.Names([("x", "a")])
    ones = np.ones(2, np.float32)
    model = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    with pytest.raises(CheckpointMismatchError) as caught:
        pretrained.load(model, {"x": ones, "b": ones}, names)
    text = str(caught.value)
    assert (
        "~ b: float32 (2,) in the file, float32 (2,) in the model, but no row" in text
    )
    np.testing.assert_array_equal(model["a"], 0)

    # Another tensor is the value of the array.
    with pytest.raises(CheckpointMismatchError) as caught:
        pretrained.load({"a": jnp.zeros(2)}, {"x": ones, "a": ones}, names)
    assert "1 array differs" in str(caught.value)
    assert "- a: float32 (2,)  only in the file" in str(caught.value)

    named = pretrained.Names([("x", "a"), ("a", None)])
    small = {"a": jnp.zeros(2)}
    assert pretrained.load(small, {"x": ones, "a": 2 * ones}, named).unused == ("a",)
    np.testing.assert_array_equal(small["a"], 1)


def test_a_number_that_is_too_large_to_list_is_a_difference(tmp_path):
    tensors = {f"h.{10**12}.w": np.zeros(2, np.float32)}
    names = pretrained.Names([("h.{layer}.w", "w")])
    with pytest.raises(CheckpointMismatchError) as caught:
        pretrained.load({"w": jnp.zeros((1, 2))}, tensors, names)
    assert "the file lacks 'h.{layer}.w'" in str(caught.value)


def test_a_model_that_the_table_does_not_name_is_not_saved(tmp_path):
    names = pretrained.Names([*ROWS[1:5], *ROWS[6:]])
    with pytest.raises(CheckpointMismatchError) as caught:
        pretrained.save(Model(), tmp_path / "new", names)
    text = str(caught.value)
    assert "2 arrays differ" in text
    assert "+ embed/embedding: float32 (6, 4)  only in the model" in text
    assert "+ key/kernel: float32 (4, 2)  only in the model" in text
    assert "Nothing was saved." in text
    assert not (tmp_path / "new").exists()

    names = pretrained.Names([*ROWS[1:], (None, "embed/embedding")])
    (path,) = pretrained.save(Model(), tmp_path / "new", names)
    assert "wte.weight" not in load_file(path)


def test_an_array_that_does_not_fit_its_row_is_not_saved(tmp_path):
    names = pretrained.Names(
        [
            ("{layer}.w", "w"),
            ("v", "v", pretrained.rearrange("(a b) -> a b", b=3)),
            ("uv", ("u", "t"), pretrained.split((2, 2), axis=0)),
        ]
    )
    model = {"w": jnp.zeros(()), "v": jnp.zeros((2, 2)), "u": jnp.zeros(3)}
    model["t"] = jnp.zeros(1)
    with pytest.raises(CheckpointMismatchError) as caught:
        pretrained.save(model, tmp_path / "x.safetensors", names)
    text = str(caught.value)
    assert text.startswith("4 arrays differ between the model and the table `names`")
    assert "~ w: () has no such axes for {layer}" in text
    assert "~ v: it does not fit its row: the axis of size 2 is no b" in text
    assert "~ u: it does not fit its row: float32 (3,) has not 2 along axis 0" in text
    with pytest.raises(ValueError, match=r"`path` is 'gs://bucket/x', but .*Mount"):
        pretrained.save(model, "gs://bucket/x", names)


def test_damaged_and_missing_files_are_named(tmp_path):
    model = Model()
    with pytest.raises(FileNotFoundError, match=r"It has none of them.*one file"):
        pretrained.load(model, tmp_path, NAMES)
    with pytest.raises(FileNotFoundError, match=r"Download the model first"):
        pretrained.load(model, tmp_path / "pytorch_model.bin", NAMES)
    tensors = make_tensors()
    for name in ("a", "b"):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    with pytest.raises(FileNotFoundError, match=r"It has a\.safetensors, b\.safetens"):
        pretrained.load(model, tmp_path, NAMES)
    path = tmp_path / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointDamageError, match=r"is damaged: .*Download it again"):
        pretrained.load(model, path, NAMES)

    index = tmp_path / _files.INDEX
    for content, message in (
        ("{}", "it is not an index"),
        ('{"weight_map": {"x": "c.safetensors"}}', "files are missing: c.safetens"),
        ('{"weight_map": {"x": "b.safetensors"}}', "it lacks x, which the index"),
    ):
        index.write_text(content)
        with pytest.raises(CheckpointDamageError, match=message):
            pretrained.load(model, tmp_path, NAMES)


def write_raw(path, kind, shape, data):
    """Writes a file with one tensor, in a dtype of the format."""
    header = {"w": {"dtype": kind, "shape": shape, "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_a_dtype_that_numpy_does_not_have_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    write_raw(path, "F4", [2, 2], bytes(2))
    names = pretrained.Names([("w", "w")])
    with pytest.raises(CheckpointError, match=r"w: F4 \(2, 2\)"):
        pretrained.list_tensors(path)
    with pytest.raises(CheckpointMismatchError, match=r"~ w: F4 \(2, 2\) in the"):
        pretrained.load({"w": jnp.zeros(2)}, path, names)
    pretrained.load(
        {"v": jnp.zeros(2)}, path, pretrained.Names([("w", None), (None, "v")])
    )


def test_floats_in_8_bits_are_not_cast_without_their_scale(tmp_path):
    path = tmp_path / "x.safetensors"
    write_raw(path, "F8_E4M3", [2], b"\x38\x40")
    names = pretrained.Names([("w", "w")])
    model = {"w": jnp.zeros(2, jnp.bfloat16)}
    for cast in (False, True):
        with pytest.raises(CheckpointMismatchError) as caught:
            pretrained.load(model, path, names, cast=cast)
        text = str(caught.value)
        assert "~ w: float8_e4m3fn (2,) in the file, bfloat16 (2,) in" in text
        assert "have a scale in another tensor" in text
        assert "cast=True" not in text

    model = {"w": jnp.ones(2, jnp.float8_e4m3fn), "v": jnp.ones(2)}
    names = pretrained.Names([("w", "w"), ("v", "v")])
    pretrained.save(model, path, names, dtype="bfloat16")
    listed = pretrained.list_tensors(path)
    assert listed["w"].dtype == jnp.float8_e4m3fn
    assert listed["v"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"`dtype` is 'float8_e5m2'.*at least 16 bits"):
        pretrained.save(model, path, names, dtype="float8_e5m2")


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("float32", "float16", 1e6),
        ("bfloat16", "float16", -1e6),
        # Between the largest numbers of the two, which have equal exponents.
        ("float32", "bfloat16", 3.4e38),
    ],
)
def test_a_value_that_does_not_fit_its_dtype_does_not_become_infinite(
    tmp_path, old, new, value
):
    names = pretrained.Names([("w", "w")])
    # Values that are infinite already are cast.
    tensor = np.array([1, -np.inf, value, np.nan], jnp.dtype(old))
    model = {"w": jnp.zeros(4, new)}
    shown = re.escape(f"{float(tensor[2]):.6g}")
    message = f"`w` cannot be cast: {shown} is too large for {new}.*Nothing was "
    with pytest.raises(CheckpointMismatchError, match=message):
        pretrained.load(model, {"w": tensor}, names, cast=True)
    np.testing.assert_array_equal(model["w"], 0)
    with pytest.raises(CheckpointMismatchError, match=message):
        pretrained.save({"w": jnp.asarray(tensor)}, tmp_path, names, dtype=new)
    assert list(tmp_path.iterdir()) == []

    tensor[2] = 2
    pretrained.load(model, {"w": tensor}, names, cast=True)
    found = np.asarray(model["w"], np.float32)
    np.testing.assert_array_equal(found, [1, -np.inf, 2, np.nan])


def test_a_disk_that_is_full_changes_no_earlier_file(tmp_path, monkeypatch):
    model = Model()
    (path,) = pretrained.save(model, tmp_path / "new", NAMES)
    before = load_file(path)["wte.weight"]
    model.embed.embedding[...] = model.embed.embedding[...] + 1.0

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(CheckpointError, match=r"process 0 of 1 .*No space left"):
            pretrained.save(model, tmp_path / "new", NAMES)
    np.testing.assert_array_equal(load_file(path)["wte.weight"], before)
    assert len(list((tmp_path / "new").iterdir())) == 1
    pretrained.save(model, tmp_path / "new", NAMES)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["model.safetensors"]
    np.testing.assert_array_equal(load_file(path)["wte.weight"], before + 1.0)
    with pytest.raises(CheckpointError, match="cannot be written"):
        pretrained.save(model, f"{path}/inside", NAMES)


SAVES = {
    "whole": {},
    "two": {"max_file_bytes": 12},
    "three": {"max_file_bytes": 8},
}


@pytest.mark.parametrize("new", SAVES)
@pytest.mark.parametrize("old", SAVES)
def test_a_save_that_is_killed_at_any_moment_leaves_no_mixture(
    tmp_path, monkeypatch, old, new
):
    names = pretrained.Names([("u", "u"), ("v", "v"), ("w", "w")])
    first = {"u": jnp.zeros(2), "v": jnp.zeros(1), "w": jnp.zeros(2)}
    second = {name: value + 1 for name, value in first.items()}

    def save_until(number):
        """Returns whether a save ends before its change of the folder of a number."""
        left = iter(range(number))

        def stop_at_the_end(function):
            def change(*arguments, **options):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return function(*arguments, **options)

            return change

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink"):
                patch.setattr(Path, name, stop_at_the_end(getattr(Path, name)))
            try:
                pretrained.save(second, folder, names, **SAVES[new])
            except KeyboardInterrupt:
                return False
        return True

    outcomes = []
    folder = tmp_path
    is_done = False
    for number in range(30):
        folder = tmp_path / str(number)
        pretrained.save(first, folder, names, **SAVES[old])
        is_done = save_until(number)
        model = {name: value - 1 for name, value in first.items()}
        try:
            pretrained.load(model, folder, names)
        except (FileNotFoundError, CheckpointDamageError):
            outcomes.append(None)
        else:
            (value,) = {float(x) for array in model.values() for x in array}
            outcomes.append(value)
        if is_done:
            break

    assert is_done
    assert outcomes[0] == 0
    assert outcomes[-1] == 1
    # Only files with the names of the earlier ones need a moment without a model.
    has_gap = old == new != "whole"
    assert (None in outcomes) == has_gap
    left = {path.name for path in folder.iterdir()}
    count = {"whole": 1, "two": 3, "three": 4}[new]
    assert len(left) == count


def test_two_programs_may_save_files_in_one_folder(tmp_path, monkeypatch):
    names = pretrained.Names([("w", "w")])
    sync = os.fsync

    def save_another(descriptor):
        monkeypatch.setattr("os.fsync", sync)
        pretrained.save({"w": jnp.zeros(2)}, tmp_path / "model_b.safetensors", names)
        sync(descriptor)

    monkeypatch.setattr("os.fsync", save_another)
    pretrained.save({"w": jnp.ones(2)}, tmp_path / "model_a.safetensors", names)
    for name, value in (("a", 1), ("b", 0)):
        saved = load_file(tmp_path / f"model_{name}.safetensors")
        np.testing.assert_array_equal(saved["w"], value)


def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_is_read(
    tmp_path, monkeypatch
):
    (tmp_path / "x.safetensors").mkdir()
    monkeypatch.setattr(_arrays, "read_part", None)
    names = pretrained.Names([("w", "w")])
    with pytest.raises(CheckpointError, match=r"x\.safetensors is a folder"):
        pretrained.save({"w": jnp.zeros(2)}, tmp_path / "x.safetensors", names)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (
        lambda: pretrained.load(Model(), tmp_path, NAMES),
        lambda: pretrained.save(Model(), tmp_path, NAMES),
        lambda: pretrained.list_tensors(tmp_path),
    ):
        with pytest.raises(ImportError, match=r"pip install '.\[pretrained\]'"):
            call()


@pytest.mark.parametrize(
    ("rows", "error", "parts"),
    [
        ("x", TypeError, ["`rows` is 'x'", "must be a `list` or `tuple`"]),
        ([("a",)], TypeError, ["`rows` is ('a',)", "a name in the file"]),
        ([("a", 3)], TypeError, ["3 must be a name, a tuple of names"]),
        ([("a", "b", "T")], TypeError, ["'T' must be a transform"]),
        ([("a.{0}", "b")], ValueError, ["'a.{0}'", "a word in braces"]),
        ([("a.{x", "b")], ValueError, ["'a.{x'", "a word in braces"]),
        ([(None, None)], ValueError, ["one of its sides must be a name"]),
        ([("a", "b.{n}")], ValueError, ["must have the field {n} of the model's"]),
        ([("a.*", "b")], ValueError, ["`*` may stand only next to `None`"]),
        ([(("a.{n}", "b"), "c")], ValueError, ["must have the same fields"]),
        ([("a", None, pretrained.transpose)], ValueError, ["nothing to transform"]),
        ([("a", ("b", "c"))], ValueError, ["make 1 arrays, and 2 are named. Use `pre"]),
        ([(("a", "b"), "c")], ValueError, ["2 arrays, and 1 are", "pretrained.join"]),
        (
            [(("a", "b"), "c", pretrained.split(2, axis=0))],
            ValueError,
            ["`split(2, axis=0)` takes one tensor, but gets 2"],
        ),
        (
            [("a", "c", pretrained.join((2, 3), axis=0))],
            ValueError,
            ["`join((2, 3), axis=0)` takes 2 tensors, but gets 1"],
        ),
    ],
)
def test_a_wrong_row_is_refused(rows, error, parts):
    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts))):
        pretrained.Names(rows)


def test_an_axis_that_no_tensor_has_is_a_difference(tmp_path):
    tensors = {"u": np.zeros(2, "f4"), "v": np.zeros(2, "f4")}
    names = pretrained.Names([(("u", "v"), "uv", pretrained.join(2, axis=1))])
    line = r"~ uv: u does not fit: float32 \(2,\) has no axis 1"
    with pytest.raises(CheckpointMismatchError, match=line):
        pretrained.load({"uv": jnp.zeros((2, 2))}, tensors, names)

    names = pretrained.Names([("uv", ("u", "v"), pretrained.split(2, axis=1))])
    line = r"~ u: it does not fit its row: float32 \(2,\) has no axis 1"
    with pytest.raises(CheckpointMismatchError, match=line):
        pretrained.save({"u": jnp.zeros(2), "v": jnp.zeros(2)}, tmp_path, names)


@pytest.mark.parametrize("function", [pretrained.split, pretrained.join])
def test_wrong_sizes_and_axes_are_refused(function):
    with pytest.raises(ValueError, match="`axis` is -1, but"):
        function(2, axis=-1)
    with pytest.raises(ValueError, match="`sizes` is 0, but"):
        function((2, 0), axis=0)


def test_two_rows_for_one_array_are_refused(tmp_path):
    params = {"w": jnp.zeros(2), "v": jnp.zeros(2)}
    save_file(
        {"a": np.zeros(2, "f4"), "b": np.zeros(2, "f4")}, tmp_path / "x.safetensors"
    )
    for rows in ([("a", "w"), ("b", "w")], [("a", "w"), ("a", "v")]):
        names = pretrained.Names(rows)
        with pytest.raises(ValueError, match=r"two rows for .*`pretrained\.tied`"):
            pretrained.load(params, tmp_path, names)


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([("a", "w"), ("a", "v")], "a"),
        # A row for a stack, and a row for one of its layers.
        ([("h.{layer}.a", "stack"), ("h.1.a", "w"), ("b", "v")], "h.1.a"),
        ([("a", "w"), ("b", "v"), ("a", "v", pretrained.tied)], "a"),
    ],
)
def test_two_rows_that_write_one_tensor_are_refused(tmp_path, rows, name):
    params = {"w": jnp.ones(2), "v": jnp.zeros(2), "stack": jnp.zeros((2, 2))}
    message = f"two rows for '{name}': .*Remove one of them"
    with pytest.raises(ValueError, match=message):
        pretrained.save(params, tmp_path / "new", pretrained.Names(rows))
    assert not (tmp_path / "new").exists()


MIXED = {
    "beside an array": {"w": jnp.zeros(2), "v": np.ones(2)},
    "alone": {"v": np.ones(2)},
    # As `flax.serialization` restores parameters.
    "read only": {"w": jnp.zeros(2), "v": np.frombuffer(bytes(16))},
    "in a list": {"all": [jnp.zeros(2), np.ones(2)]},
    "in a tuple": {"all": (jnp.zeros(2), np.ones(2))},
    "number": {"w": jnp.zeros(2), "v": 0.5},
}


@pytest.mark.parametrize("name", MIXED)
def test_a_value_that_is_not_an_array_of_jax_is_not_lost(tmp_path, name):
    model = MIXED[name]
    rows = [("w", "w"), ("v", "v"), ("w", "all/0"), ("v", "all/1")]
    names = pretrained.Names(rows[2:] if "all" in model else rows[:2])
    path = tmp_path / "x.safetensors"
    kind = "float" if name == "number" else "ndarray"
    message = rf"other values at 1 path of `names`.*\n  (v|all/1): {kind}\nConvert"
    with pytest.raises(TypeError, match=message):
        pretrained.save(model, path, names)
    with pytest.raises(TypeError, match=message):
        pretrained.load(model, {"w": np.zeros(2), "v": np.zeros(2)}, names)
    assert not path.exists()


def test_a_model_of_shapes_names_the_call_that_makes_arrays():
    names = pretrained.Names([("w", "kernel"), ("b", "bias")])
    module = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    shapes = jax.eval_shape(lambda: {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)})
    for model in (module, shapes):
        with pytest.raises(TypeError, match=r"(?s)2 paths.*kernel.*strategy\.make"):
            pretrained.load(model, {}, names)


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({3: np.zeros(2)}, ["the key 3", "a string"]),
        ({"w": object()}, ["'w' is of type object", "tensor.float().numpy()"]),
        ({"w": [[1], [2, 3]]}, ["'w' is of type list", "inhomogeneous"]),
    ],
)
def test_a_dictionary_of_something_else_is_refused(tensors, parts):
    names = pretrained.Names([("w", "w")])
    with pytest.raises(TypeError, match="(?s)" + ".*".join(map(re.escape, parts))):
        pretrained.load({"w": jnp.zeros(2)}, tensors, names)


def test_wrong_arguments_are_refused(tmp_path):
    model = {"w": jnp.zeros(2)}
    names = pretrained.Names([("w", "w")])
    with pytest.raises(TypeError, match=r"`names` is .*pretrained\.Names"):
        pretrained.load(model, tmp_path, [("w", "w")])
    with pytest.raises(ValueError, match=r"`dtype` is 'int8'.*dtype=.bfloat16"):
        pretrained.save(model, tmp_path, names, dtype="int8")
    with pytest.raises(ValueError, match="`max_file_bytes` is 0"):
        pretrained.save(model, tmp_path, names, max_file_bytes=0)
