"""How sums over replicas are made: XLA's own way, or another one.

A traced step has one operation for each sum over replicas, whether the user asked for
it, on-read state or the transpose of a gradient. When all proofs are done, these are
exchanged for an operation whose lowering is what a `CrossDeviceOps` does. Nothing is
differentiated after that, so it needs no other rule.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from armillary._checks import is_positive_int
from armillary._jaxpr import programs_in
from armillary.distribute.replica._retype import AXIS_NAME

_SUM = "psum_invariant"


class CrossDeviceOps:
    """The base of ways to sum over replicas (`tf.distribute.CrossDeviceOps`).

    A way of your own overrides `all_reduce`::

        class Ring(armillary.distribute.CrossDeviceOps):
            def all_reduce(self, value, axis_name, num_replicas):
                ring = [(i, (i + 1) % num_replicas) for i in range(num_replicas)]
                total = value
                for _ in range(num_replicas - 1):
                    value = jax.lax.ppermute(value, axis_name, ring)
                    total = total + value
                return total
    """

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum of an array over replicas, on every replica.

        It runs in every replica, while a step is compiled. The result must be equal
        on all of them, which is not proved: `check_replicas_every` of a trainer
        compares what the step leaves. The ring above adds in another order on each
        replica, so that sums of floats differ there by rounding.

        Args:
            value: This replica's value.
            axis_name: What the functions of `jax.lax` call the axis of replicas.
            num_replicas: At least 2.
        """
        raise NotImplementedError

    def check(self, num_replicas: int) -> None:
        """Raises if so many replicas cannot be summed over.

        Raises:
            ValueError: If so.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class NcclAllReduce(CrossDeviceOps):
    """XLA's own all-reduce, which is NCCL on NVIDIA GPUs: what there is by default.

    Args:
        num_packs: Kept for programs that come from TensorFlow. XLA decides which
            values it sums together.
    """

    def __init__(self, num_packs: int = 1) -> None:
        del num_packs

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum, in one all-reduce."""
        del num_replicas
        return jax.lax.psum(value, axis_name)


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Sums inside groups of neighbours first, then over groups.

    For devices that reach their neighbours faster than others. Each replica of a group
    sums a part of the value over its group (a reduce-scatter), these parts are summed
    over groups (an all-gather and a sum), and an all-gather inside groups puts them
    together. Between groups, only a part of the value travels.

    Args:
        num_packs: Kept for programs that come from TensorFlow. XLA decides which
            values it sums together.
        group_size: Replicas of a group, a divisor of the number of replicas. By default
            the largest one below that number: two halves of an even number.

    Raises:
        ValueError: If `group_size` is not a positive integer.
    """

    def __init__(self, num_packs: int = 1, *, group_size: int | None = None) -> None:
        del num_packs
        if group_size is not None and not is_positive_int(group_size):
            raise ValueError(_group_message(group_size, "a positive integer"))
        self._group_size = group_size

    def check(self, num_replicas: int) -> None:
        """Raises if replicas cannot be divided into such groups.

        Raises:
            ValueError: If so.
        """
        if self._group_size is not None and num_replicas % self._group_size:
            rule = f"a divisor of the number of replicas, which is {num_replicas}"
            raise ValueError(_group_message(self._group_size, rule))

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum, made inside groups, over groups, and inside groups again."""
        size = self._group_size
        if size is None or num_replicas % size:  # fewer replicas share an uneven batch
            size = max(n for n in range(1, num_replicas) if num_replicas % n == 0)
        starts = range(0, num_replicas, size)
        inside = [list(range(start, start + size)) for start in starts]
        over = [[start + i for start in starts] for i in range(size)]
        flat = jnp.ravel(value)
        flat = jnp.pad(flat, (0, -flat.size % size))
        part = jax.lax.psum_scatter(
            flat, axis_name, axis_index_groups=inside, tiled=True
        )
        # Not `psum`, which takes no groups where types are checked.
        parts = jax.lax.all_gather(part, axis_name, axis_index_groups=over)
        total = jax.lax.all_gather(
            jnp.sum(parts, 0), axis_name, axis_index_groups=inside, tiled=True
        )
        return total[: value.size].reshape(value.shape)


class ReductionToOneDevice(CrossDeviceOps):
    """Sums on the first replica, which then sends the sum to all others.

    Every value goes over the links of one device: for small values and few devices,
    and for comparison.
    """

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum, by sending values to the first replica and back."""
        is_first = jax.lax.axis_index(axis_name) == 0
        total = value
        for other in range(1, num_replicas):
            total = total + jax.lax.ppermute(value, axis_name, [(other, 0)])
        # Who gets nothing has zeros, so that the parts of the sum add up to it.
        result = jnp.where(is_first, total, jnp.zeros_like(total))
        for other in range(1, num_replicas):
            result = result + jax.lax.ppermute(
                jnp.where(is_first, total, jnp.zeros_like(total)),
                axis_name,
                [(0, other)],
            )
        return result


def _group_message(size: Any, rule: str) -> str:
    return (
        f"`group_size` is {size!r}, but it must be {rule}. Leave it out for the "
        "largest groups that there are."
    )


def redirect_sums(program: core.ClosedJaxpr, ops: CrossDeviceOps) -> core.ClosedJaxpr:
    """Returns a step whose sums over replicas are made by `ops`."""
    return program.map_jaxpr(lambda jaxpr: _redirect(jaxpr, ops, 1))


def _redirect(jaxpr: core.Jaxpr, ops: CrossDeviceOps, num_replicas: int) -> core.Jaxpr:
    return jaxpr.replace(
        eqns=[_redirect_equation(e, ops, num_replicas) for e in jaxpr.eqns]
    )


def _redirect_equation(equation: Any, ops: CrossDeviceOps, num_replicas: int) -> Any:
    name, params = equation.primitive.name, equation.params
    if name == _SUM and params["axes"] == (AXIS_NAME,) and num_replicas > 1:
        new = {"ops": ops, "num_replicas": num_replicas}
        return equation.replace(primitive=_sum_p, params=new)
    if not list(programs_in(equation)):
        return equation
    if name == "shard_map":
        num_replicas = params["mesh"].shape.get(AXIS_NAME, 1)

    def redirect(leaf: Any) -> Any:
        if isinstance(leaf, core.ClosedJaxpr):
            return leaf.map_jaxpr(lambda jaxpr: _redirect(jaxpr, ops, num_replicas))
        if isinstance(leaf, core.Jaxpr):
            return _redirect(leaf, ops, num_replicas)
        return leaf

    def is_program(leaf: Any) -> bool:
        return isinstance(leaf, core.ClosedJaxpr | core.Jaxpr)

    new = {
        key: jax.tree.map(redirect, value, is_leaf=is_program)
        if any(map(is_program, jax.tree.leaves(value, is_leaf=is_program)))
        else value
        for key, value in params.items()
    }
    return equation.replace(params=new)


def _sum_with(*values: Any, ops: CrossDeviceOps, num_replicas: int) -> list[Any]:
    return [_sum_one(value, ops, num_replicas) for value in values]


def _sum_one(value: Any, ops: CrossDeviceOps, num_replicas: int) -> Any:
    total = ops.all_reduce(value, AXIS_NAME, num_replicas)
    found = (jnp.shape(total), jnp.result_type(total))
    if found != (value.shape, value.dtype):
        raise ValueError(
            f"`all_reduce` of {ops!r} made {found[1]}{list(found[0])} of "
            f"{value.dtype}{list(value.shape)}, but a sum over replicas has the shape "
            "and dtype of its parts. Return one value of the same kind."
        )
    return total


# By how its name begins, `_varying` knows that it treats types like a sum.
_sum_p = core.Primitive("psum_by_cross_device_ops")
_sum_p.multiple_results = True
mlir.register_lowering(_sum_p, mlir.lower_fun(_sum_with, multiple_results=True))


@_sum_p.def_abstract_eval
def _sum_types(*kinds: Any, **_: Any) -> list[Any]:
    return [
        kind.update(
            manual_axis_type=kind.manual_axis_type.update(
                varying=kind.manual_axis_type.varying - {AXIS_NAME}
            )
        )
        for kind in kinds
    ]
