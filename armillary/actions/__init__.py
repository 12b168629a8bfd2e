"""Actions: code that a controller runs after training loops and evaluations.

An action is any function of an output. You can combine the actions here: a condition,
and an action to run if it is true. `docs/train/actions.md` has an
example.

Every process of a run calls the actions with the same output. So an action of your own
that writes to a shared place must write only if `jax.process_index() == 0`.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.actions._combined import ConditionalAction as ConditionalAction
from armillary.actions._combined import PeriodicAction as PeriodicAction
from armillary.actions._conditions import EarlyStopping as EarlyStopping
from armillary.actions._conditions import NewBestMetric as NewBestMetric
from armillary.actions._export import ExportFileManager as ExportFileManager
from armillary.actions._export import ExportModel as ExportModel
from armillary.actions._export_safetensors import ExportSafetensors as ExportSafetensors
from armillary.actions._profile import Profile as Profile
from armillary.actions._save_if_preempted import (
    SaveCheckpointIfPreempted as SaveCheckpointIfPreempted,
)

_mark_public(globals())
