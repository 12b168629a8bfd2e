"""Parameters and optimizer state split over devices, by the compiler."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from armillary.cluster._communication import CommunicationOptions
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.distribute._global_arrays import is_key
from armillary.distribute.program._function import FunctionCache
from armillary.distribute.replica._axis import (
    DEFAULT_AXIS_NAME,
    check_axis_name,
    find_free_name,
)
from armillary.distribute.replica._context import lifted_shardings, lifted_state
from armillary.distribute.replica._policy import check_annotations
from armillary.distribute.replica._program_mesh import (
    within_mesh,
    without_program_mesh,
)
from armillary.distribute.replica._run_alone import run_alone
from armillary.distribute.strategies._axis_names import with_axis_names
from armillary.distribute.strategies._collection import collect_at_use
from armillary.distribute.strategies._layouts import MeshLayout
from armillary.distribute.strategies._mesh import (
    MeshChoice,
    check_mesh,
    choose_batch_axes,
    choose_growing_axis,
    make_mesh,
)
from armillary.distribute.strategies._multi_worker import JoinedStrategy
from armillary.distribute.strategies._placements import ShardedPlacement
from armillary.distribute.strategies._rules import Rules, check_logical_rules
from armillary.errors import StateStructureError
from armillary.state._lift import State, as_array
from armillary.typing import PyTree
from armillary.xla._lowerings import partitioned


class ShardedStrategy(JoinedStrategy):
    """One replica that spans all devices, each of which holds a part of its state.

    Use it for models that do not fit on one device. The step is the same as under other
    strategies. XLA divides the program of a single device. Batches are split over
    `data` and `fsdp`. Parameters and the state of their optimizer are split over `fsdp`
    (ZeRO-3), and over `tensor` if a rule says so::

        strategy = armillary.ShardedStrategy(
            {"data": 2, "fsdp": 2, "tensor": 2},
            rules={"up/kernel": PartitionSpec("fsdp", "tensor")},
        )

    A step sees the global batch. So `num_replicas_in_sync` is 1, and numbers equal the
    numbers of one device. Batch statistics are over the whole batch.

    In a job of several processes, it joins them, as `MultiWorkerMirroredStrategy` does,
    and uses the devices of all processes. So make it before anything uses a device.
    Each process reads the same global batches, and sends its devices their part.

    Args:
        mesh: One of three:

            - A dictionary from the name of an axis to its number of devices. It may
              have axes of any names. The devices of the last axis are next to each
              other. With no other axes than `data`, `fsdp` and `tensor`, they come in
              this order. By default, all devices are along `fsdp`.
            - A `jax.sharding.Mesh`, such as `jax.make_mesh((2, 4), ("data", "model"))`.
            - A function that returns a `Mesh`. In a job, it is called when the
              processes have joined, so it may use `jax.devices()`.

            A step is divided by XLA, so axes of the type `Explicit` count as `Auto`.
        rules: A dictionary from regular expressions to a `PartitionSpec`. An expression
            is searched for in the paths of parameters (such as `model/first/kernel`),
            and the first expression that is found counts. It counts for parameters that
            are not divided over these devices already, and that the model does not
            annotate. Without a rule, an array of at least 1024 values is split over
            `fsdp`, along the longest axis that the devices divide. All other arrays are
            whole on every device. The state of an optimizer is split like the
            parameters.
        devices: The devices of a mesh that is given by sizes, or their names, in the
            order of the mesh. By default all devices, one process after the other.
        cluster_resolver: Describes this process and the other processes. By default,
            `armillary.cluster.resolve_cluster()` finds the resolver.
        communication_options: The way to exchange values between processes, and the
            time that processes wait for each other.
        axis_name: As for `MirroredStrategy`. The axis has length 1 here, because there
            is one replica. It is not an axis of the mesh. If the mesh has an axis
            `replica`, the default is `"replica_"`.
        logical_rules: A dictionary from the names in a model's annotations, such as
            `"embed"`, to an axis of the mesh, several axes, or `None` to leave an axis
            of the array whole. The name of an axis of the mesh needs no rule.
            Annotations are the sharding metadata of variables of Flax NNX, the boxes of
            Linen, and the layouts of Keras.
        batch_axes: The axes that the examples of a batch are split over. By default
            `data` and `fsdp`, or all axes of a mesh that has neither.
        dcn: A dictionary with the number of groups along an axis, for groups of devices
            with slow links between them (a data-center network): slices of TPUs, or
            else processes. `ShardedStrategy({"data": 4, "fsdp": 8}, dcn={"data": 2})`
            lets only half of `data` cross between two slices, and `fsdp` stays inside.
        mesh_shape: The earlier name of `mesh`.

    Raises:
        ClusterError: If this process must join others, but a device was used before,
            this process has joined another cluster, or it is a `ps`.
        TypeError: If an argument is of the wrong type.
        ValueError: If the mesh has more or fewer devices than there are, a process has
            no device in it, a rule or `batch_axes` does not fit it, devices do not form
            the groups of `dcn`, or `axis_name` is empty or an axis of the mesh.
    """

    def __init__(
        self,
        mesh: MeshChoice | None = None,
        rules: Mapping[str, PartitionSpec] | None = None,
        devices: Sequence[Any] | None = None,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        axis_name: str = DEFAULT_AXIS_NAME,
        logical_rules: Mapping[str, Any] | None = None,
        batch_axes: Sequence[str] | None = None,
        dcn: Mapping[str, int] | None = None,
        mesh_shape: Mapping[str, int] | None = None,
    ) -> None:
        if mesh_shape is not None:
            if mesh is not None:
                raise ValueError(
                    f"`mesh_shape` is {mesh_shape!r}, and `mesh` is {mesh!r}, but they "
                    "are two names of one argument. Leave `mesh_shape` out."
                )
            text = "Write `mesh=` instead of `mesh_shape=`, which 0.5 will not know."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        argument = "mesh" if mesh_shape is None else "mesh_shape"
        given = mesh if mesh_shape is None else mesh_shape
        check_mesh(argument, given, devices, dcn)
        self._join(cluster_resolver, communication_options)
        made = make_mesh(argument, given, devices, dcn, self._peers)
        check_axis_name(axis_name)
        axis_name = find_free_name(axis_name, made.axis_names)
        check_axis_name(axis_name, made.axis_names)
        axes = choose_batch_axes(made, batch_axes)
        self._logical_rules = check_logical_rules(made, logical_rules)
        placement = ShardedPlacement(
            MeshLayout(made, self._peers, axes),
            made,
            rules=Rules(made, rules, self._logical_rules),
            growing_axis=choose_growing_axis(made, axes, given is None),
            dcn=dict(dcn or {}),
        )
        super().__init__(placement, axis_name)
        self._functions = FunctionCache()

    @property
    def _placement(self) -> ShardedPlacement:
        return self.placement  # pyright: ignore[reportReturnType]

    def leave_program_mesh(self) -> AbstractContextManager[Any]:
        """Leaves every mesh except this strategy's mesh, which a step may use."""
        return without_program_mesh(self.mesh)

    @contextlib.contextmanager
    def jax_settings(self) -> Iterator[None]:
        """Sets the mesh of this strategy, and its names for axes of models."""
        mesh = self.placement.mesh
        names = with_axis_names(self._logical_rules, mesh.axis_names)
        with within_mesh(mesh), names:
            yield

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        if state is None:
            return self._functions.get(fn, self)(*args, **kwargs)
        check_annotations(state)
        specs = self._specs_of(state)
        held = state.read()
        parameters: list[PartitionSpec | None] = []
        rows = zip(held, specs, state.of_optimizer, strict=True)
        for leaf, spec, is_of_optimizer in rows:
            is_parameter = not is_of_optimizer and _may_be_constrained(leaf)
            parameters.append(spec if is_parameter else None)

        def collect(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
            placement = self._placement
            axes = placement.layout.axes
            return collect_at_use(program, parameters, placement.mesh, axes)

        with partitioned(self._placement.split):
            result = run_alone(self, fn, args, kwargs, state, edit=collect)

        # XLA must divide the new values like the old ones, which they replace.
        for slot, start, _ in state.ranges:
            # A different structure is reported when the whole step has ended.
            with contextlib.suppress(StateStructureError):
                new = slot.read()
                for i, leaf in enumerate(new, start=start):
                    is_old = leaf is held[i]
                    if not is_old and _may_be_constrained(leaf):
                        new[i - start] = self._divided(leaf, specs[i])
                slot.write(new)
        return result

    def _specs_of(self, state: State) -> list[PartitionSpec]:
        """Returns the division of each array of the state of a step."""
        shardings = lifted_shardings()
        if shardings is None or state is not lifted_state():
            return self._placement.specs(state)
        if None in shardings:  # The step runs under no strategy.
            return self._placement.specs(state)
        # Inside the step, the arrays are tracers, which do not show where they lie.
        return [sharding.spec for sharding in shardings]

    def _divided(self, leaf: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(self.placement.mesh, spec)
        return jax.lax.with_sharding_constraint(as_array(leaf), sharding)

    def __repr__(self) -> str:
        shape = self.placement.mesh.shape
        sizes = ", ".join(f"{name}={size}" for name, size in shape.items())
        where = "" if self._peers.is_alone else f", {self._peers.count} processes"
        return f"ShardedStrategy({sizes}, {self.platform}, 1 replica{where})"


def _may_be_constrained(leaf: Any) -> bool:
    """Returns whether an array may be divided: no scalar, and no random keys."""
    array = as_array(leaf)
    return array.ndim > 0 and not is_key(array)
