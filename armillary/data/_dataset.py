"""Datasets that yield batches spread over replicas, from a position to be saved."""

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from armillary._copies import OfOneProcessOnceUsed
from armillary._jaxpr import is_in_trace
from armillary._logging import logger
from armillary.data._layout import BatchLayout, InputContext, InputOptions
from armillary.data.feed._feed import Feed
from armillary.data.feed._gather import make_gather
from armillary.data.feed._reader import BatchReader, place_pieces
from armillary.data.feed._split import Piece, Splitter
from armillary.data.feed._stream import (
    Position,
    Prefetcher,
    SourceBatch,
    check_same_order,
    decode_position,
    encode_position,
    read_batches,
)
from armillary.data.sources._arrays import IndexedDataset
from armillary.data.sources._libraries import as_source
from armillary.errors import CapturedStateError, DatasetStateError
from armillary.typing import Batch, PyTree

_PIPELINES, _ORDER = "pipelines", "order"


class DistributedDataset(OfOneProcessOnceUsed):
    """Spreads the batches of a source over the replicas of a layout.

    Every `iter` begins the next pass over the source (the next *epoch*)::

        for batch in dataset:           # or: iterator = iter(dataset); next(iterator)
            strategy.run(step_fn, args=(batch,))

    If the source can save and restore its position, so can the data set (`get_state`,
    `set_state`). It is the position after the batches that the program has used,
    however many were read ahead. It does not depend on the number of replicas.

    In a job of several processes, each process reads a whole source of global batches,
    and keeps the rows of its own replicas. With per-replica batches, each process has
    its own source, and a saved position holds the positions of all processes.

    Args:
        source: Any argument of `as_source`. By default its batches are *global*:
            replica r of n gets the r-th of n equal runs of rows.
        layout: Where the replicas are; comes from a strategy.
        per_replica_batches: Whether each batch of the source is one replica's, so that
            one distributed batch takes one for every replica.
        options: How to treat batches of unequal size, how far to read ahead, and
            whether the arrays stay on the device.

    Raises:
        TypeError: If `source` does not give batches, or its arrays should stay on the
            device and it has none.
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
        """Whether `set_state` changes nothing, for a process that does not train."""
        self.source = as_source(source)
        self.dataset_fn: Callable[[InputContext], Any] | None = None
        """The function that made the source, for code that needs a similar source."""
        self.is_endless = getattr(self.source, "is_endless", False)
        """Whether it is known to repeat its data forever."""
        self.is_agreed = per_replica_batches and layout.peers is not None
        """Whether processes that read data of their own agree on each batch."""
        self._source, self.gather = make_gather(self.source, layout, self.options)
        self.source_name: str = self._source.name
        """The kind of source, as messages call it."""
        self.num_global_batches: int | None = getattr(self._source, "num_batches", None)
        """How many batches one pass over the source has; `None` if not known."""
        # Whose position it is, and who reads there, if that is a trainer.
        self._reader: BatchReader | None = None
        self._owner: Callable[[], Any] = lambda: None
        # Batches that were opened, to look at or at a restored position, and not used.
        self._waiting: tuple[Position, Prefetcher[SourceBatch]] | None = None
        self._position = Position()
        self._next_epoch = 0
        self._first: SourceBatch | None = None

    def __iter__(self) -> "DistributedIterator":
        """Returns an iterator over the next pass, or on in one that was restored."""
        return DistributedIterator(self)

    @property
    def prefetch(self) -> int:
        """How far to place batches ahead; processes that must agree only read ahead."""
        return 0 if self.is_agreed else self.options.prefetch

    def open_reader(
        self,
        *,
        in_pieces: bool,
        begins_anew: bool,
        owner: Any = None,
        reads_ahead: bool = True,
    ) -> BatchReader:
        """Returns what a feed reads; its arguments are the feed's."""
        last, first = self._reader, Position()
        if in_pieces and self.is_repositionable:
            # An evaluation reads the first pass each time, and moves no position.
            return BatchReader(self, first, self.read(first), in_pieces=True)
        is_owners = owner is not None and self._owner() is owner
        goes_on = is_owners and self.is_repositionable and not begins_anew
        waiting = self._waiting
        if last is not None and goes_on and not last.used.is_exhausted:
            waiting = last.used, self.read(last.used)
        if waiting is None or (waiting[0].is_exhausted and begins_anew):
            waiting = self._open_next()
        reader = BatchReader(
            self, *waiting, in_pieces=in_pieces, reads_ahead=reads_ahead
        )
        feed = last.feed() if last is not None and self._owner() is not None else None
        if last and feed is not None and not (feed.is_closed or last.used.is_exhausted):
            if owner is None:
                return reader  # A look at what a trainer is in the middle of.
            if not is_owners:
                logger.warning(
                    "Two trainers read one distributed dataset. It has only one "
                    "position to save, the position of the second trainer. Distribute "
                    "the source for each."
                )
        self._reader, self._waiting = reader, None
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._next_epoch = waiting[0].epoch + 1
        return reader

    def read(self, position: Position) -> Prefetcher[SourceBatch]:
        return read_batches(self._source, position, self._note_first)

    def _open_next(self) -> tuple[Position, Prefetcher[SourceBatch]]:
        position = Position(epoch=self._next_epoch)
        return position, self.read(position)

    def _note_first(self, batch: SourceBatch) -> None:
        if self._first is None:
            types = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch.arrays
            )
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
                batches = self._waiting[1]
            with contextlib.suppress(StopIteration):
                batches.head()
        if self._first is None and self.is_repositionable:
            # The pass was saved behind its last batch; another one has some.
            next(self._open_next()[1], None)
        if self._first is None:
            raise ValueError(
                f"The source ({self.source_name}) has no batches, so there is no "
                "`element_spec`. Pass a data set with at least one example."
            )
        types, position = self._first
        splitter = Splitter(self, in_pieces=False)
        return self.gather.rows(splitter.describe(types, position.full_size or 0))

    @property
    def is_repositionable(self) -> bool:
        """Whether the position can be saved and restored."""
        return self._source.is_repositionable

    def check_repositionable(self) -> None:
        """Raises if the position cannot be saved and restored.

        Raises:
            DatasetStateError: If the source cannot be repositioned.
        """
        if not self.is_repositionable:
            raise DatasetStateError(
                f"The source ({self.source_name}) cannot be repositioned, so a "
                "checkpoint cannot hold its position. Use one that can, such as "
                "`armillary.data.from_arrays`, or leave the dataset out."
            )

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the batches used, as `json.dumps` accepts it.

        Within a pass, what the order of the examples depends on belongs to it, as far
        as it is known: their number, the seed, and a fingerprint of the data.

        Raises:
            DatasetStateError: If the source cannot be repositioned.
        """
        self.check_repositionable()
        position = self._position if self._reader is None else self._reader.used
        state = encode_position(position, self.source_name)
        if not position.is_between_passes and (order := self._order):
            state[_ORDER] = order
        if not self.is_agreed or self.layout.peers is None:
            return state
        states = self.layout.peers.gather("the position in the data", json.dumps(state))
        return {_PIPELINES: [json.loads(text) for text in states]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` returned.

        The iterator or loop that began last continues from there, if it is still in
        use; batches that it has read ahead are dropped. Otherwise the next one does.
        Iterators that begin while a trainer is in the middle of the data do not count.

        Raises:
            DatasetStateError: If the source cannot be repositioned, or the state does
                not fit it, such as one of another order of the examples. The position
                is then what it was.
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
                # One that repeats its examples counts all as one pass.
                position = replace(position, epoch=position.source["epoch"])
        reader = self._reader
        feed = None if reader is None else reader.feed()
        if feed is not None and not feed.is_closed:
            feed.seek([position if it is reader else it.used for it in feed.readers])
            self._waiting = None
        else:
            self._waiting = position, self.read(position)
            self._reader, self._position = None, position
        self._next_epoch = position.epoch + 1

    @property
    def _order(self) -> dict[str, Any]:
        # Of the source as it was given, and not of the numbers of its rows.
        return getattr(self.source, "order_of_examples", {})

    def _select(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the part for this process, of as many as there were."""
        states = state.get(_PIPELINES, [state])
        peers = self.layout.peers if self.is_agreed else None
        count, index = (1, 0) if peers is None else (peers.count, peers.index)
        if len(states) != count or (_PIPELINES in state) != (peers is not None):
            raise DatasetStateError(
                f"`state` holds the positions of {len(states)} input pipelines, but "
                f"the program has {count}, one for each process that reads data of its "
                "own. Restore on as many processes."
            )
        return states[index]


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
                "batch. Ask first: `if batch.has_value(): step(batch.get_value())`."
            )
        return self._batches[0]


class DistributedIterator:
    """One pass over a `DistributedDataset`, read ahead by a background thread.

    The thread ends with the pass, with `close`, and when nobody holds the iterator.
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
            StopIteration: If the data has ended, again at every call.
            BatchSizeError: If the replicas cannot share the batch equally.
            DatasetStateError: If Ctrl-C came while data was read that cannot go back.
            CapturedStateError: If a function is being traced, which would make the
                batch a constant of its program.
        """
        if is_in_trace():
            raise CapturedStateError(
                "A batch was taken from a distributed dataset while a function is "
                "traced, so that every call of the program would use this same batch. "
                "Take it outside and pass it in (`for batch in dataset: step(batch)`), "
                "or let a `StandardTrainer` run the loop."
            )
        self._is_fresh = False
        batch = self._feed.next_chunk()
        if batch is None:
            raise StopIteration
        value = self._layout.wrap(batch.arrays, batch.num_active)
        self._feed.read_on()
        # ORDER: last, since an interrupt before it gives the batch out again.
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
        """Ends the pass and its thread; the dataset keeps the position reached."""
        self._feed.close()
