"""The helpers of `orbit.utils`, under the name of Orbit's module.

`armillary` and `armillary.summary` have the same names, and describe them.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.distribute import create_global_step as create_global_step
from armillary.distribute import make_distributed_dataset as make_distributed_dataset
from armillary.summary import SummaryManager as SummaryManager
from armillary.trainer import EpochHelper as EpochHelper

_mark_public(globals())
