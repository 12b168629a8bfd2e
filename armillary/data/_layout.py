"""Options of distributed data, and the interface to the layout of a strategy."""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from armillary._checks import (
    check_not_negative_int,
    check_one_of,
    check_positive_int,
)
from armillary.cluster._peers import Peers
from armillary.errors import BatchSizeError
from armillary.typing import PyTree


@dataclass(frozen=True)
class InputContext:
    """The input pipeline that a dataset function builds.

    A function given to `distribute_datasets_from_function` gets an `InputContext`. It
    reads its share of the data, such as
    `images[input_pipeline_id::num_input_pipelines]`, and batches it for one replica.
    `docs/data/batch_sizes.md` has an example.

    Args:
        num_input_pipelines: The number of pipelines that share the data. Usually, each
            process has its own pipeline. Under a `ShardedStrategy`, processes whose
            devices need the same examples have one pipeline together.
        input_pipeline_id: The number of this pipeline, from 0.
        num_replicas_in_sync: Replicas that share one global batch, in all processes.
            Under a `ShardedStrategy` over several processes, the devices of a pipeline
            count as one replica.

    Raises:
        ValueError: If a count is not positive, or the id is not below the number of
            pipelines.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        check_positive_int("num_input_pipelines", self.num_input_pipelines)
        check_positive_int("num_replicas_in_sync", self.num_replicas_in_sync)
        most = self.num_input_pipelines - 1
        check_not_negative_int("input_pipeline_id", self.input_pipeline_id, most)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of examples that each replica takes of a global batch.

        Args:
            global_batch_size: Examples in one step on all replicas together.

        Raises:
            ValueError: If `global_batch_size` is not a positive integer.
            BatchSizeError: If the replicas cannot share it equally.
        """
        size = check_positive_int("global_batch_size", global_batch_size)
        num_replicas = self.num_replicas_in_sync
        if size % num_replicas:
            raise BatchSizeError(
                f"`global_batch_size` is {size}, which {num_replicas} replicas cannot "
                f"share equally ({size} % {num_replicas} = {size % num_replicas}). "
                f"Use a multiple of {num_replicas}."
            )
        return size // num_replicas


Remainder: TypeAlias = Literal["exact", "drop", "pad"] | None


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Options of a distributed dataset.

    Args:
        remainder: The rule for a batch that the replicas cannot share equally. The
            *full size* below is the size of the dataset's first batch.

            - `None`: it is a `BatchSizeError`. Complete evaluations (`eval_steps=-1`)
              do not need equal shares: they run every example exactly once.
            - `"exact"`: it is still one step, with the gradient and the metrics of a
              single replica. The step runs on fewer replicas: as many as can share the
              batch equally and divide the devices. Each replica then has several
              devices, which do the same work. For example, with 4 devices, 42 examples
              run on 2 replicas of 21, and 41 examples run on 1 replica. The loss must
              be scaled in the step, by `compute_average_loss`, or by the
              `num_replicas_in_sync` that is read there.
            - `"drop"`: a batch smaller than the full size is dropped. From any other
              batch, the last rows that do not fill an equal share are dropped. Shapes
              never change, and some examples are not seen.
            - `"pad"`: every batch gets a boolean leaf of shape `(batch,)`: the entry
              `mask` of a dictionary, the last item of a tuple or a list. A batch
              smaller than the full size (rounded up to equal shares) is filled with
              copies of its last row, where the mask is False. Shapes never change, and
              every example is seen.

            With datasets from a function, the full size is the size of one replica's
            batch. If the data ends before every replica has a batch, `"drop"` leaves
            these batches out, and `"pad"` gives the replicas without data a batch that
            is only padding.
        prefetch: Distributed batches that a background thread reads and places ahead of
            the program. Compiled loops read one chunk ahead, unless this is 0. With 0,
            batches are read on demand, in the caller's thread.
        place_on_device: Whether the arrays of a dataset from `from_arrays` stay in the
            memory of every device, so that only row numbers travel with each batch. The
            examples of every batch and the saved positions do not depend on it. So a
            run may continue with a different value. The arrays are placed when they are
            first used.

    Raises:
        ValueError: If `remainder` or `place_on_device` is not one of its values, or
            `prefetch` is negative.
    """

    remainder: Remainder = None
    prefetch: int = 2
    place_on_device: bool = False

    def __post_init__(self) -> None:
        check_one_of("remainder", self.remainder, (None, "exact", "drop", "pad"))
        check_not_negative_int("prefetch", self.prefetch)
        check_one_of("place_on_device", self.place_on_device, (True, False))


Active: TypeAlias = tuple[int, ...]
"""The numbers of the replicas that have data, in their order."""


@functools.cache
def first_replicas(count: int) -> Active:
    return tuple(range(count))


def are_first(active: Active) -> bool:
    return active == first_replicas(len(active))


def describe_active(active: Active) -> str:
    """Returns the number of replicas with data, or their numbers if it says too little.

    Usually, only the last replicas have no data.
    """
    return str(len(active)) if are_first(active) else str(active)


Pipelines: TypeAlias = tuple[tuple[int, ...], ...]
"""The processes of each input pipeline."""
ONE_PIPELINE: Pipelines = ((0,),)

Index: TypeAlias = tuple[slice, ...]
"""A part of an array: a slice for each of its first axes."""


class BatchLayout(Protocol):
    """Places host arrays on the devices of the replicas.

    If it is `stacked`, leaves have shape `(num_replicas, per_replica_batch, ...)`, and
    a process has the rows of its `local_replicas`. Otherwise, leaves have shape
    `(batch, ...)`, and each process has all rows, or the rows of its input pipeline if
    there are several `pipelines`. `num_replicas` counts the replicas of all processes,
    `peers`. `devices` are the devices of this process. A batch has at most `num_shares`
    parts.
    """

    @property
    def num_replicas(self) -> int: ...
    @property
    def local_replicas(self) -> range: ...
    @property
    def peers(self) -> Peers: ...
    @property
    def pipelines(self) -> Pipelines: ...
    @property
    def stacked(self) -> bool: ...
    @property
    def num_shares(self) -> int: ...
    @property
    def devices(self) -> Collection[Any]: ...

    def place(
        self, arrays: PyTree, leading_axes: int = 0, num_replicas: int | None = None
    ) -> PyTree:
        """Returns host arrays as device arrays; called from background threads too."""

    def own_parts(self, shape: tuple[int, ...], leading_axes: int) -> Sequence[Index]:
        """Returns the parts that `place` takes from an array of this process."""
        ...

    def count_parts(self, num_examples: int) -> int:
        """Returns the number of different parts of a batch that devices hold."""
        ...

    def placed_types(self, types: PyTree, leading: tuple[int, ...] = ()) -> PyTree:
        """Returns the types of the arrays that `place` returns, with shardings."""

    def replicate(self, arrays: PyTree) -> PyTree:
        """Returns host arrays as device arrays, with all of them on every replica."""

    def gather(self, arrays: PyTree, rows: Any) -> PyTree:
        """Returns the rows of a batch, which each replica takes on its own device."""

    def wrap(self, arrays: PyTree, active: Active) -> PyTree:
        """Returns placed arrays as the values that a user's step receives."""

    def of_pipelines(self) -> "BatchLayout":
        """Returns the layout of datasets that differ between input pipelines."""
        ...

    def of_strategy(self) -> "BatchLayout":
        """Returns the layout of the strategy, from which `of_pipelines` made this."""
        ...


def find_pipeline(layout: BatchLayout) -> int:
    """Returns the number of the input pipeline of this process."""
    (own,) = (
        number
        for number, processes in enumerate(layout.pipelines)
        if layout.peers.index in processes
    )
    return own


def count_own_batches(layout: BatchLayout) -> int:
    """Returns the number of batches of input pipelines in one distributed batch."""
    return layout.num_replicas if layout.stacked else len(layout.pipelines)


def hosted_replicas(local: range, num_devices: int, num_replicas: int) -> range:
    """Returns the replicas on the devices `local`, if there are fewer than devices.

    For example, with 2 replicas on 4 devices, devices 0 and 1 run replica 0.
    """
    num_copies = num_devices // num_replicas
    return range(local.start // num_copies, -(-local.stop // num_copies))
