"""The input of a loop: a source, and the ways in which its batches reach a step."""

from dataclasses import dataclass, field

import jax

from armillary.data._layout import BatchLayout, InputOptions
from armillary.data.feed._ahead import Peekable
from armillary.data.feed._gather import Gather, make_gather
from armillary.data.feed._position import Position
from armillary.data.feed._stream import SourceBatch, read_batches
from armillary.data.sources._arrays import IndexedDataset
from armillary.data.sources._source import Source
from armillary.typing import PyTree


@dataclass(eq=False)
class Input:
    """A source of batches, their place on devices, and how to treat remainders.

    Every part of a feed shares it. Only the types of the first batch are added later.

    Attributes:
        source: The source, as the user has given it.
        layout: The placement of batches on devices.
        options: How to treat batches of unequal size, and how far to read ahead.
        per_replica_batches: Whether each batch of the source is for one replica.
        read_source: The source that is read: `source`, or its row numbers.
        gather: The way from read batches to the batches of a step.
        first: The types of the first batch and its position, once it was read.
    """

    source: Source
    layout: BatchLayout
    options: InputOptions
    per_replica_batches: bool = False
    read_source: Source = field(init=False)
    gather: Gather = field(init=False)
    first: SourceBatch | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        made = make_gather(
            self.source,
            self.layout,
            self.options,
            is_shared=not self.per_replica_batches,
        )
        self.read_source, self.gather = made

    @property
    def name(self) -> str:
        """The kind of source, for messages."""
        return self.read_source.name

    @property
    def is_endless(self) -> bool:
        """True if it is known to repeat its data forever."""
        return getattr(self.source, "is_endless", False)

    @property
    def is_repositionable(self) -> bool:
        """True if the position can be saved and restored."""
        return self.read_source.is_repositionable

    @property
    def is_indexed(self) -> bool:
        """True if the examples have numbers, so that processes can compare them."""
        return isinstance(self.source, IndexedDataset)

    @property
    def is_agreed(self) -> bool:
        """True if processes that read data of their own agree on each batch."""
        return self.per_replica_batches and not self.layout.peers.is_alone

    @property
    def types(self) -> PyTree | None:
        """The types of the first batch of the source; `None` before it was read."""
        return None if self.first is None else self.first.arrays

    def read(self, position: Position) -> Peekable[SourceBatch]:
        """Returns the batches of one pass over the source, from a position on."""
        return read_batches(self.read_source, position, self._note_first)

    def _note_first(self, batch: SourceBatch) -> None:
        if self.first is None:
            types = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch.arrays
            )
            self.first = SourceBatch(types, batch.position)
