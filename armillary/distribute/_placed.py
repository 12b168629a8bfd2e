"""The devices of a strategy, and the place of state and batches on them.

`Placed` is the base of all strategies. It reads the `Placement` and runs nothing.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, Sharding

from armillary._copy_refusal import OfOneProcess
from armillary.cluster._peers import Peers
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.data._layout import BatchLayout, InputContext, find_pipeline
from armillary.distribute._dispatch import Dispatch
from armillary.distribute._placement import Placement
from armillary.distribute.replica._axis import DEFAULT_AXIS_NAME
from armillary.distribute.replica._context import get_running_context
from armillary.distribute.replica._program_mesh import without_program_mesh
from armillary.xla._lowerings import Split


class Placed(OfOneProcess):
    """Describes the devices of a strategy.

    Args:
        placement: The devices, and the place of state and batches on them.
        axis_name: The name of the axis of replicas inside `run`.
    """

    _why_not_copied = "it stands for the devices of this process"
    _copy_instead = (
        "Make the strategy, and the trainers that hold it, in the process that uses "
        "them. To pass on a trained state, save a `Checkpoint`, or copy the state "
        "(`nnx.clone(model)`, or `trainer.state` of a `StepTrainer`)."
    )

    default_device: Any = None
    """The device of arrays that are made in the scope; `None` for JAX's default."""

    def __init__(
        self, placement: Placement, axis_name: str = DEFAULT_AXIS_NAME
    ) -> None:
        self.placement = placement
        self.axis_name = axis_name
        self.dispatch = Dispatch(placement.mesh)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of copies of the step that run together.

        They divide a global batch. Inside `run`, it is the number of replicas in this
        call: it is smaller for an uneven batch of a dataset with
        `InputOptions(remainder="exact")`.
        """
        context = get_running_context(self)
        if context is None:
            return self.placement.num_replicas
        return context.num_replicas_in_sync

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of devices; `None` for a strategy on a single device."""
        return self.placement.mesh

    @property
    def platform(self) -> str:
        """The kind of device that steps run on, such as `"cpu"`."""
        return self.placement.platform

    @property
    def layout(self) -> BatchLayout:
        """The placement of the batches of a distributed dataset."""
        return self.placement.layout

    @property
    def peers(self) -> Peers:
        """The processes that this strategy spans, of which one may be alone."""
        return self.placement.peers

    @property
    def home(self) -> Sharding | None:
        """The place of state between programs; `None` if programs leave it in place."""
        return self.placement.home

    @property
    def split(self) -> Split | None:
        """The division of examples, if XLA divides a step between devices itself."""
        return self.placement.split

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that described the cluster; `None` for one process."""
        return None

    @property
    def input_context(self) -> InputContext:
        """The share of the data that this process reads.

        Raises:
            ValueError: If the mesh of a `ShardedStrategy` gives no equal shares to the
                processes.
        """
        layout = self.layout.of_pipelines()
        num_replicas = self.num_replicas_in_sync
        return InputContext(
            num_input_pipelines=len(layout.pipelines),
            input_pipeline_id=find_pipeline(layout),
            num_replicas_in_sync=max(num_replicas, len(layout.pipelines)),
        )

    @contextlib.contextmanager
    def described(self, num_devices: int, platform: str) -> Iterator[AbstractMesh]:
        """Makes this strategy trace programs for devices that are not present.

        The context manager gives the mesh of these devices. In a job of several
        processes, each process may make the same plan, and needs no other process.

        Raises:
            ValueError: If the strategy is for one device.
        """
        present = self.placement
        if present.mesh is None:
            raise ValueError(
                f"The strategy is {self!r}, which is for one device. Plan with "
                "`armillary.MirroredStrategy()`, for any number of devices."
            )
        self.placement = present.abstract(num_devices, platform)
        try:
            # The mesh of the devices that are present may be set.
            with self.leave_program_mesh():
                yield self.placement.mesh
        finally:
            self.placement = present

    def leave_program_mesh(self) -> AbstractContextManager[Any]:
        """Returns a context in which a mesh of the program (`jax.set_mesh`) is not set.

        A strategy computes on its own devices.
        """
        return without_program_mesh()

    def jax_settings(self) -> AbstractContextManager[Any]:
        """Returns a context with the settings of JAX for the code in the scope."""
        if self.default_device is None:
            return contextlib.nullcontext()
        return jax.default_device(self.default_device)

    def __repr__(self) -> str:
        count = self.num_replicas_in_sync
        return f"{type(self).__name__}({count} replica{'' if count == 1 else 's'})"
