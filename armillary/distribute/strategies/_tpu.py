"""Synchronous training on the TPU cores of one machine, a slice or several slices."""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import jax

from armillary._checks import answers_old_names, check_instance
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.distribute.strategies._multi_worker import MultiWorkerMirroredStrategy
from armillary.errors import ClusterError

_ONE_DEVICE = (
    "A replica is one core: there are no logical devices inside of it to spread a "
    "model over."
)
_LOGICAL_DEVICES = (
    "experimental_assign_to_logical_device",
    "experimental_replicate_to_logical_devices",
    "experimental_split_to_logical_devices",
)


@answers_old_names(
    tpu_cluster_resolver="It is called `resolver` here.",
    device_assignment=_ONE_DEVICE + " Leave it out.",
    experimental_device_assignment=_ONE_DEVICE + " Leave it out.",
    experimental_spmd_xla_partitioning=_ONE_DEVICE + " Leave it out.",
)
class TPUStrategy(MultiWorkerMirroredStrategy):
    """One replica per TPU core, with equal variables on all of them.

    As `tf.distribute.TPUStrategy`. The same program runs on every machine of the slice,
    and this strategy joins them, as `MultiWorkerMirroredStrategy` does: make it before
    anything uses a device. Nothing need be connected or initialized before.

    Args:
        resolver: Tells which machine this is, and where the others are. By default
            `armillary.cluster.resolve_cluster()` finds out.
        topology: The chips that must be there, such as `"4x4"` or `"2x2x1"`, so that a
            job on a part of its slice is an error. By default any number.

    Raises:
        ClusterError: If JAX has no TPU here, the chips are not those of `topology`, a
            device was used before, or this process has joined another cluster.
        TypeError: If `resolver` is of another type.
        ValueError: If `topology` is not written like this.
    """

    _platform = "tpu"
    """What devices must be; tests stand in with another one."""

    def __init__(
        self,
        resolver: ClusterResolver | None = None,
        topology: str | None = None,
        *,
        reduce_dtype: Any = None,
    ) -> None:
        self._topology = None if topology is None else _parse(topology)
        if resolver is not None:
            fix = "Use one of `armillary.cluster`, or leave it out."
            check_instance("resolver", resolver, ClusterResolver, fix)
        # Before the machines join, which would wait for others in vain.
        reason = _why_there_is_none() if self._platform == "tpu" else None
        if reason is not None:
            _refuse(reason)
        super().__init__(resolver, reduce_dtype=reduce_dtype)

    def _find_devices(self, is_joined: bool) -> Sequence[Any]:
        find = jax.devices if is_joined else jax.local_devices
        try:
            devices = find(backend=self._platform)
        except RuntimeError as error:
            _refuse(f"JAX found none ({error})")
        if self._topology is not None:
            _check_topology(self._topology, devices)
        return devices

    def __getattr__(self, name: str) -> Any:
        if name in _LOGICAL_DEVICES:
            raise AttributeError(
                f"`{type(self).__name__}` has no `{name}`. {_ONE_DEVICE} Leave it out, "
                "or use `armillary.ShardedStrategy`, whose devices along `tensor` are "
                "logical devices."
            )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )


def _why_there_is_none() -> str | None:
    """Returns why JAX cannot have a TPU, as far as that is known without asking it."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and "tpu" not in platforms.split(","):
        return f"JAX was told to use {platforms} alone (`JAX_PLATFORMS`)"
    is_installed = importlib.util.find_spec("libtpu") is not None
    if not is_installed and "TPU_LIBRARY_PATH" not in os.environ:
        return "the package `libtpu` is not installed"
    return None


def _refuse(reason: str) -> NoReturn:
    raise ClusterError(
        f"`TPUStrategy` needs a TPU, but {reason}. On a TPU machine, install "
        "`armillary[tpu]` and leave `JAX_PLATFORMS` unset. Elsewhere the same program "
        "runs under `armillary.MirroredStrategy(devices=...)` on the devices of one "
        "process, or under `armillary.MultiWorkerMirroredStrategy()` on those of "
        "several."
    )


def _parse(topology: Any) -> str:
    if not isinstance(topology, str) or not re.fullmatch(
        r"[1-9]\d*(x[1-9]\d*)*", topology
    ):
        raise ValueError(
            f"`topology` is {topology!r}, but it must be the numbers of chips along "
            'each axis of the slice. Write it as in `"4x4"` or `"2x2x1"`.'
        )
    return topology


def _check_topology(topology: str, devices: Sequence[Any]) -> None:
    # A chip may have two cores, which are at one place.
    places = {
        (getattr(device, "slice_index", 0), *getattr(device, "coords", (device.id,)))
        for device in devices
    }
    wanted = math.prod(map(int, topology.split("x")))
    if len(places) != wanted:
        raise ClusterError(
            f"`topology` is {topology!r}, which are {wanted} chips, but JAX found "
            f"{len(places)}. Start the program on every machine of the slice, with a "
            "`resolver` that knows them all, or correct `topology`."
        )
