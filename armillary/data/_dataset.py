"""Datasets that yield batches spread over replicas, with positions to save."""

import contextlib
import functools
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from armillary._copy_refusal import OfOneProcessOnceUsed, refuse_copy
from armillary._logging import logger
from armillary.data._iterator import DistributedIterator
from armillary.data._layout import (
    ONE_PIPELINE,
    BatchLayout,
    InputContext,
    InputOptions,
    find_pipeline,
)
from armillary.data.feed._ahead import Peekable
from armillary.data.feed._feed import Feed
from armillary.data.feed._input import Input
from armillary.data.feed._position import (
    Position,
    check_same_order,
    decode_position,
    encode_position,
    log_new_size,
)
from armillary.data.feed._reader import BatchReader
from armillary.data.feed._split import Splitter
from armillary.data.feed._stream import SourceBatch
from armillary.data.sources._libraries import as_source
from armillary.errors import DatasetStateError
from armillary.typing import Batch, PyTree

_PIPELINES = "pipelines"
_ORDER = "order"


class _Loan:
    """The reader that moves the position of a dataset, and who uses it.

    Attributes:
        reader: The reader.
        feed: A reference to the feed that the reader belongs to, if it is known.
    """

    def __init__(
        self, reader: BatchReader, owner: "weakref.ref[Any] | None" = None
    ) -> None:
        self.reader = reader
        self.feed: weakref.ref[Feed[Any]] | None = None
        self._owner = owner

    def is_for(self, owner: Any) -> bool:
        """Returns whether the reader reads for a trainer."""
        return owner is not None and self._get_owner() is owner

    def open_feed(self) -> Feed[Any] | None:
        """Returns the feed of the reader, if it is in use and not closed."""
        feed = None if self.feed is None else self.feed()
        return None if feed is None or feed.is_closed else feed

    @property
    def is_read_by_a_trainer(self) -> bool:
        """True if a trainer is in the middle of the data."""
        is_in_use = self._get_owner() is not None and self.open_feed() is not None
        return is_in_use and not self.reader.used.is_exhausted

    def _get_owner(self) -> Any:
        return None if self._owner is None else self._owner()


def open_feed(
    datasets: "Sequence[DistributedDataset]",
    *,
    in_pieces: bool,
    begins_anew: bool = False,
    name: str | None = None,
    owner: Any = None,
    reads_ahead: bool = True,
) -> Feed[Any]:
    """Returns a feed of the batches of some datasets, for one loop.

    Args:
        datasets: The datasets, from which one step may take batches together.
        in_pieces: Whether batches that replicas cannot share come in pieces, as in an
            evaluation.
        begins_anew: Whether the next pass begins, if the last pass has ended.
        name: The name of the step, for which processes compare their batches.
        owner: The trainer that reads, if its position is to be saved.
        reads_ahead: Whether processes may read batches that they must agree on ahead.
    """
    readers = [
        dataset.open_reader(
            in_pieces=in_pieces,
            begins_anew=begins_anew,
            owner=owner,
            reads_ahead=reads_ahead,
        )
        for dataset in datasets
    ]
    feed: Feed[Any] = Feed(readers, name)
    for dataset, reader in zip(datasets, readers, strict=True):
        dataset.note_feed(reader, feed)
    return feed


class DistributedDataset(OfOneProcessOnceUsed):
    """Spreads the batches of a source over the replicas of a layout.

    Every `iter` begins the next pass over the source (the next *epoch*)::

        for batch in dataset:           # or: iterator = iter(dataset); next(iterator)
            strategy.run(step_fn, args=(batch,))

    If the source can save and restore its position, so can the dataset (`get_state`,
    `set_state`). It is the position after the batches that the program has used.
    Batches that were read ahead do not count. It does not depend on the number of
    replicas.

    In a job of several processes, each process keeps the rows of its own replicas. If
    rows have numbers, as in `from_arrays`, it reads only these rows of a global batch,
    and otherwise all of them. With per-replica batches, each process has
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
        "Pass on the dataset that it was made from, and distribute that in the "
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
        self.source = as_source(source)
        self.layout = layout
        self.options = options or InputOptions()
        self.per_replica_batches = per_replica_batches
        self.input = Input(self.source, layout, self.options, per_replica_batches)
        """The source and its way to a step, which the parts of a feed share."""
        self.ignores_state = False
        """True if `set_state` changes nothing, for a process that does not train."""
        self.dataset_fn: Callable[[InputContext], Any] | None = None
        """The function that made the source, for code that needs a similar source."""
        # The reader whose position is the position of this dataset.
        self._loan: _Loan | None = None
        # Unused batches that were opened for a look, or at a restored position.
        self._waiting: tuple[Position, Peekable[SourceBatch]] | None = None
        self._position = Position()
        self._next_epoch = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self._loan is not None:
            # A copy would share the reader, and so move the position of both.
            raise refuse_copy(f"A `{type(self).__name__}`", self)
        return super().__deepcopy__(memo)

    def __iter__(self) -> "DistributedIterator":
        """Returns an iterator over the next pass, or the rest of a restored pass."""
        open_pass = functools.partial(
            open_feed, [self], in_pieces=False, begins_anew=True
        )
        return DistributedIterator(open_pass, self.layout, self.prefetch)

    @property
    def source_name(self) -> str:
        """The kind of source, for messages."""
        return self.input.name

    @property
    def is_endless(self) -> bool:
        """True if it is known to repeat its data forever."""
        return self.input.is_endless

    @property
    def num_global_batches(self) -> int | None:
        """The number of batches in one pass over the source; `None` if unknown."""
        return getattr(self.input.read_source, "num_batches", None)

    @property
    def prefetch(self) -> int:
        """The number of batches to place ahead.

        It is 0 if processes must agree on batches, which they then only read ahead.
        """
        return 0 if self.input.is_agreed else self.options.prefetch

    def open_reader(
        self,
        *,
        in_pieces: bool,
        begins_anew: bool,
        owner: Any = None,
        reads_ahead: bool = True,
    ) -> BatchReader:
        """Returns the reader for a feed; the arguments are the same as of `open_feed`.

        Its position is the position of this dataset from now on, unless it only looks
        at data that a trainer reads.
        """
        if in_pieces and self.is_repositionable:
            # An evaluation reads the first pass each time, and moves no position.
            first = Position()
            return BatchReader(
                self.input, first, self.input.read(first), in_pieces=True
            )
        loan = self._loan
        is_owners = loan is not None and loan.is_for(owner)
        start = self._find_start(begins_anew=begins_anew, continues=is_owners)
        reader = BatchReader(
            self.input, *start, in_pieces=in_pieces, reads_ahead=reads_ahead
        )
        if loan is not None and loan.is_read_by_a_trainer:
            if owner is None:
                return reader
            if not is_owners:
                logger.warning(
                    "Two trainers read one distributed dataset. It has only one "
                    "position to save, the position of the second trainer. Distribute "
                    "the source for each trainer."
                )

        # From now on, the position of the new reader is the position to save.
        position, _ = start
        self._loan = _Loan(reader, None if owner is None else weakref.ref(owner))
        self._waiting = None
        self._next_epoch = position.epoch + 1
        return reader

    def note_feed(self, reader: BatchReader, feed: Feed[Any]) -> None:
        """Notes the feed that a reader belongs to, which `set_state` may move."""
        if self._loan is not None and self._loan.reader is reader:
            self._loan.feed = weakref.ref(feed)

    def _find_start(
        self, *, begins_anew: bool, continues: bool
    ) -> tuple[Position, Peekable[SourceBatch]]:
        """Returns the position that the next reader begins at, and its batches."""
        waiting = self._waiting
        if continues and self.is_repositionable and not begins_anew:
            assert self._loan is not None
            used = self._loan.reader.used
            if not used.is_exhausted:
                waiting = (used, self.input.read(used))
        if waiting is None or (waiting[0].is_exhausted and begins_anew):
            return self._open_next()
        return waiting

    def _open_next(self) -> tuple[Position, Peekable[SourceBatch]]:
        position = Position(epoch=self._next_epoch)
        return position, self.input.read(position)

    def global_batches(self, epoch: int) -> Iterator[Batch]:
        """Yields the batches of one pass over the source, on the host, undivided."""
        for batch in self.input.read(Position(epoch=epoch)):
            yield self.input.gather.on_host(batch.arrays)

    @property
    def element_spec(self) -> PyTree:
        """A `jax.ShapeDtypeStruct` for each leaf of the first global batch.

        Reads one batch of the source, if none was read yet, without using it.

        Raises:
            ValueError: If the source has no batch.
        """
        if self.input.first is None:
            batches = None if self._loan is None else self._loan.reader.batches
            if batches is None:
                self._waiting = self._waiting or self._open_next()
                _, batches = self._waiting
            with contextlib.suppress(StopIteration):
                batches.head()
        if self.input.first is None and self.is_repositionable:
            # The position is after the last batch of a pass, so read the next pass.
            _, batches = self._open_next()
            next(batches, None)
        if self.input.first is None:
            raise ValueError(
                f"The source ({self.source_name}) has no batches, so there is no "
                "`element_spec`. Pass a dataset with at least one example."
            )
        types, position = self.input.first
        splitter = Splitter(self.input, in_pieces=False)
        distributed = splitter.distributed_types(types, position.full_size or 0)
        return self.input.gather.rows(distributed)

    @property
    def is_repositionable(self) -> bool:
        """True if the position can be saved and restored."""
        return self.input.is_repositionable

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
        loan = self._loan
        position = self._position if loan is None else loan.reader.used
        state = encode_position(position, self.source_name)
        order = {} if position.is_between_passes else self._order
        if order:
            state[_ORDER] = order
        if not self.input.is_agreed:
            return state
        texts = self.layout.peers.gather("the position in the data", json.dumps(state))
        # Processes of one pipeline have the same position.
        firsts = [texts[processes[0]] for processes in self.layout.pipelines]
        return {_PIPELINES: [json.loads(text) for text in firsts]}

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
            log_new_size(position.full_size, self.source.full_size, self.source_name)
            is_indexed = self.input.is_indexed
            if is_indexed and not self.is_endless and "epoch" in position.source:
                # The state of a repeating source counts all epochs as one pass.
                position = replace(position, epoch=position.source["epoch"])

        loan = self._loan
        feed = None if loan is None else loan.open_feed()
        if loan is not None and feed is not None:
            own = loan.reader
            positions = [
                position if reader is own else reader.used for reader in feed.readers
            ]
            feed.seek(positions)
            self._waiting = None
        else:
            self._waiting = (position, self.input.read(position))
            self._loan = None
            self._position = position
        self._next_epoch = position.epoch + 1

    @property
    def _order(self) -> dict[str, Any]:
        # From the user's source, because the source that is read may yield only row
        # numbers.
        return getattr(self.source, "order_of_examples", {})

    def _select(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of a saved state for this process."""
        states = state.get(_PIPELINES, [state])
        is_agreed = self.input.is_agreed
        pipelines = self.layout.pipelines if is_agreed else ONE_PIPELINE
        if len(states) == len(pipelines):
            return states[find_pipeline(self.layout)] if is_agreed else states[0]

        # Between two passes, no pipeline has examples left to read, however many there
        # are. The places where the old pipelines ended mean nothing to the new ones.
        places = {(part.get("epoch"), part.get("exhausted")) for part in states}
        if len(places) > 1 or not all(map(_is_between_passes, states)):
            raise DatasetStateError(
                f"`state` holds the positions of {len(states)} input pipelines, but "
                f"the program has {len(pipelines)}. Each of them reads data of its own "
                "(a function with an `input_context`), so its position is valid for it "
                "alone. Restore on the same number of processes, or under a "
                "`ShardedStrategy`, with a mesh that has as many pipelines. A dataset "
                "that all processes share, such as `strategy.distribute_dataset("
                "armillary.data.from_random_access(...))`, continues on any number. To "
                "read this data from the beginning, leave the dataset out of the "
                "checkpoint."
            )
        return states[0] | {"source": None}


def _is_between_passes(state: dict[str, Any]) -> bool:
    """Returns whether a saved position of one pipeline is at the end of a pass."""
    has_begun_none = "source" in state and state["source"] is None
    return has_begun_none or state.get("exhausted", False)
