"""Data sets of Hugging Face's `datasets` as sources.

A `Dataset` can be read by number: `from_huggingface` gives it the order and the
positions of arrays. An `IterableDataset` has its own order, and gives its batches as
they are. Nothing here imports `datasets`.

Grain datasets and loaders as sources.

A `MapDataset` must be batched (`dataset.batch(size)`). Every pass gives what the
dataset gives: an order that changes with the epoch is made in Grain, with `shuffle` and
`repeat`.

Nothing here imports Grain: an object can only be one of its classes if the program has
imported it already.

`tf.data.Dataset` as a source.

It has no positions: TensorFlow saves an iterator as files, with all that its buffers
hold, and that after each batch. Nothing here imports TensorFlow.

`DataLoader` of PyTorch as a source.

`StatefulDataLoader` of torchdata is one, and can be repositioned. Tensors become NumPy
arrays that share their memory. Nothing here imports PyTorch.
"""

import io
import sys
from typing import Any

import jax
import numpy as np

from armillary._checks import list_lines
from armillary.data.sources._arrays import IndexedDataset, fingerprint
from armillary.data.sources._iterables import (
    IterableSource,
    StatefulSource,
    copy_batch,
    has_state_dict,
)
from armillary.typing import Batch

_KINDS = ("MapDataset", "IterDataset", "DataLoader")


def as_grain_source(source: Any) -> IterableSource | None:
    """Returns a source if `source` belongs to Grain, or None."""
    grain = sys.modules.get("grain")
    for kind in _KINDS:
        if grain is not None and isinstance(source, getattr(grain, kind)):
            # Each batch of Grain is a new one.
            name = f"grain.{kind}"
            made = IterableSource(lambda: iter(source), name, copies=False)
            if kind != "DataLoader":  # Its positions have it, and Grain compares.
                made.order_of_examples = _find_order(source, grain)
            return made
    return None


def _find_order(dataset: Any, grain: Any) -> dict[str, list[int]]:
    """Returns what the meaning of a position depends on, which Grain does not save.

    A `MapDataset` counts what it gives, so batches of another size are other places.
    """
    order: dict[str, list[int]] = {}
    nodes = [dataset]
    for node in nodes:
        parents = getattr(node, "parents", ())
        nodes.extend(parents)
        is_map = isinstance(node, grain.MapDataset)
        found = {
            "shuffle seed": "Shuffle" in type(node).__name__ and node._seed,
            "batch size": is_map and getattr(node, "_batch_size", False),
            "examples": is_map and not parents and len(node),
        }
        for name, value in found.items():
            if value is not False:
                order.setdefault(name, []).append(value)
    return order


_FIXES = {
    "RaggedTensorSpec": "ragged; pad it with `padded_batch` or `to_tensor`",
    "SparseTensorSpec": "sparse; use `tf.sparse.to_dense`",
    "string": "strings; decode or remove them",
}


def as_tf_data_source(source: Any) -> IterableSource | None:
    """Returns a source if `source` is a `tf.data.Dataset`, or None."""
    data = getattr(sys.modules.get("tensorflow"), "data", None)
    if data is None or not isinstance(source, data.Dataset):
        return None
    _check_elements(source.element_spec)
    # Its arrays share the memory of tensors, which nobody writes to.
    made = IterableSource(source.as_numpy_iterator, "tf.data.Dataset", copies=False)
    count = int(source.cardinality())
    made.is_endless = count == data.INFINITE_CARDINALITY
    made.num_batches = count if count >= 0 else None
    return made


def _check_elements(spec: Any) -> None:
    wrong = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        problem = _find_tf_data_problem(leaf)
        if problem is not None:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            wrong.append(f"{name or '(root)'}: {problem}")
    if wrong:
        raise TypeError(
            "The `tf.data.Dataset` gives elements that are no batches of numbers:\n"
            f"{list_lines(wrong)}\nChange them in the data set, with `map` or `batch`."
        )


def _find_tf_data_problem(spec: Any) -> str | None:
    kind = type(spec).__name__
    dtype = getattr(getattr(spec, "dtype", None), "name", "")
    if kind in _FIXES or dtype in _FIXES:
        return _FIXES.get(kind) or _FIXES[dtype]
    if kind == "NoneTensorSpec":
        return None  # JAX leaves it out, too.
    if kind != "TensorSpec":
        return f"{kind}; use tensors"
    if spec.shape.rank == 0:
        return "one value without a batch axis; use `dataset.batch(batch_size)`"
    return None


def as_torch_source(source: Any) -> IterableSource | StatefulSource | None:
    """Returns a source if `source` is a `DataLoader` of PyTorch, or None."""
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(source, data.DataLoader):
        return None
    name = f"torch {type(source).__name__}"
    # Without a batch size, a loader gives what the data set gives, perhaps a buffer.
    copies = source.batch_size is None and source.batch_sampler is None
    if has_state_dict(source):
        return StatefulSource(
            source,
            name,
            (lambda batch: copy_batch(as_numpy(batch))) if copies else as_numpy,
            pack=_pack,
            unpack=_unpack,
        )
    return IterableSource(lambda: map(as_numpy, source), name, copies=copies)


def as_numpy(batch: Any) -> Batch:
    """Returns a batch with NumPy arrays in place of tensors."""
    torch: Any = sys.modules["torch"]

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.device.type != "cpu" or leaf.layout != torch.strided:
            raise TypeError(
                f"A batch of the `DataLoader` has a tensor on {leaf.device} "
                f"({leaf.layout}), but data must be dense and in the memory of the "
                "host. Return `tensor.cpu()` (`tensor.to_dense()`) from the data set "
                "or its `collate_fn`; the strategy moves batches to its devices."
            )
        leaf = leaf.detach().resolve_conj().resolve_neg()
        if leaf.dtype == torch.bfloat16:
            return leaf.view(torch.int16).numpy().view(jax.numpy.bfloat16)
        return leaf.numpy()

    return jax.tree.map(convert, batch)


def _pack(state: Any) -> bytes:
    """Returns a state as bytes, since it holds tensors."""
    torch: Any = sys.modules["torch"]

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpack(state: bytes) -> Any:
    torch: Any = sys.modules["torch"]

    # Nothing but tensors and plain values: a checkpoint may come from anywhere.
    return torch.load(io.BytesIO(state), weights_only=True)


_MOST_READ = 16
"""How many examples a fingerprint reads."""


def from_huggingface(
    dataset: Any,
    *,
    batch_size: int,
    shuffle_seed: int | None = None,
    repeat: bool = False,
    drop_remainder: bool = False,
) -> "HuggingFaceDataset":
    """Returns a data set of the examples of a `datasets.Dataset`, in batches.

    A batch is a dictionary of NumPy arrays, one for each column. Numbers have the
    dtypes of `dataset.with_format("numpy")`. A transform (`with_transform`) is kept::

        dataset = datasets.load_dataset("mnist", split="train")
        data = armillary.data.from_huggingface(
            dataset, batch_size=64, shuffle_seed=0, repeat=True
        )

    Args:
        dataset: Its columns, or what its transform makes of them, hold numbers:
            `dataset.select_columns([...])` leaves others out. Lists have one length.
        batch_size: As in `from_arrays`, like all that follow.
        shuffle_seed: Seed of the order.
        repeat: Whether the data set never ends.
        drop_remainder: Whether to leave out a last batch that is not full.

    Returns:
        A data set. Each pass over it is the next epoch. Positions count examples, so
        that one can be restored with another batch size.

    Raises:
        TypeError: If `dataset` is no `datasets.Dataset`, or columns hold something else
            than numbers.
        ValueError: If there is no example, or another argument is wrong.
        BatchSizeError: If `drop_remainder` leaves no batch.
    """
    return HuggingFaceDataset(
        dataset,
        batch_size=batch_size,
        shuffle_seed=shuffle_seed,
        repeat=repeat,
        drop_remainder=drop_remainder,
    )


class HuggingFaceDataset(IndexedDataset):
    """Examples in batches; made by `from_huggingface`, which documents it."""

    name = "Hugging Face Dataset"

    def __init__(self, dataset: Any, **options: Any) -> None:
        if not _is_kind(dataset, "Dataset"):
            raise TypeError(_describe_other(dataset))
        if not len(dataset):
            raise ValueError(
                "`dataset` has 0 examples, but a data set needs at least one. Pass one "
                "with rows."
            )
        super().__init__(len(dataset), **options)
        kept = dataset.format["type"] == "custom"
        self._dataset = dataset if kept else _with_numpy(dataset)
        # What no device can hold shows here, and not in the middle of a program.
        self.read_rows(np.zeros(1, np.int64))

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns these examples.

        Raises:
            TypeError: If columns hold something else than numbers.
        """
        return as_arrays(self._dataset[rows])

    def fingerprints(self) -> dict[str, str]:
        """Returns a checksum of some examples as they are stored: no transform runs."""
        some = self._dataset.with_format("arrow")[self.spaced_rows(_MOST_READ)]
        return {"rows": fingerprint(repr(some.to_pylist()).encode())}


def as_huggingface_source(source: Any) -> StatefulSource | None:
    """Returns a source if `source` is an `IterableDataset`, or None.

    Raises:
        TypeError: If it is a `Dataset`, whose elements are examples.
    """
    if _is_kind(source, "Dataset") or _is_kind(source, "DatasetDict"):
        raise TypeError(
            f"The data set is a `datasets.{type(source).__name__}`, but it must give "
            "batches. Use `armillary.data.from_huggingface(dataset, batch_size=...)` "
            "with one split."
        )
    if not _is_kind(source, "IterableDataset"):
        return None
    name, has_buffer = "Hugging Face IterableDataset", _has_buffer(source._ex_iterable)
    start = source.state_dict()

    def begin(epoch: int) -> None:
        source.set_epoch(epoch)
        source.load_state_dict(start)  # Not the position of an earlier pass.

    return StatefulSource(
        source,
        f"{name} with a shuffle buffer" if has_buffer else name,
        as_arrays,
        begin=begin,
        is_repositionable=not has_buffer,
    )


def as_arrays(batch: Any) -> dict[str, np.ndarray]:
    """Returns a batch with an array for each column.

    Raises:
        TypeError: If a column holds no numbers, or lists of several lengths.
    """
    arrays = {name: _as_array(column) for name, column in batch.items()}
    wrong = {
        name: _find_huggingface_problem(array, batch[name])
        for name, array in arrays.items()
        if array.dtype.kind in "OUSMm" or not array.ndim
    }
    if wrong:
        lines = [f"{name}: {problem}" for name, problem in wrong.items()]
        raise TypeError(
            "The data set of Hugging Face has columns that are no arrays of numbers:\n"
            f"{list_lines(lines)}\n"
            "Change them with `dataset.map`, or leave them out: "
            f"`dataset.remove_columns({list(wrong)})`."
        )
    return arrays


def _as_array(column: Any) -> np.ndarray:
    try:
        return np.asarray(column)
    except ValueError:  # Lists of several lengths.
        return np.asarray([None])


def _find_huggingface_problem(array: np.ndarray, column: Any) -> str:
    if not array.ndim:
        return "one value without a batch axis; use `dataset.batch(batch_size)`"
    if array.dtype.kind in "US" or isinstance(column[0], str | bytes):
        return "strings; tokenize or remove them"
    if array.dtype.kind in "Mm":
        return "times; make numbers of them"
    if isinstance(column[0], list | np.ndarray):
        return "lists of several lengths; pad them to one length"
    return f"objects such as {column[0]!r:.40}"


def _with_numpy(dataset: Any) -> Any:
    format = dataset.format
    return dataset.with_format(
        "numpy",
        columns=format["columns"],
        output_all_columns=format["output_all_columns"],
    )


def _is_kind(value: Any, kind: str) -> bool:
    """Returns whether `value` is of a class of `datasets`."""
    found = getattr(sys.modules.get("datasets"), kind, None)
    return found is not None and isinstance(value, found)


def _describe_other(dataset: Any) -> str:
    if _is_kind(dataset, "IterableDataset"):
        return (
            "`dataset` is an `IterableDataset`, whose examples have no numbers. Use it "
            "as it is, with batches: `dataset.batch(batch_size)`."
        )
    return (
        f"`dataset` is of type {type(dataset).__name__}, but it must be a "
        "`datasets.Dataset`. Pass one split, such as `dataset['train']`."
    )


def _has_buffer(examples: Any) -> bool:
    """Returns whether examples come from a buffer, which a position does not hold."""
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(examples, "ex_iterable", None)]
    inner += getattr(examples, "ex_iterables", [])
    return any(_has_buffer(each) for each in inner if each is not None)
