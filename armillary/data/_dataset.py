"""Datasets that yield batches spread over replicas, from a position that can be saved.

`BatchStream` reads the source, `Splitter` shares batches between replicas, `Gather`
makes of them what a step receives. A `Feed` owns what reads, and knows what was used; a
dataset has the recipe, and remembers where the next reader begins.
"""

import dataclasses
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from armillary.data._iterator import DistributedIterator
from armillary.data._layout import BatchLayout, InputContext, InputOptions
from armillary.data.feed._batch_reader import BatchReader
from armillary.data.feed._feed import Feed, Progress
from armillary.data.feed._gather import make_gather
from armillary.data.feed._lockstep import Lockstep
from armillary.data.feed._position import (
    BatchStream,
    Position,
    check_same_order,
    decode_position,
    encode_position,
)
from armillary.data.feed._split import Splitter
from armillary.data.sources._batch import as_array, as_device_values
from armillary.data.sources._source import as_source
from armillary.errors import DatasetStateError
from armillary.typing import Batch, PyTree

_PIPELINES, _ORDER = "pipelines", "order"
_EXACT_NEEDS_ONE_DATASET = (
    '`remainder` is "exact", but each process reads data of its own, and rows that '
    "replicas share anew would have to travel between processes. Distribute one data "
    "set over all of them (`strategy.distribute_dataset`), or use "
    '`InputOptions(remainder="drop")` or `InputOptions(remainder="pad")`.'
)


class DistributedDataset:
    """Spreads the batches of a source over the replicas of a layout.

    Every `iter` begins the next pass over the source (the next *epoch*)::

        for batch in dataset:           # or: iterator = iter(dataset); next(iterator)
            strategy.run(step_fn, args=(batch,))

    Its position can be saved and restored (`get_state`, `set_state`) if that of the
    source can. It is the position after the batches that the program has used, however
    many were read ahead, and it does not depend on the number of replicas.

    Of several processes, each reads all of a source of global batches, and keeps the
    rows of its own replicas. A source of per-replica batches is one for each process:
    then a saved position holds those of all processes.

    Args:
        source: Whatever `as_source` takes. By default its batches are *global*: replica
            r of n gets the r-th of n equal runs of rows.
        layout: Where the replicas are; comes from a strategy.
        per_replica_batches: Whether each batch of the source is one replica's, so that
            one distributed batch takes one for every replica.
        options: How to treat batches of unequal size, how far to read ahead, and
            whether the arrays stay on the device.

    Raises:
        TypeError: If `source` does not give batches, or its arrays should stay on the
            device and it has none.
        ValueError: If its arrays should stay on the device and have too many rows.
    """

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
        self.source = self._source = as_source(source)
        self.dataset_fn: Callable[[InputContext], Any] | None = None
        """What made the source, for those who need one like it elsewhere."""
        self.is_endless = getattr(self._source, "is_endless", False)
        """Whether it is known to repeat its data for ever."""
        self.is_agreed = per_replica_batches and layout.peers is not None
        """Whether processes that read data of their own agree on each batch."""
        self._source, self.gather = make_gather(self._source, layout, self.options)
        self._progress = Progress(Position())
        # A stream that was opened, to peek or at a restored position, and not yet used.
        self._waiting: BatchStream | None = None
        self._next_epoch = 0
        self._feed: weakref.ref[Feed] | None = None
        self._element_spec: PyTree | None = None

    def __iter__(self) -> DistributedIterator:
        """Returns an iterator over the next pass.

        After `set_state` without a living iterator, it continues the pass that was
        saved, or begins the next one if that was finished.
        """
        return DistributedIterator(self)

    @property
    def prefetch(self) -> int:
        """How far to place batches ahead; processes that must agree only read ahead."""
        return 0 if self.is_agreed else self.options.prefetch

    def begin(self, *, exact: bool, begins_anew: bool) -> BatchStream:
        """Returns the stream that the next feed begins with.

        After `set_state` without a living feed, it continues the pass that was saved;
        otherwise it is the next pass. The arguments are those of `Feed`.

        Raises:
            ValueError: If rows would have to travel between processes.
        """
        if self.is_agreed and self.options.remainder == "exact" and not exact:
            raise ValueError(_EXACT_NEEDS_ONE_DATASET)
        stream, self._waiting = self._waiting, None
        if stream is not None and stream.position.is_exhausted and begins_anew:
            stream = None
        if stream is None:
            stream = self.open_stream(Position(epoch=self._next_epoch))
        self._next_epoch = stream.position.epoch + 1
        return stream

    def attach(self, feed: Feed, progress: Progress) -> None:
        """Names what reads this dataset from now on, and where it notes its progress.

        The feed is held weakly.
        """
        self._feed, self._progress = weakref.ref(feed), progress

    def open_stream(self, position: Position) -> BatchStream:
        """Returns the batches of the source, on from a position.

        Raises:
            DatasetStateError: If the source does not accept the position.
        """
        return BatchStream(self._source, position)

    def make_reader(self, stream: BatchStream, *, exact: bool) -> BatchReader:
        """Returns what shares the batches of a stream between the replicas.

        Args:
            stream: From `begin` or `open_stream`.
            exact: Whether batches that replicas cannot share equally are split into
                smaller pieces, so that every example is used once. Without it they are
                treated as `options.remainder` says.
        """
        splitter, lockstep = self._make_splitter(exact), None
        if self.is_agreed:
            peers, num_own = self.layout.peers, len(self.layout.local_replicas)
            assert peers is not None
            splitter = dataclasses.replace(splitter, num_replicas=num_own, local=None)
            lockstep = Lockstep(peers, num_own, exact)
        return BatchReader(
            stream,
            splitter,
            self.gather,
            lockstep,
            reads_ahead=self.options.prefetch > 0,
        )

    @property
    def num_global_batches(self) -> int | None:
        """How many batches one pass over the source has; `None` if not known."""
        return getattr(self._source, "num_batches", None)

    def global_batches(self, epoch: int) -> Iterator[Batch]:
        """Yields the batches of one pass over the source, on the host, undivided."""
        iterator = self._source.make_iterator(epoch)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            batch = jax.tree.map(as_array, self.gather.on_host(batch))
            yield as_device_values(batch, lambda: f"A batch of the {self.source_name}")

    def _make_splitter(self, exact: bool) -> Splitter:
        layout = self.layout
        return Splitter(
            num_replicas=layout.num_replicas,
            stacked=layout.stacked,
            per_replica_batches=self.per_replica_batches,
            remainder=self.options.remainder,
            exact=exact,
            local=layout.local_replicas if layout.peers and layout.stacked else None,
            has_peers=self.is_agreed,
        )

    @property
    def _current_feed(self) -> Feed | None:
        feed = self._feed() if self._feed is not None else None
        return None if feed is None or feed.is_closed else feed

    @property
    def element_spec(self) -> PyTree:
        """A `jax.ShapeDtypeStruct` for each leaf of the first global batch.

        Reads one batch of the source, if none was read yet, without using it.

        Raises:
            ValueError: If the source has no batch.
        """
        if self._element_spec is None:
            feed = self._current_feed
            stream = self._waiting if feed is None else feed.stream_of(self._progress)
            if stream is None or stream.position.is_exhausted:
                stream = self.open_stream(Position(epoch=self._next_epoch))
                self._waiting = stream
            has_none = stream.element_spec is None and stream.peek() is None
            if has_none and stream.position.source is not None:
                # The pass was saved behind its last batch; another one has some.
                stream = self.open_stream(Position(epoch=self._next_epoch))
            if stream.element_spec is None and stream.peek() is None:
                raise ValueError(
                    f"The source ({self._source.name}) has no batches, so there is no "
                    "`element_spec`. Pass a data set with at least one example."
                )
            spec = self._make_splitter(exact=False).get_global_spec(
                stream.element_spec, stream.full_size or 0
            )
            self._element_spec = self.gather.rows(spec)
        return self._element_spec

    @property
    def source_name(self) -> str:
        """The kind of source, as messages call it."""
        return self._source.name

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
                f"The source ({self._source.name}) cannot be repositioned, so a "
                "checkpoint cannot hold its position. Use "
                "`armillary.data.from_arrays`, `from_tfrecords` or a Grain dataset, "
                "return iterators with `get_state` and `set_state`, or leave the "
                "dataset out of the checkpoint."
            )

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the batches used, as `json.dumps` accepts it.

        Within a pass, what the order of the examples depends on belongs to it, as far
        as it is known: their number, the seed, and a fingerprint of the data.

        Raises:
            DatasetStateError: If the source cannot be repositioned.
        """
        self.check_repositionable()
        position = self._progress.position
        state = encode_position(position, self._source.name)
        if not position.is_between_passes and (order := self._order):
            state[_ORDER] = order
        if not self.is_agreed:
            return state
        peers = self.layout.peers
        assert peers is not None
        states = peers.gather("the position in the data", json.dumps(state))
        return {_PIPELINES: [json.loads(text) for text in states]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` returned.

        The iterator or loop that began last continues from there, if it is still in
        use; batches that it has read ahead are dropped. Otherwise the next one does.

        Raises:
            DatasetStateError: If the source cannot be repositioned, or the state does
                not fit it, such as one of another order of the examples. The position
                is then what it was.
        """
        self.check_repositionable()
        if self.ignores_state:
            return
        state = self._select(state)
        position = decode_position(state, self._source.name)
        if not position.is_between_passes:
            check_same_order(state.get(_ORDER, {}), self._order)
        feed = self._current_feed
        if feed is None:
            self._waiting = self.open_stream(position)
            self._progress = Progress(position)
        else:
            feed.move(self._progress, position)
            self._waiting = None
        self._next_epoch = position.epoch + 1

    @property
    def _order(self) -> dict[str, Any]:
        # Of the source as it was given, and not of the numbers of its rows.
        return getattr(self.source, "order_of_examples", {})

    def _select(self, state: dict[str, Any]) -> dict[str, Any]:
        # The part for this process, of as many as there were.
        states = state.get(_PIPELINES) if isinstance(state, dict) else None
        peers = self.layout.peers if self.is_agreed else None
        if states is None and peers is None:
            return state
        saved = 1 if states is None else len(states)
        count = 1 if peers is None else peers.count
        if states is None or peers is None or saved != count:
            raise DatasetStateError(
                f"`state` holds the positions of {saved} input pipelines, but the "
                f"program has {count}, one for each process that reads data of its "
                "own. Restore on as many processes, or distribute one data set over "
                "all of them (`strategy.distribute_dataset`): its position fits any "
                "number."
            )
        return states[peers.index]
