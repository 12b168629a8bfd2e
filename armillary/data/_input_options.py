"""How batches become distributed batches."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from armillary._checks import answers_old_names, check_not_negative_int, check_one_of

Remainder: TypeAlias = Literal["exact", "drop", "pad"] | None


@answers_old_names(
    experimental_fetch_to_device="Leave it out: batches are always on the devices.",
    experimental_per_replica_buffer_size="It is called `prefetch` here.",
    experimental_place_dataset_on_device="It is called `place_on_device` here.",
    experimental_replication_mode="Leave it out: a function with an `input_context` "
    "makes one data set for each process.",
)
@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Options of a distributed dataset.

    Args:
        remainder: What happens to a batch that the replicas cannot share equally. The
            *full size* below is the size of the data set's first batch.

            - `None`: it is a `BatchSizeError`. Complete evaluations (`eval_steps=-1`)
              do not need equal shares: they run every example exactly once.
            - `"exact"`: it is one step all the same, with the gradient and the metrics
              that one replica would have. It runs on as many replicas as can share it
              equally and divide the devices, each on several devices that do the same
              work: 42 examples on 4 devices are 2 replicas of 21, and 41 examples are 1
              replica. Such a step takes longer and needs more memory. The loss must be
              scaled in the step, by `compute_average_loss` or by the
              `num_replicas_in_sync` that is read there. In a complete evaluation it is
              the same as `None`.
            - `"drop"`: a batch smaller than the full size is dropped whole. Of any
              other, the last rows that do not fill an equal share are dropped. Shapes
              never change, and some examples are not seen.
            - `"pad"`: every batch gets a boolean leaf of shape `(batch,)`: the entry
              `mask` of a dictionary, the last item of a tuple or a list. A batch
              smaller than the full size (rounded up to equal shares) is filled with
              copies of its last row, where the mask is False. Shapes never change, and
              every example is seen.

            With datasets from a function, the full size is that of one replica's batch.
            When the data ends before every replica has one, `"drop"` leaves that group
            out, and `"pad"` gives the replicas without data a batch of padding alone.
        prefetch: Distributed batches that a background thread reads and places ahead of
            the program. Compiled loops read one chunk ahead, unless this is 0. 0 reads
            on demand, in the caller's thread.
        place_on_device: Whether the arrays of a data set from `from_arrays` stay in the
            memory of every device, so that only row numbers travel with each batch.
            Nothing else changes: the examples of every batch, and saved positions, are
            those of a run without it, so it may differ between a run and its
            continuation. The arrays are placed when they are first used.

    Raises:
        ValueError: If `remainder` or `place_on_device` is another value, or `prefetch`
            is negative.
    """

    remainder: Remainder = None
    prefetch: int = 2
    place_on_device: bool = False

    def __post_init__(self) -> None:
        check_one_of("remainder", self.remainder, (None, "exact", "drop", "pad"))
        check_not_negative_int("prefetch", self.prefetch)
        check_one_of("place_on_device", self.place_on_device, (True, False))
