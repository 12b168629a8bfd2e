"""What a training step costs on devices that are not there.

`plan` compiles the loop of a trainer for a described slice of TPUs or cluster of GPUs,
on any machine, and reads from the result whether it fits, what devices send each other,
and what its time is estimated to be. See `docs/plan.md`.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.plan._costs import Collective, Estimate
from armillary.plan._plan import Memory, Plan, plan
from armillary.plan._targets import Target, find_target

__all__ = [
    "Collective",
    "Estimate",
    "Memory",
    "Plan",
    "Target",
    "find_target",
    "plan",
]

_mark_public(globals())
