"""Where the time of a run went, counted across restarts.

A `Controller` with a checkpoint manager keeps a `Recorder`: a stopwatch that is always
in one category, and a journal in the directory of the checkpoints that gets a line with
the totals now and then. JAX reports when it compiles, the loop when it waits for data.
`read_goodput` adds up the attempts of a run and finds out which work was lost. On the
command line that is `armillary goodput RUN_DIR`.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.goodput._journal import Goodput as Goodput
from armillary.goodput._journal import read_goodput as read_goodput
from armillary.goodput._stopwatch import Category as Category

_mark_public(globals())
