"""Asynchronous training: variables on parameter servers, steps on workers, over Ray.

`armillary.distribute.coordinator` schedules functions on workers.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.parameter_server._loop import AsynchronousLoop as _AsynchronousLoop
from armillary.parameter_server._strategy import (
    ParameterServerStrategy as ParameterServerStrategy,
)

# The loop calls the coordinator, which calls the strategy. So the strategy gets the
# class of its loops here, above all three.
ParameterServerStrategy.loop_class = _AsynchronousLoop

_mark_public(globals())
