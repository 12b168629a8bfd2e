"""Data sets of Grain, TensorFlow, PyTorch and Hugging Face as sources.

None of these libraries is imported here: an object can only be of one of their classes
if the program has imported it already.
"""

import functools
import io
import sys
from typing import Any

import jax
import numpy as np

from armillary._checks import list_lines
from armillary.data.sources._arrays import IndexedDataset, fingerprint
from armillary.data.sources._batch import check_batch, show_path
from armillary.data.sources._iterables import (
    IterableSource,
    LoaderIterator,
    has_state_dict,
)
from armillary.typing import Batch

_MOST_READ = 16
"""How many examples of a `datasets.Dataset` a fingerprint reads."""


def as_library_source(source: Any) -> IterableSource | None:
    """Returns a source if `source` is a data set of one of the libraries, or None."""
    for kind in ("MapDataset", "IterDataset", "DataLoader"):
        if _is_kind(source, "grain", kind):
            return _from_grain(source, kind)
    if _is_kind(source, "tensorflow", "data.Dataset"):
        return _from_tf_data(source)
    if _is_kind(source, "torch", "utils.data.DataLoader"):
        return _from_torch(source)
    for kind in ("Dataset", "DatasetDict"):
        if _is_kind(source, "datasets", kind):
            raise TypeError(
                f"The data set is a `datasets.{kind}`, but it must give batches. Use "
                "`armillary.data.from_huggingface(dataset, batch_size=...)` with one "
                "split."
            )
    if _is_kind(source, "datasets", "IterableDataset"):
        return _from_huggingface_stream(source)
    return None


def _is_kind(value: Any, library: str, path: str) -> bool:
    found: Any = sys.modules.get(library)
    for name in path.split("."):
        found = getattr(found, name, None)
    return isinstance(found, type) and isinstance(value, found)


def _from_grain(dataset: Any, kind: str) -> IterableSource:
    # Each batch of Grain is a new one.
    made = IterableSource(lambda epoch: iter(dataset), f"grain.{kind}", copies=False)
    if kind != "DataLoader":  # Its positions have it, and Grain compares.
        made.order_of_examples = _find_grain_order(dataset)
    return made


def _find_grain_order(dataset: Any) -> dict[str, list[int]]:
    """Returns what the meaning of a position depends on, which Grain does not save.

    A `MapDataset` counts what it gives, so batches of another size are other places.
    """
    order: dict[str, list[int]] = {}
    nodes = [dataset]
    for node in nodes:
        parents = getattr(node, "parents", ())
        nodes.extend(parents)
        is_map = _is_kind(node, "grain", "MapDataset")
        found = {
            "shuffle seed": "Shuffle" in type(node).__name__ and node._seed,
            "batch size": is_map and getattr(node, "_batch_size", False),
            "examples": is_map and not parents and len(node),
        }
        for name, value in found.items():
            if value is not False:
                order.setdefault(name, []).append(value)
    return order


def _from_tf_data(dataset: Any) -> IterableSource:
    # It has no positions: TensorFlow saves an iterator as files, with all that its
    # buffers hold, and that after each batch.
    specs = jax.tree_util.tree_leaves_with_path(dataset.element_spec)
    wrong = [
        f"{show_path(path)}: {type(spec).__name__}"
        for path, spec in specs
        # JAX leaves out what is `None`, too.
        if type(spec).__name__ not in ("TensorSpec", "NoneTensorSpec")
    ]
    if wrong:
        raise TypeError(
            "The `tf.data.Dataset` has elements that are no dense tensors:\n"
            f"{list_lines(wrong)}\n"
            "Change them with `map`, such as by `to_tensor` or `tf.sparse.to_dense`."
        )
    # Its arrays share the memory of tensors, which nobody writes to.
    made = IterableSource(
        lambda epoch: dataset.as_numpy_iterator(), "tf.data.Dataset", copies=False
    )
    count = int(dataset.cardinality())
    made.is_endless = count == sys.modules["tensorflow"].data.INFINITE_CARDINALITY
    made.num_batches = count if count >= 0 else None
    return made


def _from_torch(loader: Any) -> IterableSource:
    name = f"torch {type(loader).__name__}"
    # Without a batch size, a loader gives what the data set gives, perhaps a buffer.
    copies = loader.batch_size is None and loader.batch_sampler is None
    has_position = has_state_dict(loader)

    def make(epoch: int) -> Any:
        if has_position:
            return _TorchIterator(loader, _as_arrays_of_torch)
        return map(_as_arrays_of_torch, loader)

    return IterableSource(make, name, copies=copies, is_repositionable=has_position)


class _TorchIterator(LoaderIterator):
    """One pass over a loader, whose states hold tensors and are packed as bytes."""

    def get_state(self) -> bytes:
        buffer = io.BytesIO()
        sys.modules["torch"].save(super().get_state(), buffer)
        return buffer.getvalue()

    def set_state(self, state: bytes) -> None:
        # Nothing but tensors and plain values: a checkpoint may come from anywhere.
        load = sys.modules["torch"].load
        super().set_state(load(io.BytesIO(state), weights_only=True))


def _as_arrays_of_torch(batch: Any) -> Batch:
    """Returns a batch with arrays that share the memory of its tensors."""
    torch: Any = sys.modules["torch"]

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach().resolve_conj().resolve_neg()
        if leaf.dtype == torch.bfloat16:
            return leaf.view(torch.int16).numpy().view(jax.numpy.bfloat16)
        return leaf.numpy()

    return jax.tree.map(convert, batch)


def _from_huggingface_stream(dataset: Any) -> IterableSource:
    has_buffer = _has_buffer(dataset._ex_iterable)
    start = dataset.state_dict()

    def begin(epoch: int) -> None:
        dataset.set_epoch(epoch)
        dataset.load_state_dict(start)  # Not the position of an earlier pass.

    def make(epoch: int) -> LoaderIterator:
        return LoaderIterator(dataset, _as_columns, functools.partial(begin, epoch))

    name = "Hugging Face IterableDataset"
    name += " with a shuffle buffer" if has_buffer else ""
    can_go_back = not has_buffer
    return IterableSource(make, name, copies=False, is_repositionable=can_go_back)


def _has_buffer(examples: Any) -> bool:
    """Returns whether examples come from a buffer, which a position does not hold."""
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(examples, "ex_iterable", None)]
    inner += getattr(examples, "ex_iterables", [])
    return any(_has_buffer(each) for each in inner if each is not None)


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
        A data set with the order, the passes and the positions of `from_arrays`.

    Raises:
        TypeError: If `dataset` is no `datasets.Dataset`, or columns hold something else
            than numbers.
        ValueError: If there is no example, or another argument is wrong.
        BatchSizeError: If `drop_remainder` leaves no batch.
    """
    options = batch_size, shuffle_seed, repeat, drop_remainder
    return HuggingFaceDataset(dataset, *options)


class HuggingFaceDataset(IndexedDataset):
    """Examples in batches; made by `from_huggingface`, which documents it."""

    name = "Hugging Face Dataset"

    def __init__(self, dataset: Any, *options: Any) -> None:
        if not _is_kind(dataset, "datasets", "Dataset"):
            raise TypeError(
                f"`dataset` is of type {type(dataset).__name__}, but it must be a "
                "`datasets.Dataset`. Pass one split, such as `dataset['train']`; a "
                "stream is used as it is, with `dataset.batch(batch_size)`."
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
        # What no device can hold shows here, and not in the middle of a program.
        self.read_rows(np.zeros(1, np.int64))

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns these examples."""
        return check_batch(_as_columns(self._dataset[rows]), lambda: "`dataset`")[0]

    def fingerprints(self) -> dict[str, str]:
        """Returns a checksum of some examples as they are stored: no transform runs."""
        some = self._dataset.with_format("arrow")[self.spaced_rows(_MOST_READ)]
        return {"rows": fingerprint(repr(some.to_pylist()).encode())}
