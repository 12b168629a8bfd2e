"""The cost of a training step on devices that you do not have.

`plan` compiles the loop of a trainer for a described slice of TPUs or cluster of GPUs,
on any machine, and reads from the result whether it fits and what devices send each
other. See `docs/plan.md`.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.plan._costs import Collective
from armillary.plan._plan import Memory, Plan, plan
from armillary.plan._targets import Target, find_target

__all__ = [
    "Collective",
    "Memory",
    "Plan",
    "Target",
    "find_target",
    "plan",
]

_mark_public(globals())
