"""Tests of data from TensorFlow, PyTorch and Hugging Face, where installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.data import (
    DistributedDataset,
    as_source,
    from_arrays,
    from_huggingface,
    mix,
    pack,
    select,
)
from armillary.errors import BatchSizeError, DatasetStateError
from tests.data.contract import check_source, read

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("datasets")


# tf.data


def test_tf_data_keeps_the_contract(tf, make_layout):
    def make():
        return tf.data.Dataset.range(10).map(lambda x: {"x": x}).batch(4).prefetch(1)

    check_source(make, False, make_layout(4))


def test_tf_data_gives_what_arrays_give(tf):
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(6, 1), "y": (np.arange(6),)}
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(4)
    made = as_source(dataset).make_iterator(0)
    for expected in from_arrays(arrays, batch_size=4):
        batch = next(made)
        assert jax.tree.structure(batch) == jax.tree.structure(expected)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, batch, expected)))
        assert batch["x"].dtype == np.float32
        # The array shares the memory of the tensor.
        with pytest.raises(ValueError, match="read-only"):
            batch["x"][:] = 0
    dataset = tf.data.Dataset.from_tensors(tf.ones(2, tf.bfloat16))
    assert next(as_source(dataset).make_iterator(0)).dtype == jnp.bfloat16


def test_data_without_an_end_are_known(tf, make_layout):
    data = tf.data.Dataset.range(8).batch(4)
    unknown = data.filter(lambda x: True)
    known = [(data, False, 2), (data.repeat(), True, None), (unknown, False, None)]
    for source, is_endless, num_batches in known:
        dataset = DistributedDataset(source, make_layout())
        assert dataset.is_endless == is_endless
        assert dataset.num_global_batches == num_batches


def test_elements_that_are_no_batches_of_numbers_are_named(tf):
    make = tf.data.Dataset.from_tensor_slices
    columns = {
        "ragged": tf.ragged.constant([[1], [2, 3]]),
        "sparse": tf.sparse.from_dense([[1, 0], [2, 3]]),
        "text": ["a", "b"],
    }
    message = r"\n  ragged: RaggedTensorSpec\n  sparse: SparseTensorSpec\n(?!  text)"
    with pytest.raises(TypeError, match=message):
        as_source(make(columns).batch(2))
    strategy = armillary.OneDeviceStrategy("cpu:0")
    with pytest.raises(TypeError, match="text: ndarray of dtype object"):
        next(iter(strategy.distribute_dataset(make({"text": ["a", "b"]}).batch(2))))
    with pytest.raises(BatchSizeError, match="without a batch axis"):
        next(iter(strategy.distribute_dataset(tf.data.Dataset.range(3))))


# PyTorch


def test_torch_loaders_keep_the_contract(torch, make_layout):
    numbers = torch.utils.data.TensorDataset(torch.arange(10))
    make = torch.utils.data.DataLoader
    check_source(lambda: make(numbers, batch_size=4), False, make_layout(4))


# https://github.com/meta-pytorch/data: torchdata calls what PyTorch has deprecated.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful_torch_loaders_keep_the_contract(torch, make_layout):
    module = pytest.importorskip("torchdata.stateful_dataloader")
    numbers = torch.utils.data.TensorDataset(torch.arange(10))
    check_source(
        lambda: module.StatefulDataLoader(numbers, batch_size=4), True, make_layout(4)
    )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_shuffled_torch_loaders_resume_exactly(torch):
    module = pytest.importorskip("torchdata.stateful_dataloader")

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.utils.data.TensorDataset(torch.arange(10))
        return as_source(
            module.StatefulDataLoader(
                numbers, batch_size=3, shuffle=True, generator=generator
            )
        )

    whole = make(0).make_iterator(0)
    next(whole)
    state = whole.get_state()
    again = make(1).make_iterator(0)
    again.set_state(state)
    assert read(again) == read(whole)


def test_tensors_in_any_iterable_become_arrays(torch):
    pair = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    strategy = armillary.OneDeviceStrategy("cpu:0")
    options = armillary.data.InputOptions(remainder="pad")
    (batch,) = strategy.distribute_dataset([pair], options)
    assert [leaf.shape for leaf in batch] == [(3, 2), (3,), (3,)]
    with pytest.raises(RuntimeError, match="Can't call numpy"):
        next(iter(strategy.distribute_dataset([torch.ones(2, requires_grad=True)])))


def test_torch_data_that_were_not_batched_are_copied(torch):
    buffer = torch.zeros(2)

    class Filling(torch.utils.data.IterableDataset):
        def __iter__(self):
            for value in range(3):
                buffer[:] = value
                yield {"x": buffer}

    loader = torch.utils.data.DataLoader(Filling(), batch_size=None)
    iterator = as_source(loader).make_iterator(0)
    batches = [next(iterator)["x"] for _ in range(3)]
    assert [batch.tolist() for batch in batches] == [[0, 0], [1, 1], [2, 2]]


def test_torch_tensors_of_every_kind_become_arrays(torch):
    batch = {
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "grad": torch.ones(2, requires_grad=True),
        "list": [torch.tensor([1, 2]), torch.tensor([True, False])],
    }
    loader = torch.utils.data.DataLoader([batch], collate_fn=lambda b: b[0])
    made = next(as_source(loader).make_iterator(0))
    assert made["half"].dtype == jnp.bfloat16
    assert made["half"].tolist() == [1.5, -2.0]
    assert made["grad"].tolist() == [1, 1]
    assert [leaf.dtype for leaf in made["list"]] == [np.int64, bool]


def test_torch_tensors_that_are_not_on_the_host_are_errors(torch):
    elsewhere = torch.zeros(2, device="meta"), r"Tensor.cpu\(\)"
    sparse = torch.eye(2).to_sparse(), r"Tensor.to_dense\(\)"
    for tensor, fix in (elsewhere, sparse):
        loader = torch.utils.data.DataLoader([tensor], collate_fn=lambda b: b[0])
        with pytest.raises(TypeError, match=fix):
            next(as_source(loader).make_iterator(0))


# Hugging Face


def make_rows(datasets, **columns):
    return datasets.Dataset.from_dict(columns or {"x": list(range(10))})


def test_huggingface_rows_keep_the_contract(datasets, make_layout):
    check_source(
        lambda: from_huggingface(make_rows(datasets), batch_size=4),
        True,
        make_layout(4),
    )


@pytest.mark.parametrize("form", [None, "numpy"])
def test_huggingface_streams_keep_the_contract(datasets, make_layout, form):
    def make():
        rows = make_rows(datasets).to_iterable_dataset(num_shards=2)
        return rows.with_format(form).batch(4)

    check_source(make, True, make_layout(4))


def test_huggingface_streams_resume_in_a_later_epoch(datasets):
    def make():
        rows = make_rows(datasets, x=list(range(64))).to_iterable_dataset(num_shards=8)
        return as_source(rows.batch(10))

    source = make()
    expected = read(source.make_iterator(1))
    assert expected != read(source.make_iterator(0)), "Shards come in another order."
    iterator = source.make_iterator(1)
    next(iterator)
    state = iterator.get_state()
    for again in (make(), source):
        other = again.make_iterator(1)
        other.set_state(state)
        assert read(other) == expected[1:]
        assert read(again.make_iterator(1)) == expected


@pytest.mark.parametrize("form", [None, "numpy", "torch", "pandas"])
def test_every_format_gives_arrays(datasets, form):
    if form == "torch":
        pytest.importorskip("torch")
    rows = make_rows(datasets, i=[1, 2], f=[0.5, 1.5], m=[[1, 2], [3, 4]])
    (batch,) = from_huggingface(rows.with_format(form), batch_size=2)
    assert {name: array.tolist() for name, array in batch.items()} == {
        "i": [1, 2],
        "f": [0.5, 1.5],
        "m": [[1, 2], [3, 4]],
    }


def test_columns_and_transforms_of_huggingface_are_kept(datasets):
    rows = make_rows(datasets, x=[1, 2], text=["a", "bb"])
    (batch,) = from_huggingface(rows.with_format("numpy", ["x"]), batch_size=2)
    assert list(batch) == ["x"]
    lengths = rows.with_transform(lambda batch: {"n": [len(t) for t in batch["text"]]})
    (batch,) = from_huggingface(lengths, batch_size=2)
    assert batch["n"].tolist() == [1, 2]


def test_examples_of_huggingface_are_chosen_by_text_and_packed(datasets):
    rows = make_rows(
        datasets, tokens=[[1, 2], [3], [4, 5, 6]], language=["en", "de", "en"]
    )
    english = select(rows, lambda row: row["language"] == "en")
    assert [row["tokens"] for row in english] == [[1, 2], [4, 5, 6]]
    tokens = rows.select_columns(["tokens"])
    chosen = select(tokens, lambda text: text == "en", metadata=rows["language"])
    (row,) = pack(chosen, row_length=6)
    assert row["tokens"].tolist() == [1, 2, 4, 5, 6, 0]
    assert row["segment_ids"].tolist() == [1, 1, 2, 2, 2, 0]


def test_a_short_list_of_huggingface_is_never_repeated_in_a_mixture(datasets):
    rows = make_rows(datasets, x=[[1, 1, 1], [2, 2, 2], [3], [4]])
    sources = {"short": from_huggingface(rows, batch_size=1)}
    batches = mix(sources, batch_size=2).make_iterator(0)
    assert next(batches)["x"].tolist() == [[1, 1, 1], [2, 2, 2]]
    with pytest.raises(TypeError, match=r"the numbers 2 to 3 of `sources\['short'\]`"):
        next(batches)


def test_huggingface_streams_shuffle_again_each_epoch(datasets):
    rows = make_rows(datasets, x=list(range(64))).to_iterable_dataset(num_shards=8)
    source = as_source(rows.shuffle(seed=0, buffer_size=8).batch(64))
    epochs = [read(source.make_iterator(epoch))[0] for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[1]) == list(range(64))


def test_a_shuffle_buffer_has_no_position(datasets, make_layout):
    rows = make_rows(datasets).to_iterable_dataset()
    mixed = datasets.interleave_datasets([rows, rows.shuffle(seed=0, buffer_size=3)])
    dataset = DistributedDataset(mixed.batch(4), make_layout())
    with pytest.raises(DatasetStateError, match=r"with a shuffle buffer\) cannot be"):
        dataset.check_repositionable()


def test_huggingface_positions_know_their_order(datasets):
    strategy = armillary.distribute.DefaultStrategy()

    def make(values=range(10), transform=None, **options):
        rows = make_rows(datasets, x=list(values))
        rows = rows if transform is None else rows.with_transform(transform)
        return strategy.distribute_dataset(
            from_huggingface(rows, batch_size=4, **options)
        )

    saved = make()
    next(iter(saved))
    state = saved.get_state()
    # A transform may draw numbers, so rows are compared before it.
    make(transform=lambda batch: {"x": [2 * x for x in batch["x"]]}).set_state(state)
    for other, name in (
        (make(shuffle_seed=1), "shuffle_seed"),
        (make(range(1, 11)), "r"),
    ):
        with pytest.raises(DatasetStateError, match=rf"\n  {name}.* in the program\n"):
            other.set_state(state)


def test_columns_that_are_no_numbers_are_named(datasets, make_layout):
    rows = make_rows(datasets, text=["a", "b"], ragged=[[1], [2, 3]], x=[1, 2])
    with pytest.raises(TypeError, match="  text: ndarray of dtype <U1\n"):
        from_huggingface(rows, batch_size=2)
    stream = rows.to_iterable_dataset()
    message = r"(?s)Batch 0 of the source \(Hugging.*  ragged/0/0: int 1\n.*  text: "
    with pytest.raises(TypeError, match=message):
        next(iter(DistributedDataset(stream.batch(2), make_layout())))
    with pytest.raises(BatchSizeError, match=r"(?s)batch axis.*  x\n"):
        next(iter(DistributedDataset(stream.select_columns("x"), make_layout())))


def test_other_datasets_of_huggingface_are_errors(datasets):
    rows = make_rows(datasets)
    for other in (rows, datasets.DatasetDict(train=rows)):
        with pytest.raises(TypeError, match=r"Use `armillary.data.from_huggingface\("):
            as_source(other)
    with pytest.raises(TypeError, match=r"type IterableDataset.*`dataset.batch\("):
        from_huggingface(rows.to_iterable_dataset(), batch_size=1)


# Together with Keras, whose `fit` divides the batches itself.


# https://github.com/keras-team/keras: it says so of each `tf.data.Dataset`.
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_keras_fits_tf_data_on_the_devices_of_a_strategy(tf, keras):
    x = np.linspace(-1, 1, 42, dtype=np.float32).reshape(14, 3)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)

    def fit(strategy, data):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        losses = model.fit(data, epochs=2, verbose=0).history["loss"]
        return [*losses, model.evaluate(data, verbose=0)]

    expected = fit(armillary.OneDeviceStrategy("cpu:0"), data)
    strategy = armillary.MirroredStrategy(jax.devices("cpu")[:4])
    for given in (data, strategy.distribute_dataset(data)):
        np.testing.assert_allclose(fit(strategy, given), expected, rtol=1e-5)
