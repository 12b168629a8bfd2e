"""Functions that are scheduled on workers (`tf.distribute.coordinator`)."""

from armillary._traceback import mark_public as _mark_public
from armillary.errors import PSUnavailableError as PSUnavailableError
from armillary.parameter_server._closures import RemoteValue as RemoteValue
from armillary.parameter_server._coordinator import (
    ClusterCoordinator as ClusterCoordinator,
)
from armillary.parameter_server._node import Server as Server
from armillary.parameter_server._tasks import PerWorkerDataset as PerWorkerDataset
from armillary.parameter_server._tasks import PerWorkerIterator as PerWorkerIterator

__all__ = [
    "ClusterCoordinator",
    "PSUnavailableError",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "RemoteValue",
    "Server",
]

_mark_public(globals())
