"""Strategies and options under the name of `tf.distribute.experimental`.

They are not experimental here; `armillary` and `armillary.cluster` describe them. In a
program that uses `tf.distribute.experimental.MultiWorkerMirroredStrategy`, this line
need not change.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.cluster import (
    CommunicationImplementation,
    CommunicationOptions,
    TerminationConfig,
)
from armillary.distribute import (
    CentralStorageStrategy,
    MultiWorkerMirroredStrategy,
    TPUStrategy,
    ValueContext,
    coordinator,
    partitioners,
)
from armillary.parameter_server import ParameterServerStrategy

__all__ = [
    "CentralStorageStrategy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
]

_mark_public(globals())
