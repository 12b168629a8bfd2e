"""Into how many parts variables are cut (`tf.distribute.experimental.partitioners`)."""

from armillary._traceback import mark_public as _mark_public
from armillary.distribute.parameter_server._partitioners import (
    FixedShardsPartitioner as FixedShardsPartitioner,
)
from armillary.distribute.parameter_server._partitioners import (
    MaxSizePartitioner as MaxSizePartitioner,
)
from armillary.distribute.parameter_server._partitioners import (
    MinSizePartitioner as MinSizePartitioner,
)
from armillary.distribute.parameter_server._partitioners import (
    Partitioner as Partitioner,
)

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]

_mark_public(globals())
