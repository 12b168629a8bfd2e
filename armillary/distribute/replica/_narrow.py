"""Steps on fewer replicas than devices, for a batch that not all can share equally.

A batch of 42 examples on 4 devices is one step of 2 replicas, with 21 examples each.
The mesh gets a second axis, of devices that do the same work::

    device              0        1        2        3
    replica, copy       0, 0     0, 1     1, 0     1, 1

Everything over the axis `replica` (gradients, reductions, numbers of replicas) is then
what it is with 2 replicas, and nothing needs to be masked.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from armillary.distribute.replica._values import AXIS_NAME
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute.replica._collectives import ReplicaContext

_COPY_AXIS = "copy"


def narrow_mesh(mesh: Mesh, num_replicas: int | None) -> Mesh:
    """Returns the mesh on whose devices so many replicas run; `None` for all."""
    if num_replicas in (None, mesh.shape[AXIS_NAME]):
        return mesh
    devices = mesh.devices.reshape(num_replicas, -1)
    return Mesh(devices, (AXIS_NAME, _COPY_AXIS), axis_types=(AxisType.Auto,) * 2)


def take_first_copy(mesh: Mesh, values: PyTree) -> PyTree:
    """Returns what the first copy of this replica has computed.

    Devices may round differently where they do the same work, such as where a GPU adds
    in the order of arrival. What they keep must not differ.
    """
    if _COPY_AXIS not in mesh.shape:
        return values

    def take(value: Any) -> Any:
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        is_first = jax.lax.axis_index(_COPY_AXIS) == 0
        zero = jnp.zeros_like(value)
        total = jax.lax.psum(jnp.where(is_first, value, zero), _COPY_AXIS)
        return total.astype(value.dtype)

    return jax.tree.map(take, values)


def scale_message(name: str, context: "ReplicaContext") -> str:
    """Returns the message for a sum of gradients that may have another scale here."""
    return (
        f"`{name}` runs on {context.num_replicas_in_sync} of "
        f"{context.strategy.num_replicas_in_sync} replicas, since more cannot share "
        "its batch equally, and it sums gradients without asking how many there are. A "
        "loss that is divided by a number from elsewhere may have a gradient of "
        'another size in this step. Take the "mean" of the gradients, scale the loss '
        "with `armillary.compute_average_loss(losses)`, or read "
        "`strategy.num_replicas_in_sync` inside the function given to `strategy.run`."
    )
