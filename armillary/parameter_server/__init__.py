"""Asynchronous training: variables on parameter servers, steps on workers, over Ray.

`armillary.distribute.coordinator` schedules functions on workers.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.parameter_server._strategy import (
    ParameterServerStrategy as ParameterServerStrategy,
)

_mark_public(globals())
