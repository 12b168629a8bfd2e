"""Where the time of a run went, counted across restarts.

A `Controller` with a checkpoint manager keeps a `Recorder`: a stopwatch that is always
in one category, and a journal in the directory of the checkpoints that gets a line with
the totals now and then. Compiling is told by JAX, waiting for data by the loop.
`read_goodput` adds up the attempts of a run and finds out which work was lost. On the
command line that is `armillary goodput RUN_DIR`.
"""

from armillary.goodput._category import Category as Category
from armillary.goodput._journal import Entry as Entry
from armillary.goodput._journal import Journal as Journal
from armillary.goodput._journal import NoopJournal as NoopJournal
from armillary.goodput._journal import read_entries as read_entries
from armillary.goodput._recorder import Recorder as Recorder
from armillary.goodput._recorder import make_recorder as make_recorder
from armillary.goodput._report import Goodput as Goodput
from armillary.goodput._report import add_up as add_up
from armillary.goodput._report import read_goodput as read_goodput
from armillary.goodput._stopwatch import Stopwatch as Stopwatch
from armillary.goodput._stopwatch import get_stopwatch as get_stopwatch

__all__ = [
    "Category",
    "Entry",
    "Goodput",
    "Journal",
    "NoopJournal",
    "Recorder",
    "Stopwatch",
    "add_up",
    "get_stopwatch",
    "make_recorder",
    "read_entries",
    "read_goodput",
]
