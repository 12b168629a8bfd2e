"""Tests that files of safetensors become the arrays of a model, and the same files."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import armillary
from armillary import pretrained
from armillary.errors import (
    CheckpointMismatchError,
)
from armillary.pretrained import _files
from tests.pretrained.models import (
    NAMES,
    SIZE,
    Model,
    check_model,
    make_tensors,
    read_model,
)


def test_a_file_becomes_a_model_and_the_model_becomes_the_same_file(tmp_path):
    tensors = make_tensors()
    extra = {"rope.inv_freq": np.ones(2, np.float32)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    model = Model()
    key = model.blocks.dropout.rngs.key[...]
    report = pretrained.load(model, tmp_path, NAMES)
    check_model(model, tensors)
    assert set(report.restored) == set(read_model(model))
    assert report.kept == ()
    assert report.unused == ("rope.inv_freq",)
    assert model.blocks.dropout.rngs.key[...] is key

    (path,) = pretrained.save(model, tmp_path / "new", NAMES)
    assert path == str(tmp_path / "new" / "model.safetensors")
    saved = load_file(path)
    assert saved.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_large_model_becomes_several_files_with_an_index(tmp_path):
    tensors = make_tensors()
    save_file(tensors, tmp_path / "one.safetensors")
    model = Model()
    pretrained.load(model, tmp_path / "one.safetensors", NAMES)
    folder = tmp_path / "parts"
    # One tensor is larger than a file, and several go into one file.
    paths = pretrained.save(model, folder, NAMES, max_file_bytes=120)
    count = len(paths)
    names = {f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)}
    assert {path.name for path in folder.iterdir()} == {*names, _files.INDEX}
    sizes = [sum(x.nbytes for x in load_file(path).values()) for path in paths]
    assert all(
        size <= 120 or len(load_file(path)) == 1
        for size, path in zip(sizes, paths, strict=True)
    )
    index = json.loads((folder / _files.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(folder / file)[name], tensors[name])

    for place in (folder, folder / _files.INDEX):
        other = Model()
        pretrained.load(other, place, NAMES)
        check_model(other, tensors)
    listed = pretrained.list_tensors(folder)
    assert list(listed) == sorted(tensors)
    assert listed["wte.weight"] == jax.ShapeDtypeStruct((6, SIZE), np.float32)

    # A save of another size leaves nothing of the earlier one, and no other file.
    (folder / "config.json").write_text("{}")
    pretrained.save(model, folder, NAMES)
    left = {path.name for path in folder.iterdir()}
    assert left == {"model.safetensors", "config.json"}


# The bits of 1, 2 and 0.5 in each dtype, from their definitions.
BITS = {
    "float8_e4m3fn": "384030",
    "float8_e5m2": "3c4038",
    "float8_e8m0fnu": "7f807e",
    "float8_e4m3fnuz": "404838",
    "float8_e5m2fnuz": "40443c",
    "complex64": "0000803f000000000000004000000000" + "0000003f00000000",
}


@pytest.mark.parametrize("dtype", BITS)
def test_dtypes_that_safetensors_cannot_read_for_numpy(tmp_path, dtype):
    values = np.array([1.0, 2.0, 0.5], dtype)
    names = pretrained.Names([("mask", "mask"), ("w", "w")])
    params = {"mask": jnp.array([True]), "w": jnp.asarray(values)}
    path = tmp_path / "x.safetensors"
    pretrained.save(params, path, names)
    is_first = values.dtype.itemsize > 1
    bits = bytes.fromhex(BITS[dtype])
    expected = bits + b"\1" if is_first else b"\1" + bits
    assert path.read_bytes().endswith(expected)

    params["w"] = jnp.zeros(3, dtype)
    pretrained.load(params, path, names)
    assert params["w"].dtype == values.dtype
    assert np.asarray(params["w"]).tobytes() == bits


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("is_file", [True, False])
def test_other_values_have_another_digest(tmp_path, place, is_file):
    digests = set()
    for value in (1, 2):
        tensor = np.zeros((30, 40), np.float32)
        tensor.flat[place] = value
        tensors = {"w": tensor, "empty": np.zeros(0, np.float32)}
        if is_file:
            save_file(tensors, tmp_path / "x.safetensors")
            tensors = tmp_path / "x.safetensors"
        with _files.open_tensors(tensors) as opened:
            digests.add(opened.digest)
    assert len(digests) == 2


def test_the_index_of_the_model_counts_in_a_folder_with_several(tmp_path):
    for name, value in (("model", 1), ("model.fp16", 2)):
        file = f"{name}-00001-of-00001.safetensors"
        save_file({"w": np.full(2, value, "f4")}, tmp_path / file)
        index = json.dumps({"weight_map": {"w": file}})
        (tmp_path / f"{name}.safetensors.index.json").write_text(index)
    params = {"w": jnp.zeros(2)}
    names = pretrained.Names([("w", "w")])
    pretrained.load(params, tmp_path, names)
    np.testing.assert_array_equal(params["w"], 1)
    pretrained.load(params, tmp_path / "model.fp16.safetensors.index.json", names)
    np.testing.assert_array_equal(params["w"], 2)


@pytest.mark.parametrize("most", [1, 10**6])
def test_each_tensor_begins_at_a_multiple_of_its_item_size(tmp_path, most):
    # Without an order, float32 would begin after three bytes.
    dtypes = ["bool", "float32", "int8", "bfloat16", "uint16", "int32"]
    params = {f"{i}": jnp.ones(3, dtype) for i, dtype in enumerate(dtypes)}
    names = pretrained.Names([(name, name) for name in params])
    for path in pretrained.save(params, tmp_path, names, max_file_bytes=most):
        data = Path(path).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        assert start % 8 == 0
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, _ = entry["data_offsets"]
                assert begin % params[name].dtype.itemsize == 0
    again = {name: jnp.zeros_like(value) for name, value in params.items()}
    pretrained.load(again, tmp_path, names)
    for name, value in params.items():
        assert again[name].dtype == value.dtype
        np.testing.assert_array_equal(again[name], value)


def test_arrays_keep_their_shardings_and_read_only_their_parts(tmp_path, read_bytes):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(16, 8)).astype(np.float32)
    save_file({"a.weight": kernel, "a.bias": kernel[0]}, tmp_path / "x.safetensors")
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "copy"))
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    params = {
        "kernel": jax.device_put(jnp.zeros((8, 16)), sharding),
        "bias": jax.device_put(jnp.zeros(8), NamedSharding(mesh, PartitionSpec())),
    }
    names = pretrained.Names(
        [("a.weight", "kernel", pretrained.transpose), ("a.bias", "bias")]
    )
    pretrained.load(params, tmp_path, names)
    assert params["kernel"].sharding == sharding
    assert params["kernel"].committed
    np.testing.assert_array_equal(params["kernel"], kernel.T)
    # Half of the kernel, twice, and one bias: copies on other devices cost nothing.
    assert sorted(read_bytes) == [32, 256, 256]


def test_arrays_in_host_memory_stay_there(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {f"{i}.weight": rng.normal(size=(4, 2)).astype("f4") for i in range(2)}
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"), memory_kind="pinned_host")
    params = {"w": jax.device_put(jnp.zeros((2, 4, 2)), sharding)}
    names = pretrained.Names([("{i}.weight", "w")])
    # Other readers give arrays instead of a path.
    report = pretrained.load(params, tensors, names)
    assert report.path == "a dictionary of arrays"
    assert params["w"].sharding == sharding
    (path,) = pretrained.save(params, tmp_path / "x.safetensors", names)
    for name, value in load_file(path).items():
        np.testing.assert_array_equal(value, tensors[name])


@pytest.mark.parametrize("kind", ["uncommitted", "committed", "divided", "numpy"])
def test_loaded_arrays_do_not_share_the_memory_of_a_dictionary(kind):
    # JAX on a CPU uses memory of NumPy without a copy if it begins at such an address.
    memory = np.zeros(64 * 64 * 4 + 64, np.uint8)
    first = -memory.ctypes.data % 64
    tensor = memory[first:][: 64 * 64 * 4].view(np.float32).reshape(64, 64)
    tensor[...] = 1
    value = jnp.zeros((64, 64))
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    if kind == "divided":
        value = jax.device_put(value, NamedSharding(mesh, PartitionSpec("x")))
    elif kind == "committed":
        value = jax.device_put(value, jax.devices()[0])
    elif kind == "numpy":
        value = np.zeros((64, 64), np.float32)
    model = nnx.Dict(w=nnx.Param(value))
    pretrained.load(model, {"w": tensor}, pretrained.Names([("w", "w")]))
    tensor[...] = 5
    np.testing.assert_array_equal(model.w.get_value(), 1)


def test_dtypes_are_cast_on_request_alone(tmp_path):
    value = np.arange(6).reshape(2, 3).astype(jnp.bfloat16)
    path = tmp_path / "x.safetensors"
    save_file({"w": value}, path)
    names = pretrained.Names([("w", "w")])
    params = {"w": jnp.zeros((2, 3))}
    with pytest.raises(CheckpointMismatchError) as caught:
        pretrained.load(params, path, names)
    line = "~ w: bfloat16 (2, 3) in the file, float32 (2, 3) in the model"
    assert line in str(caught.value)
    assert "`cast=True` casts floats" in str(caught.value)
    pretrained.load(params, path, names, cast=True)
    assert params["w"].dtype == jnp.float32
    np.testing.assert_array_equal(params["w"], value.astype(np.float32))

    pretrained.save(params, path, names, dtype="bfloat16")
    np.testing.assert_array_equal(load_file(path)["w"], value, strict=True)
    params = {"w": jnp.zeros((2, 3), jnp.int32)}
    with pytest.raises(CheckpointMismatchError, match="int32"):
        pretrained.load(params, path, names, cast=True)


def test_experts_of_layers_become_two_axes_and_a_fused_tensor_is_split(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        f"layers.{layer}.experts.{expert}.w": rng.normal(size=(2, 3)).astype("f4")
        for layer in range(2)
        for expert in range(11)
    }
    tensors["qkv"] = rng.normal(size=(5, 8)).astype("f4")
    save_file(tensors, tmp_path / "x.safetensors")
    names = pretrained.Names(
        [
            (
                "layers.{layer}.experts.{expert}.w",
                "experts",
                pretrained.transpose,
            ),
            ("qkv", ("query", "key", "value"), pretrained.split((4, 2, 2), axis=1)),
        ]
    )
    params = {
        "experts": jnp.zeros((2, 11, 3, 2)),
        "query": jnp.zeros((5, 4)),
        "key": jnp.zeros((5, 2)),
        "value": jnp.zeros((5, 2)),
    }
    pretrained.load(params, tmp_path, names)
    expected = tensors["layers.1.experts.10.w"].T
    np.testing.assert_array_equal(params["experts"][1, 10], expected)
    np.testing.assert_array_equal(params["key"], tensors["qkv"][:, 4:6])
    pretrained.save(params, tmp_path / "again.safetensors", names)
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(again[name], value)


def test_a_part_that_may_differ_is_loaded_whole_or_left(tmp_path):
    tensors = make_tensors()
    tensors["k.weight"] = np.zeros((3, SIZE), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    model = Model()
    key = np.asarray(model.key.kernel[...])
    report = pretrained.load(model, tmp_path, NAMES, may_differ=["key", "query"])
    assert report.kept == ("key/kernel",)
    assert report.unused == ("k.weight",)
    assert report.differences == (
        "~ key/kernel: float32 (4, 3) in the file, float32 (4, 2) in the model",
    )
    np.testing.assert_array_equal(model.key.kernel[...], key)
    tensors["k.weight"] = key.T
    check_model(model, tensors)


def test_a_tied_tensor_may_be_there_if_it_is_equal(tmp_path):
    tensors = make_tensors()
    path = tmp_path / "model.safetensors"
    save_file({**tensors, "lm_head.weight": tensors["wte.weight"]}, path)
    model = Model()
    pretrained.load(model, path, NAMES)
    check_model(model, tensors)
    save_file({**tensors, "lm_head.weight": -tensors["wte.weight"]}, path)
    with pytest.raises(CheckpointMismatchError, match=r"'lm_head.weight' as tied to"):
        pretrained.load(model, path, NAMES)
    pretrained.save(model, path, NAMES)
    assert "lm_head.weight" not in load_file(path)


def test_a_tied_tensor_with_nothing_to_be_equal_to_is_a_difference():
    tensors = {"wte": np.ones((2, 3), "f4"), "head": np.full((2, 3), 7, "f4")}
    params = {"wte": jnp.zeros((2, 3))}
    names = pretrained.Names([("wte", "wte"), ("head", "wpe", pretrained.tied)])
    with pytest.raises(CheckpointMismatchError) as caught:
        pretrained.load(params, tensors, names)
    line = "- head: float32 (2, 3)  tied to wpe, which no other row loads"
    assert line in str(caught.value)
    np.testing.assert_array_equal(params["wte"], 0)
    # The file need not have the tensor.
    del tensors["head"]
    pretrained.load(params, tensors, names)
    np.testing.assert_array_equal(params["wte"], 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_numpy", [True, False])
def test_tied_values_are_compared_for_every_kind_of_array(dtype, has_numpy):
    value = np.array([1, np.nan], jnp.dtype(dtype))
    zeros = np.zeros if has_numpy else jnp.zeros
    model = nnx.Dict(wte=nnx.Param(zeros(2, jnp.dtype(dtype))))
    names = pretrained.Names([("wte", "wte"), ("head", "wte", pretrained.tied)])
    pretrained.load(model, {"wte": value, "head": value.copy()}, names)
    assert np.asarray(model.wte.get_value()).tobytes() == value.tobytes()
    other = np.array([2, np.nan], value.dtype)
    with pytest.raises(CheckpointMismatchError, match="'head' as tied to `wte`, but"):
        pretrained.load(model, {"wte": value, "head": other}, names)


def test_models_of_other_libraries(tmp_path, keras):
    equinox = pytest.importorskip("equinox")
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    bias = np.arange(3, dtype=np.float32)
    path = tmp_path / "x.safetensors"
    save_file({"fc.weight": value, "fc.bias": bias}, path)

    holder = {"net": equinox.nn.Linear(4, 3, key=jax.random.key(0))}
    names = pretrained.Names([("fc.weight", "net/weight"), ("fc.bias", "net/bias")])
    pretrained.load(holder, path, names)
    np.testing.assert_array_equal(holder["net"].weight, value)
    with pytest.raises(TypeError, match=r"cannot be assigned.*\{'model': model\}"):
        pretrained.load(holder["net"], path, names)

    nested = {"params": {"fc": {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}}}
    inner = nested["params"]["fc"]
    names = pretrained.Names(
        [
            ("fc.weight", "params/fc/kernel", pretrained.transpose),
            ("fc.bias", "params/fc/bias"),
        ]
    )
    pretrained.load(nested, path, names)
    np.testing.assert_array_equal(inner["kernel"], value.T)

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    names = pretrained.Names(
        [
            ("fc.weight", "layers/1/kernel", pretrained.transpose),
            ("fc.bias", "layers/1/bias"),
        ]
    )
    pretrained.load(model, path, names)
    np.testing.assert_array_equal(model.layers[0].kernel.value, value.T)
    pretrained.save(model, tmp_path / "k.safetensors", names)
    assert (tmp_path / "k.safetensors").read_bytes()[-60:] == (
        np.concatenate([value.ravel(), bias]).tobytes()
    )[-60:]


def test_optimizers_metrics_and_counters_are_left_out(tmp_path, keras):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    names = pretrained.Names([("w", "layers/1/kernel"), ("b", "layers/1/bias")])
    (path,) = pretrained.save(model, tmp_path / "k.safetensors", names)
    assert load_file(path).keys() == {"w", "b"}

    trainer = nnx.Dict(model=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    adam = optax.adam(0.1)
    trainer.optimizer = nnx.Optimizer(trainer.model, adam, wrt=nnx.Param)
    trainer.accuracy = nnx.metrics.Accuracy()
    names = pretrained.Names([("w", "model/kernel"), ("b", "model/bias")])
    pretrained.save(trainer, path, names)
    params = {"w": jnp.ones(2)}
    state = {"params": params, "moments": adam.init(params)}
    pretrained.save(state, path, pretrained.Names([("w", "params/w")]))
    assert load_file(path).keys() == {"w"}


def test_a_model_under_a_strategy_is_loaded_into_its_parts(tmp_path, read_bytes):
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    strategy = armillary.ShardedStrategy(
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"blocks/up/kernel": PartitionSpec(None, "fsdp", "tensor")},
    )
    model = strategy.make(Model)
    before = model.blocks.up.kernel[...].sharding
    assert len(before.device_set) == 8
    assert not before.is_fully_replicated
    pretrained.load(model, tmp_path, NAMES)
    # Each part of a kernel is on two devices, and is read once.
    assert sum(read_bytes) == sum(tensor.nbytes for tensor in tensors.values())
    assert model.blocks.up.kernel[...].sharding == before
    check_model(model, tensors)
    (path,) = pretrained.save(model, tmp_path / "new", NAMES)
    for name, value in load_file(path).items():
        np.testing.assert_array_equal(value, tensors[name])
