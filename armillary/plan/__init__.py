"""The cost of a training step on devices that you do not have.

`plan` compiles the loop of a trainer for a described slice of TPUs or cluster of GPUs.
This works on any machine. The result shows whether the step fits, and the data that
devices exchange. See `docs/devices/plan.md`.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.plan._costs import Collective
from armillary.plan._peak import Tensor
from armillary.plan._plan import plan
from armillary.plan._record import Memory, Plan, Variant
from armillary.plan._targets import Target, find_target

__all__ = [
    "Collective",
    "Memory",
    "Plan",
    "Target",
    "Tensor",
    "Variant",
    "find_target",
    "plan",
]

_mark_public(globals())
