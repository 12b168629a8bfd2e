"""Turns datasets of all kinds into a `Source`; only this file looks at their types.

It imports none of the libraries. If an object is of one of their classes, the program
has already imported the library.
"""

import functools
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from armillary._checks import find_misfit, list_lines
from armillary.data.sources._arrays import IndexedDataset, fingerprint
from armillary.data.sources._batch import (
    check_batch,
    is_nest_of_arrays,
    show_path,
)
from armillary.data.sources._grain import from_grain
from armillary.data.sources._source import (
    IterableSource,
    LoaderIterator,
    Source,
    from_iterator,
    gives_single_examples,
    has_methods,
    is_kind,
)
from armillary.typing import Batch

_STATE_DICT = ("__iter__", "state_dict", "load_state_dict")
"""The methods of loaders that keep a position themselves."""
_MAX_READ = 16
"""The number of examples of a `datasets.Dataset` that a fingerprint reads."""


def as_source(source: Any) -> Source:
    """Returns `source` as a `Source`.

    Args:
        source: The result of `from_arrays` or a similar function; a `grain.MapDataset`
            (batched), `grain.IterDataset` or `grain.DataLoader`; a `tf.data.Dataset`
            (batched); a PyTorch `DataLoader`; a Hugging Face `IterableDataset`
            (batched); an iterable of batches, such as a list; a function without
            arguments that returns an iterator, such as a generator function; an
            iterator, for one pass; or a `Source`.

    Raises:
        TypeError: If it is none of these.
    """
    if isinstance(source, Source):
        return source
    for library, kind, make in (
        ("grain", "MapDataset", from_grain),
        ("grain", "IterDataset", from_grain),
        ("grain", "DataLoader", from_grain),
        ("tensorflow", "data.Dataset", _from_tf_data),
        ("torch", "utils.data.DataLoader", _from_torch),
        ("datasets", "Dataset", _refuse_examples),
        ("datasets", "DatasetDict", _refuse_examples),
        ("datasets", "IterableDataset", _from_huggingface_stream),
    ):
        if is_kind(source, library, kind):
            return make(source, kind)
    if is_nest_of_arrays(source):
        raise TypeError(
            f"The dataset is a {type(source).__name__} of arrays, but it must give "
            "batches. Use `armillary.data.from_arrays(arrays, batch_size=...)`."
        )
    if hasattr(source, "open_reader"):
        raise TypeError(
            "The dataset is already a distributed dataset. Pass the dataset that it "
            "was made from, or use it directly."
        )
    if isinstance(source, Iterator):
        return from_iterator(source)
    name = f"iterable {type(source).__name__}"
    if has_methods(source, *_STATE_DICT):
        return IterableSource(
            lambda epoch: LoaderIterator(source),
            name,
            is_repositionable=True,
            keeps_order=True,
            is_shared=True,
        )
    if isinstance(source, Iterable) and not isinstance(source, str | bytes | type):
        return IterableSource(lambda epoch: iter(source), name)
    if isinstance(source, Callable):
        _check_takes_nothing(source)
        return IterableSource(lambda epoch: iter(source()), "generator function")
    if gives_single_examples(source):
        raise TypeError(
            f"The dataset is {source!r:.80} of type {type(source).__name__}, which "
            "gives single examples by index, but it must give batches. Use "
            "`armillary.data.from_random_access(dataset, batch_size=...)`."
        )
    raise TypeError(
        f"The dataset is {source!r:.80} of type {type(source).__name__}, but it must "
        "give batches. Pass the result of `armillary.data.from_arrays`, a dataset or "
        "loader of Grain, TensorFlow, PyTorch or Hugging Face, an iterable of batches, "
        "or a generator function."
    )


def _check_takes_nothing(function: Callable[..., Any]) -> None:
    misfit = find_misfit(function, 0)
    if misfit is not None:
        raise TypeError(
            f"The dataset is the function `{misfit}`, but it is called without "
            "arguments, once for each epoch. Pass `lambda: fn(...)` with the arguments "
            "of your function. A function of an `input_context` goes to "
            "`strategy.distribute_datasets_from_function(fn)`."
        )


def _from_tf_data(dataset: Any, kind: str) -> IterableSource:
    """Returns the source of a `tf.data.Dataset`, if its elements are dense tensors."""
    # It has no positions, because TensorFlow would save an iterator as files, with the
    # contents of its buffers, after each batch.
    specs = jax.tree_util.tree_leaves_with_path(dataset.element_spec)
    wrong = [
        f"{show_path(path)}: {type(spec).__name__}"
        for path, spec in specs
        # JAX leaves out `None`, too.
        if type(spec).__name__ not in ("TensorSpec", "NoneTensorSpec")
    ]
    if wrong:
        raise TypeError(
            "The `tf.data.Dataset` has elements that are not dense tensors:\n"
            f"{list_lines(wrong)}\n"
            "Change them with `map`, such as by `to_tensor` or `tf.sparse.to_dense`."
        )
    # Not copied: the arrays share the memory of tensors, which never change.
    made = IterableSource(
        lambda epoch: dataset.as_numpy_iterator(), f"tf.{kind}", copies=False
    )
    count = int(dataset.cardinality())
    made.is_endless = count == sys.modules["tensorflow"].data.INFINITE_CARDINALITY
    made.num_batches = count if count >= 0 else None
    return made


def _from_torch(loader: Any, kind: str) -> IterableSource:
    has_position = has_methods(loader, *_STATE_DICT)

    def make(epoch: int) -> Any:
        if has_position:
            return _TorchIterator(loader, _as_arrays_of_torch)
        return map(_as_arrays_of_torch, loader)

    return IterableSource(
        make,
        f"torch {type(loader).__name__}",
        # A `collate_fn` of the user may reuse a buffer, and so may a dataset of
        # batches.
        copies=loader.collate_fn is not sys.modules["torch"].utils.data.default_collate,
        is_repositionable=has_position,
        keeps_order=has_position,
        is_shared=has_position,
    )


class _TorchIterator(LoaderIterator):
    """One pass over a loader whose states hold tensors, and are packed as bytes."""

    def get_state(self) -> bytes:
        buffer = io.BytesIO()
        sys.modules["torch"].save(super().get_state(), buffer)
        return buffer.getvalue()

    def set_state(self, state: bytes) -> None:
        # Only tensors and plain values, because a checkpoint may come from anywhere.
        load = sys.modules["torch"].load
        super().set_state(load(io.BytesIO(state), weights_only=True))


def _as_arrays_of_torch(batch: Any) -> Batch:
    torch: Any = sys.modules["torch"]

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach().resolve_conj().resolve_neg()
        if leaf.dtype == torch.bfloat16:
            return leaf.view(torch.int16).numpy().view(jax.numpy.bfloat16)
        return leaf.numpy()

    return jax.tree.map(convert, batch)


def _refuse_examples(dataset: Any, kind: str) -> IterableSource:
    raise TypeError(
        f"The dataset is a `datasets.{kind}`, but it must give batches. Use "
        "`armillary.data.from_huggingface(dataset, batch_size=...)` with one split."
    )


def _from_huggingface_stream(dataset: Any, kind: str) -> IterableSource:
    has_buffer = _has_buffer(dataset._ex_iterable)
    start = dataset.state_dict()

    def begin(epoch: int) -> None:
        dataset.set_epoch(epoch)
        dataset.load_state_dict(start)  # Not the position of an earlier pass.

    def make(epoch: int) -> LoaderIterator:
        return LoaderIterator(dataset, _as_columns, functools.partial(begin, epoch))

    name = f"Hugging Face {kind}{' with a shuffle buffer' if has_buffer else ''}"
    has_position = not has_buffer
    return IterableSource(
        make, name, is_repositionable=has_position, is_shared=has_position
    )


def _has_buffer(examples: Any) -> bool:
    """Returns whether examples come from a buffer, which a position does not hold."""
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    sources = [getattr(examples, "ex_iterable", None)]
    sources += getattr(examples, "ex_iterables", [])
    return any(_has_buffer(source) for source in sources if source is not None)


def _as_columns(batch: Any) -> dict[str, Any]:
    """Returns a batch with an array for each column that can be one."""

    def convert(column: Any) -> Any:
        try:
            return np.asarray(column)
        except ValueError:  # Lists of several lengths, which `check_batch` names.
            return column

    return {name: convert(column) for name, column in batch.items()}


def from_huggingface(
    dataset: Any,
    *,
    batch_size: int,
    shuffle_seed: int | None = None,
    repeat: bool = False,
    drop_remainder: bool = False,
) -> "HuggingFaceDataset":
    """Returns a dataset of the examples of a `datasets.Dataset`, in batches.

    A batch is a dictionary of NumPy arrays, one for each column. Numbers have the
    dtypes of `dataset.with_format("numpy")`. A transform (`with_transform`) is kept.

    Args:
        dataset: The dataset. Its columns, or the results of its transform, must hold
            numbers, and lists in a column must have one length. To leave out other
            columns, use `dataset.select_columns([...])`.
        batch_size: As in `from_arrays`, like all arguments below.
        shuffle_seed: Seed of the order.
        repeat: Whether the dataset never ends.
        drop_remainder: Whether to leave out a last batch that is not full.

    Returns:
        A dataset with the order, the passes and the positions of `from_arrays`.

    Raises:
        TypeError: If `dataset` is not a `datasets.Dataset`, or a column does not hold
            numbers.
        ValueError: If there is no example, or another argument is wrong.
        BatchSizeError: If `drop_remainder` leaves no batch.
    """
    return HuggingFaceDataset(dataset, batch_size, shuffle_seed, repeat, drop_remainder)


class HuggingFaceDataset(IndexedDataset):
    """Examples in batches; made by `from_huggingface`, which documents it."""

    name = "Hugging Face Dataset"

    def __init__(self, dataset: Any, *options: Any) -> None:
        if not is_kind(dataset, "datasets", "Dataset"):
            raise TypeError(
                f"`dataset` is of type {type(dataset).__name__}, but it must be a "
                "`datasets.Dataset`. Pass one split, such as `dataset['train']`. A "
                "stream needs no `from_huggingface`: use `dataset.batch(batch_size)`."
            )
        super().__init__("dataset", len(dataset), *options)
        form = dataset.format
        if form["type"] != "custom":
            dataset = dataset.with_format(
                "numpy",
                columns=form["columns"],
                output_all_columns=form["output_all_columns"],
            )
        self._dataset = dataset
        # One read finds columns that no device can hold before the program runs.
        _ = self.row_types

    def read_rows(self, rows: np.ndarray) -> Batch:
        columns = _as_columns(self._dataset[rows])
        batch, _ = check_batch(columns, lambda: "`dataset`")
        return batch

    def fingerprints(self) -> dict[str, str]:
        """Returns a checksum of some stored examples, without the transform."""
        stored = self._dataset.with_format("arrow")
        some = stored[self.spaced_rows(_MAX_READ)].to_pylist()
        return {"rows": fingerprint(repr(some).encode())}
