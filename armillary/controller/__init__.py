"""The outer loop: Python that runs between loops of training.

`Controller` trains, evaluates, saves, restores, logs and stops. The other files are the
parts that it calls, and each file has one idea.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.controller._controller import Controller as Controller
from armillary.controller._history import History as History
from armillary.controller._history import RunOutput as RunOutput

_mark_public(globals())
