"""Which share of the data this process reads."""

from dataclasses import dataclass

from armillary._checks import check_not_negative_int, check_positive_int
from armillary.errors import BatchSizeError


@dataclass(frozen=True)
class InputContext:
    """Tells a dataset function which input pipeline it builds.

    A function given to `distribute_datasets_from_function` gets one, reads its share of
    the data and batches it for one replica::

        def make_train_data(input_context):
            batch_size = input_context.get_per_replica_batch_size(global_batch_size)
            shard = slice(
                input_context.input_pipeline_id,
                None,
                input_context.num_input_pipelines,
            )
            arrays = {"image": images[shard], "label": labels[shard]}
            return armillary.data.from_arrays(arrays, batch_size=batch_size)

    Args:
        num_input_pipelines: How many pipelines read the data together, one in each
            process.
        input_pipeline_id: Which of them this one is, from 0.
        num_replicas_in_sync: Replicas that share one global batch, in all processes.

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
        check_not_negative_int("input_pipeline_id", self.input_pipeline_id)
        if self.input_pipeline_id >= self.num_input_pipelines:
            raise ValueError(
                f"`input_pipeline_id` is {self.input_pipeline_id}, but it must be "
                f"below `num_input_pipelines`, which is {self.num_input_pipelines}. "
                f"Use an id from 0 to {self.num_input_pipelines - 1}."
            )

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
            sizes = name_fitting_sizes(size, num_replicas, "global_batch_size=")
            raise BatchSizeError(
                f"`global_batch_size` is {size}, which {num_replicas} replicas cannot "
                f"share equally ({size} % {num_replicas} = {size % num_replicas}). "
                f"Use a multiple of {num_replicas}, such as {sizes}."
            )
        return size // num_replicas


def name_fitting_sizes(size: int, num_replicas: int, prefix: str = "") -> str:
    """Returns the multiples of `num_replicas` next to `size`, as text to paste."""
    below = size - size % num_replicas
    fitting = [below, below + num_replicas] if below else [num_replicas]
    return " or ".join(f"`{prefix}{candidate}`" for candidate in fitting)
