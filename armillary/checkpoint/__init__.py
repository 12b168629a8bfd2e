"""Checkpoints of a whole run: arrays, random state and data positions, on Orbax.

A `Checkpoint` names the objects of a run, and a `CheckpointManager` writes and reads
them below one directory. A folder named `checkpoint_<number>` with a header is
complete, because Orbax gives a folder its name last. It is never changed afterwards. So
a crash at any moment costs at most the save in progress. See
`docs/checkpoints/index.md`.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.checkpoint._checkpoint import Checkpoint as Checkpoint
from armillary.checkpoint._checkpoint import latest_checkpoint as latest_checkpoint
from armillary.checkpoint._manager import CheckpointManager as CheckpointManager
from armillary.checkpoint._selection import RestoreReport as RestoreReport

_mark_public(globals())
