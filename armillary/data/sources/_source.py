"""The one protocol of all sources, and the only place that looks at their types."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from armillary.data.sources._iterables import (
    IterableSource,
    LoaderIterator,
    from_function,
    from_iterator,
    has_state_dict,
)
from armillary.data.sources._libraries import as_library_source
from armillary.typing import Batch


class SourceIterator(Protocol):
    """One pass over a source. Used by one thread at a time."""

    def __next__(self) -> Batch:
        """Returns the next batch, which nobody writes to afterwards."""
        ...

    def get_state(self) -> Any:
        """Returns the position after the last batch, from what JSON can hold.

        Called only if the source is repositionable. The result must not change when
        the iterator moves on. Bytes are allowed too.
        """
        ...

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` returned, perhaps in another process."""
        ...


@runtime_checkable
class Source(Protocol):
    """Something that gives batches, any number of times."""

    name: str
    """The kind of source: for messages, and compared when a position is restored."""

    @property
    def is_repositionable(self) -> bool:
        """Whether its iterators have positions."""
        ...

    @property
    def full_size(self) -> int | None:
        """Examples in every batch but perhaps the last, or None if not known."""
        ...

    def make_iterator(self, epoch: int) -> SourceIterator:
        """Returns an iterator from the start of pass `epoch`, counted from 0."""
        ...


def as_source(source: Any) -> Source:
    """Returns `source` as a `Source`.

    Args:
        source: What `from_arrays` or its like returned; a `grain.MapDataset` (batched),
            `grain.IterDataset` or `grain.DataLoader`; a `tf.data.Dataset` (batched); a
            PyTorch `DataLoader`; a Hugging Face `IterableDataset` (batched); an
            iterable of batches, such as a list; a function without arguments that
            returns an iterator, such as a generator function; an iterator, for one
            pass; or a `Source`.

    Raises:
        TypeError: If it is none of these.
    """
    if isinstance(source, Source):
        return source
    made = as_library_source(source)
    if made is not None:
        return made
    parts = source if isinstance(source, tuple) and source else (None,)
    are_arrays = all(isinstance(part, np.ndarray | jax.Array) for part in parts)
    if are_arrays or isinstance(source, dict | np.ndarray | jax.Array):
        raise TypeError(
            f"The data set is a {type(source).__name__} of arrays, but it must give "
            "batches. Use `armillary.data.from_arrays(arrays, batch_size=...)`."
        )
    if hasattr(source, "open_reader"):
        raise TypeError(
            "The data set is a distributed dataset already. Pass the data set that it "
            "was made from, or use it as it is."
        )
    if isinstance(source, Iterator):
        return from_iterator(source)
    name = f"iterable {type(source).__name__}"
    if has_state_dict(source):
        return IterableSource(
            lambda epoch: LoaderIterator(source), name, is_repositionable=True
        )
    if isinstance(source, Iterable) and not isinstance(source, str | bytes | type):
        return IterableSource(lambda epoch: iter(source), name)
    if isinstance(source, Callable):
        return from_function(source)
    raise TypeError(
        f"The data set is {source!r:.80} of type {type(source).__name__}, but it must "
        "give batches. Pass the result of `armillary.data.from_arrays`, a data set or "
        "loader of Grain, TensorFlow, PyTorch or Hugging Face, an iterable of batches, "
        "or a generator function."
    )
