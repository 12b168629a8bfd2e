"""Values that differ between replicas, seen from outside `Strategy.run`.

A `PerReplica` is one global array with the replica as its first axis, spread over the
devices. Batches from a distributed dataset and results of `run` have this form;
`Strategy.reduce`, `gather` and `local_results` take it apart.
"""

import enum
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from armillary.data._layout import Active, are_first
from armillary.distribute.replica._program_mesh import without_program_mesh
from armillary.state._holders import is_claimed

# Attributes that tensors of TensorFlow and PyTorch have, and arrays of JAX lack.
_OF_TENSORS = ("numpy", "detach", "cpu")
# Other names for the operations, as users of other libraries call them.
_OTHER_OPS = {"avg": "mean", "average": "mean", "add": "sum", "total": "sum"}


class ReduceOp(enum.Enum):
    """The way to combine values over replicas (`tf.distribute.ReduceOp`)."""

    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    MIN = "MIN"

    @classmethod
    def of(cls, value: Any, name: str = "reduce_op") -> "ReduceOp":
        """Returns `value` as a member; the names may be given as strings.

        Raises:
            ValueError: If `value`, the argument `name`, names no member.
        """
        if isinstance(value, cls):
            return value
        is_text = isinstance(value, str)
        if is_text and value.upper() in cls.__members__:
            return cls[value.upper()]
        # The two functions have different names for the argument.
        call = "strategy.reduce" if name == "reduce_op" else "armillary.all_reduce"
        meant = _OTHER_OPS.get(value.lower(), "mean") if is_text else "mean"
        raise ValueError(
            f'`{name}` is {value!r:.60}, but it must be "sum", "mean", "max" or '
            '"min", or a member of `armillary.ReduceOp`. It comes before the values: '
            f'`{call}("{meant}", values)`.'
        )


@jax.tree_util.register_pytree_node_class
class PerReplica:
    """One value per replica.

    It is not an array: combine its parts, or give it to `strategy.run`.

    Attributes:
        array: The values in one array of shape `(num_replicas, ...)`, or the value that
            all replicas share.
        num_active: The number of replicas that hold a value. It is less than the number
            of replicas only for the last batch of a complete evaluation. Then the other
            rows of `stacked` mean nothing.
        active_replicas: The numbers of the replicas that hold a value.
        shared_by: The number of replicas that share one value; `None` if each replica
            has its own value.
        own: This replica's value, within `ReplicaContext.merge_call`; otherwise `None`.
        is_part: Whether a shared value is one replica's part of a sum, such as a loss
            that was divided by the number of replicas. Only then may it be summed.
    """

    def __init__(
        self,
        array: Any,
        active_replicas: Active,
        shared_by: int | None = None,
        is_part: bool = False,
    ) -> None:
        self.array = array
        self.num_active = len(active_replicas)
        self.active_replicas = active_replicas
        self.shared_by = shared_by
        self.is_part = is_part
        self.own: Any = None

    @property
    def is_shared(self) -> bool:
        """True if all replicas share one value, such as a reduced gradient."""
        return self.shared_by is not None

    @property
    def stacked(self) -> Any:
        """The values in one array of shape `(num_replicas, ...)`."""
        if self.shared_by is None:
            return self.array
        shape = (self.shared_by, *jnp.shape(self.array))
        return jnp.broadcast_to(self.array, shape)

    @property
    def active(self) -> jax.Array:
        """The rows of `stacked` that mean something."""
        stacked = self.stacked
        held = self.active_replicas
        count = len(held)
        if count == stacked.shape[0]:
            return stacked
        if are_first(held):
            return stacked[:count]  # A slice is cheaper than a gather.
        return stacked[np.array(held)]

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The value of each replica of this process that holds one, on its device."""
        return tuple(self.parts().values())

    def parts(self) -> dict[int, jax.Array]:
        """Returns `values` by the number of the replica."""
        with without_program_mesh():
            return self._parts()

    def _parts(self) -> dict[int, jax.Array]:
        """Returns `parts`, with no mesh of the program in effect."""
        held = self.active_replicas
        is_traced = isinstance(self.array, Tracer)
        if is_traced or not isinstance(self.array, jax.Array):
            stacked = self.stacked
            return {replica: stacked[replica] for replica in held}

        if self.shared_by is None:
            found = _rows(self.array)
        else:
            found = _copies(self.array, self.shared_by)
            if self.array.is_fully_addressable:
                # Replicas without a copy of their own have the array itself.
                found = dict.fromkeys(held, self.array) | found
        return {replica: found[replica] for replica in held if replica in found}

    def __repr__(self) -> str:
        inside = "?"
        shape = getattr(self.array, "shape", None)
        if shape is not None:
            own_shape = shape if self.is_shared else shape[1:]
            inside = f"{self.array.dtype}{list(own_shape)}"
        return f"PerReplica({self.num_active} x {inside})"

    def _refusal(self) -> str:
        """Returns the message for a use as one array."""
        return (
            f"{self!r} was used as one array or condition, but it holds one part for "
            f"each of {self.num_active} replicas. Use it in the function of "
            "`strategy.run(step_fn, args=(batch,))`, or combine the parts first: "
            '`strategy.reduce("mean", value)`, `strategy.gather(value, axis=0)`, or '
            "`strategy.local_results(value)` for a list."
        )

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(self._refusal())

    # Otherwise NumPy would make an array of objects, and Python would take it for true.
    __array__ = __jax_array__ = __bool__ = _refuse
    # Otherwise Python's own error would appear, which names no fix.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __pos__ = __abs__ = __invert__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __float__ = __int__ = __complex__ = __round__ = __trunc__ = _refuse
    __len__ = __getitem__ = _refuse
    # The functions of NumPy, and the operators of its arrays.
    __array_ufunc__ = _refuse

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise TypeError(self._refusal())

    __hash__ = object.__hash__

    def __format__(self, spec: str) -> str:
        if not spec:
            return repr(self)
        raise TypeError(self._refusal())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            problem = f"'PerReplica' object has no attribute {name!r}"
            is_of_array = name in _OF_TENSORS or hasattr(jax.Array, name)
            if name.startswith("_") or not is_of_array:
                raise AttributeError(problem, name=name, obj=self)
            problem = f"{problem}. {self._refusal()}"
            raise AttributeError(problem, name=name, obj=None)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Active, int | None, bool]]:
        return (self.array,), (self.active_replicas, self.shared_by, self.is_part)

    @classmethod
    def tree_unflatten(
        cls, attributes: tuple[Active, int | None, bool], children: tuple[Any]
    ) -> "PerReplica":
        return cls(children[0], *attributes)


def _rows(array: jax.Array) -> dict[int, jax.Array]:
    """Returns the rows of an array that are in this process, by replica."""
    rows: dict[int, jax.Array] = {}
    for shard in array.addressable_shards:
        start = shard.index[0].start or 0
        for row in range(shard.data.shape[0]):
            rows.setdefault(start + row, shard.data[row])
    return rows


def _copies(array: jax.Array, num_replicas: int) -> dict[int, jax.Array]:
    """Returns the copies of an array on a mesh in this process, by replica."""
    if not isinstance(array.sharding, NamedSharding):
        return {}
    mesh = array.sharding.mesh
    assert isinstance(mesh, Mesh)
    devices = list(mesh.devices.flat)
    copies: dict[int, jax.Array] = {}
    for shard in array.addressable_shards:
        # Several devices in a row may be one replica.
        place = devices.index(shard.device)
        replica = place * num_replicas // len(devices)
        copies.setdefault(replica, shard.data)
    return copies


def array_of(leaf: Any) -> Any:
    """Returns the array in a `PerReplica`; anything else as it is."""
    return leaf.array if is_per_replica(leaf) else leaf


def check_axis(axis: Any) -> None:
    if isinstance(axis, bool) or not isinstance(axis, Integral):
        raise TypeError(
            f"`axis` is {axis!r} of type {type(axis).__name__}, but it must be an "
            "integer. Use `axis=0` for examples."
        )


def concatenate(value: PerReplica, axis: int) -> jax.Array:
    """Returns the values of all replicas, concatenated along an axis."""
    rows = value.active
    shape = rows.shape[1:]
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"`axis` is {axis}, but the value of each replica has shape {shape}. Use "
            "an axis it has, or `strategy.local_results(value)`."
        )
    place = axis % len(shape)
    before = shape[:place]
    after = shape[place + 1 :]
    size = rows.shape[0] * shape[place]
    return jnp.moveaxis(rows, 0, place).reshape(*before, size, *after)


def other_count(value: PerReplica, strategy: object) -> ValueError:
    """Returns the error for a value with too many or too few parts for a strategy."""
    return ValueError(
        f"`args` of `strategy.run` hold {value!r}, which comes from a different "
        f"strategy than {strategy!r}: the numbers of replicas differ. Combine its "
        "parts by `reduce` or `gather`."
    )


def is_argument(value: Any) -> bool:
    """Returns whether `value` is passed to a replica whole, for use as `is_leaf`."""
    # NNX objects are pytrees too, but writes of `fn` to a copy would be lost.
    return is_per_replica(value) or is_claimed(value)


def is_per_replica(value: Any, /) -> bool:
    """Returns whether `value` is a `PerReplica`, for use as `is_leaf`."""
    return isinstance(value, PerReplica)
