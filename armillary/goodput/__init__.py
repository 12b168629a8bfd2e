"""The time of a run by category, counted across restarts.

A `Controller` with a checkpoint manager keeps a `Recorder`. It has a stopwatch that is
always in one category, and a journal in the directory of the checkpoints. From time to
time, it writes a line with the totals. JAX reports compilations, and the loop reports
the time that it waits for data. `read_goodput` adds up the attempts of a run and finds
the work that was lost. The command `armillary goodput RUN_DIR` prints the result.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.goodput._journal import Goodput as Goodput
from armillary.goodput._journal import read_goodput as read_goodput
from armillary.goodput._stopwatch import Category as Category

_mark_public(globals())
