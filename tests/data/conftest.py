"""A layout without a strategy, and helpers that read its batches."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from armillary.cluster._peers import ALONE
from armillary.data import DistributedDataset
from armillary.data._layout import Active, Index
from armillary.data.feed._piece import Piece
from armillary.typing import PyTree
from tests.feeds import open_reader, wait_until


class HostValues(NamedTuple):
    """The batch that `HostLayout` gives to a step."""

    arrays: PyTree
    active: Active


class HostLayout:
    """Keeps arrays on the host, with a replica axis unless `stacked` is False."""

    def __init__(self, num_replicas: int = 1, stacked: bool = True) -> None:
        self.num_replicas = num_replicas
        self.local_replicas = range(num_replicas)
        self.peers = ALONE
        self.pipelines = ((0,),)
        self.stacked = stacked

    def place(
        self, arrays: PyTree, leading_axes: int = 0, num_replicas: int | None = None
    ) -> PyTree:
        if self.stacked:
            for leaf in jax.tree.leaves(arrays):
                assert leaf.shape[leading_axes] == (num_replicas or self.num_replicas)
        return arrays

    def own_parts(self, shape: tuple[int, ...], leading_axes: int) -> list[Index]:
        return [(slice(None),) * len(shape)]

    def wrap(self, arrays: PyTree, active: Active) -> HostValues:
        return HostValues(arrays, active)


def read_examples(arrays: Any, active: Active) -> list[int]:
    """Returns the values that the active replicas see, in order."""
    return np.asarray(arrays)[list(active)].reshape(-1).tolist()


@pytest.fixture(scope="session")
def make_layout() -> type[HostLayout]:
    return HostLayout


@pytest.fixture(scope="session")
def examples() -> Callable[[Any, Active], list[int]]:
    return read_examples


@pytest.fixture(scope="session")
def read_all() -> Callable[[DistributedDataset, bool], list[Piece]]:
    """Returns a function that reads a pass over a dataset, as rows."""

    def read(dataset: DistributedDataset, in_pieces: bool) -> list[Piece]:
        reader = open_reader(dataset, in_pieces=in_pieces)
        return [
            dataclasses.replace(batch, arrays=reader.data.gather.on_host(batch.arrays))
            for batch in reader
        ]

    return read


@pytest.fixture
def prefetch_threads() -> Iterator[Callable[[], list[threading.Thread]]]:
    """Returns what lists the threads that read ahead; in the end none is left."""
    others = set(threading.enumerate())  # Other tests may hold iterators still.

    def find() -> list[threading.Thread]:
        new = set(threading.enumerate()) - others
        return [thread for thread in new if thread.name == "armillary-prefetch"]

    yield find
    wait_until(lambda: not find())
