"""Datasets that yield batches spread over replicas, with positions to save."""

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from armillary._copy_refusal import OfOneProcessOnceUsed
from armillary._jaxpr import is_in_trace
from armillary._logging import logger
from armillary.data._layout import BatchLayout, InputContext, InputOptions
from armillary.data.feed._feed import Feed
from armillary.data.feed._gather import make_gather
from armillary.data.feed._position import (
    Position,
    check_same_order,
    decode_position,
    encode_position,
)
from armillary.data.feed._prefetcher import Prefetcher
from armillary.data.feed._reader import BatchReader, place_pieces
from armillary.data.feed._split import Piece, Splitter
from armillary.data.feed._stream import SourceBatch, read_batches
from armillary.data.sources._arrays import IndexedDataset
from armillary.data.sources._libraries import as_source
from armillary.errors import CapturedStateError, DatasetStateError
from armillary.typing import Batch, PyTree

_PIPELINES = "pipelines"
_ORDER = "order"


class DistributedDataset(OfOneProcessOnceUsed):
    """Spreads the batches of a source over the replicas of a layout.

    Every `iter` begins the next pass over the source (the next *epoch*)::

        for batch in dataset:           # or: iterator = iter(dataset); next(iterator)
            strategy.run(step_fn, args=(batch,))

    If the source can save and restore its position, so can the data set (`get_state`,
    `set_state`). It is the position after the batches that the program has used.
    Batches that were read ahead do not count. It does not depend on the number of
    replicas.

    In a job of several processes, each process reads a whole source of global batches,
    and keeps the rows of its own replicas. With per-replica batches, each process has
    its own source, and a saved position holds the positions of all processes.

    Args:
        source: Any argument of `as_source`. By default, its batches are *global*: a
            batch is divided into n equal parts, one for each of n replicas.
        layout: The placement of batches on devices; comes from a strategy.
        per_replica_batches: Whether each batch of the source is for one replica. Then
            one distributed batch takes one batch for every replica.
        options: How to treat batches of unequal size, how far to read ahead, and
            whether the arrays stay on the device.

    Raises:
        TypeError: If `source` does not give batches, or its arrays should stay on the
            device, but it has no arrays.
    """

    _why_not_copied = "it has a reader, and a place on the devices of this process"
    _copy_instead = (
        "Pass on the data set that it was made from, and distribute that in the "
        "process that uses it (`strategy.distribute_dataset(source)`)."
    )

    def __init__(
        self,
        source: Any,
        layout: BatchLayout,
        *,
        per_replica_batches: bool = False,
        options: InputOptions | None = None,
    ) -> None:
        self.layout = layout
        self.options = options or InputOptions()
        self.per_replica_batches = per_replica_batches
        self.ignores_state = False
        """True if `set_state` changes nothing, for a process that does not train."""
        self.source = as_source(source)
        self.dataset_fn: Callable[[InputContext], Any] | None = None
        """The function that made the source, for code that needs a similar source."""
        self.is_endless = getattr(self.source, "is_endless", False)
        """True if it is known to repeat its data forever."""
        self.is_agreed = per_replica_batches and layout.peers is not None
        """True if processes that read data of their own agree on each batch."""
        self._source, self.gather = make_gather(self.source, layout, self.options)
        self.source_name: str = self._source.name
        """The kind of source, for messages."""
        self.num_global_batches: int | None = getattr(self._source, "num_batches", None)
        """The number of batches in one pass over the source; `None` if unknown."""
        # The reader whose position this is, and the trainer that it reads for, if any.
        self._reader: BatchReader | None = None
        self._owner: Callable[[], Any] = lambda: None
        # Unused batches that were opened for a look, or at a restored position.
        self._waiting: tuple[Position, Prefetcher[SourceBatch]] | None = None
        self._position = Position()
        self._next_epoch = 0
        self._first: SourceBatch | None = None

    def __iter__(self) -> "DistributedIterator":
        """Returns an iterator over the next pass, or the rest of a restored pass."""
        return DistributedIterator(self)

    @property
    def prefetch(self) -> int:
        """The number of batches to place ahead.

        It is 0 if processes must agree on batches, which they then only read ahead.
        """
        return 0 if self.is_agreed else self.options.prefetch

    def open_reader(
        self,
        *,
        in_pieces: bool,
        begins_anew: bool,
        owner: Any = None,
        reads_ahead: bool = True,
    ) -> BatchReader:
        """Returns the reader for a feed; the arguments are the same as of `Feed`."""
        if in_pieces and self.is_repositionable:
            # An evaluation reads the first pass each time, and moves no position.
            first = Position()
            return BatchReader(self, first, self.read(first), in_pieces=True)

        is_owners = owner is not None and self._owner() is owner
        continues = is_owners and self.is_repositionable and not begins_anew
        position, batches = self._find_start(
            continues=continues, begins_anew=begins_anew
        )
        reader = BatchReader(
            self, position, batches, in_pieces=in_pieces, reads_ahead=reads_ahead
        )
        if self._is_read_by_trainer():
            if owner is None:
                return reader  # This iterator only looks at data that a trainer reads.
            if not is_owners:
                logger.warning(
                    "Two trainers read one distributed dataset. It has only one "
                    "position to save, the position of the second trainer. Distribute "
                    "the source for each trainer."
                )

        # From now on, the position of the new reader is the position to save.
        self._reader = reader
        self._waiting = None
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._next_epoch = position.epoch + 1
        return reader

    def _find_start(
        self, *, continues: bool, begins_anew: bool
    ) -> tuple[Position, Prefetcher[SourceBatch]]:
        """Returns the position at which a reader begins, and the batches from there.

        With `continues`, it is where the last reader ended, unless its pass is over.
        Otherwise, it is a restored position, or the next pass.
        """
        last = self._reader
        if last is not None and continues and not last.used.is_exhausted:
            return last.used, self.read(last.used)
        if self._waiting is None:
            return self._open_next()
        position, _ = self._waiting
        if position.is_exhausted and begins_anew:
            return self._open_next()
        return self._waiting

    def _is_read_by_trainer(self) -> bool:
        """Returns whether a trainer that is alive is in the middle of a pass."""
        last = self._reader
        if last is None or self._owner() is None:
            return False
        feed = last.feed()
        is_open = feed is not None and not feed.is_closed
        return is_open and not last.used.is_exhausted

    def read(self, position: Position) -> Prefetcher[SourceBatch]:
        return read_batches(self._source, position, self._note_first)

    def _open_next(self) -> tuple[Position, Prefetcher[SourceBatch]]:
        position = Position(epoch=self._next_epoch)
        return position, self.read(position)

    def _note_first(self, batch: SourceBatch) -> None:
        if self._first is None:
            types = jax.tree.map(_type_of, batch.arrays)
            self._first = SourceBatch(types, batch.position)

    @property
    def source_spec(self) -> PyTree | None:
        """The types of the first batch of the source; `None` before it was read."""
        return None if self._first is None else self._first.arrays

    def global_batches(self, epoch: int) -> Iterator[Batch]:
        """Yields the batches of one pass over the source, on the host, undivided."""
        for batch in self.read(Position(epoch=epoch)):
            yield self.gather.on_host(batch.arrays)

    @property
    def element_spec(self) -> PyTree:
        """A `jax.ShapeDtypeStruct` for each leaf of the first global batch.

        Reads one batch of the source, if none was read yet, without using it.

        Raises:
            ValueError: If the source has no batch.
        """
        if self._first is None:
            batches = None if self._reader is None else self._reader.batches
            if batches is None:
                self._waiting = self._waiting or self._open_next()
                _, batches = self._waiting
            with contextlib.suppress(StopIteration):
                batches.head()
        if self._first is None and self.is_repositionable:
            # The position is after the last batch of a pass, so read the next pass.
            _, batches = self._open_next()
            next(batches, None)
        if self._first is None:
            raise ValueError(
                f"The source ({self.source_name}) has no batches, so there is no "
                "`element_spec`. Pass a data set with at least one example."
            )
        types, position = self._first
        splitter = Splitter(self, in_pieces=False)
        distributed = splitter.distributed_types(types, position.full_size or 0)
        return self.gather.rows(distributed)

    @property
    def is_repositionable(self) -> bool:
        """True if the position can be saved and restored."""
        return self._source.is_repositionable

    def check_repositionable(self) -> None:
        """Raises if the position cannot be saved and restored.

        Raises:
            DatasetStateError: If the source cannot be repositioned.
        """
        if not self.is_repositionable:
            raise DatasetStateError(
                f"The source ({self.source_name}) cannot be repositioned, so a "
                "checkpoint cannot hold its position. Use a source that can be "
                "repositioned, such as `armillary.data.from_arrays`, or leave the "
                "dataset out."
            )

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the used batches, in types of JSON.

        Within a pass, it also has the values that decide the order of the examples, as
        far as they are known: their number, the seed, and a fingerprint of the data.

        Raises:
            DatasetStateError: If the source cannot be repositioned.
        """
        self.check_repositionable()
        position = self._position if self._reader is None else self._reader.used
        state = encode_position(position, self.source_name)
        order = {} if position.is_between_passes else self._order
        if order:
            state[_ORDER] = order
        peers = self.layout.peers
        if not self.is_agreed or peers is None:
            return state
        texts = peers.gather("the position in the data", json.dumps(state))
        return {_PIPELINES: [json.loads(text) for text in texts]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` returned.

        If the iterator or loop that began last is still in use, it continues from this
        position, and drops batches that it has read ahead. Otherwise, the next iterator
        or loop begins there. Iterators that begin while a trainer is in the middle of
        the data do not count.

        Raises:
            DatasetStateError: If the source cannot be repositioned, or the state does
                not fit it, for example, because the order of the examples is different.
                The position is then unchanged.
        """
        self.check_repositionable()
        if self.ignores_state:
            return
        state = self._select(state)
        position = decode_position(state, self.source_name)
        if not position.is_between_passes:
            check_same_order(state.get(_ORDER, {}), self._order)
            is_ours = isinstance(self.source, IndexedDataset)
            if is_ours and not self.is_endless and "epoch" in position.source:
                # The state of a repeating source counts all epochs as one pass.
                position = replace(position, epoch=position.source["epoch"])

        reader = self._reader
        feed = None if reader is None else reader.feed()
        if feed is not None and not feed.is_closed:
            positions = [
                position if each is reader else each.used for each in feed.readers
            ]
            feed.seek(positions)
            self._waiting = None
        else:
            self._waiting = (position, self.read(position))
            self._reader = None
            self._position = position
        self._next_epoch = position.epoch + 1

    @property
    def _order(self) -> dict[str, Any]:
        # From the user's source, because `_source` may yield only row numbers.
        return getattr(self.source, "order_of_examples", {})

    def _select(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of a saved state for this process."""
        states = state.get(_PIPELINES, [state])
        peers = self.layout.peers if self.is_agreed else None
        count = 1 if peers is None else peers.count
        index = 0 if peers is None else peers.index
        is_of_several = _PIPELINES in state
        if len(states) != count or is_of_several != (peers is not None):
            raise DatasetStateError(
                f"`state` holds the positions of {len(states)} input pipelines, but "
                f"the program has {count}, one for each process that reads data of its "
                "own. Restore on the same number of processes."
            )
        return states[index]


def _type_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


@dataclass(frozen=True)
class OptionalBatch:
    """A batch, or the end of the data (`tf.experimental.Optional`).

    `DistributedIterator.get_next_as_optional` returns it.
    """

    _batches: tuple[PyTree, ...]  # one or none

    def has_value(self) -> bool:
        """Returns whether there is a batch; false at the end of the data."""
        return bool(self._batches)

    def get_value(self) -> PyTree:
        """Returns the batch.

        Raises:
            ValueError: If the data had ended.
        """
        if not self._batches:
            raise ValueError(
                "`get_value()` was called at the end of the data, where there is no "
                "batch. Check first: `if batch.has_value(): step(batch.get_value())`."
            )
        return self._batches[0]


class DistributedIterator:
    """One pass over a `DistributedDataset`, read ahead by a background thread.

    The thread ends with the pass, with `close`, or when the iterator is deleted.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._layout = dataset.layout
        self._open()

    def _open(self) -> None:
        dataset = self._dataset
        self._is_fresh = True
        self._feed: Feed[Piece] = Feed([dataset], in_pieces=False, begins_anew=True)
        self._feed.start(place_pieces, dataset.prefetch)

    def initialize(self) -> None:
        """Begins the next pass over the data, unless this one has not begun yet.

        Programs written for TensorFlow 1 call it before each epoch. It is the same as
        `iterator = iter(dataset)`.
        """
        if not self._is_fresh:
            self.close()
            self._open()

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> PyTree:
        """Returns the next batch as the layout wraps it.

        Raises:
            StopIteration: If the data has ended. Every later call raises it again.
            BatchSizeError: If the replicas cannot share the batch equally.
            DatasetStateError: If Ctrl-C interrupted reading, and the source cannot go
                back.
            CapturedStateError: If a function is being traced, because the batch would
                become a constant of its program.
        """
        if is_in_trace():
            raise CapturedStateError(
                "A batch was taken from a distributed dataset while a function is "
                "traced, so every call of the program would use this same batch. Take "
                "it outside and pass it in (`for batch in dataset: step(batch)`), or "
                "let a `StandardTrainer` run the loop."
            )
        self._is_fresh = False
        batch = self._feed.next_chunk()
        if batch is None:
            raise StopIteration
        value = self._layout.wrap(batch.arrays, batch.num_active)
        self._feed.read_on()
        # ORDER: last, so that after an interrupt the same batch is returned again.
        self._feed.commit(1)
        return value

    get_next = __next__  # as `tf.distribute` spells it

    def get_next_as_optional(self) -> OptionalBatch:
        """Returns the next batch, or the end of the data, without `StopIteration`.

        In Python, `for batch in iterator:` does the same::

            batch = iterator.get_next_as_optional()
            while batch.has_value():
                strategy.run(step_fn, args=(batch.get_value(),))
                batch = iterator.get_next_as_optional()
        """
        try:
            return OptionalBatch((next(self),))
        except StopIteration:
            return OptionalBatch(())

    def close(self) -> None:
        """Ends the pass and its thread; the dataset keeps the position."""
        self._feed.close()
