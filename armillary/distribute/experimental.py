"""Strategies and options under the name of `tf.distribute.experimental`.

None of them is experimental here: `armillary` and `armillary.cluster` describe them. A
program that uses `tf.distribute.experimental.MultiWorkerMirroredStrategy` keeps its
line.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.cluster import CommunicationImplementation as CommunicationImplementation
from armillary.cluster import CommunicationOptions as CommunicationOptions
from armillary.cluster import TerminationConfig as TerminationConfig
from armillary.distribute import CentralStorageStrategy as CentralStorageStrategy
from armillary.distribute import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from armillary.distribute import TPUStrategy as TPUStrategy
from armillary.distribute import ValueContext as ValueContext
from armillary.distribute import coordinator as coordinator
from armillary.distribute import partitioners as partitioners
from armillary.parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)

_mark_public(globals())
