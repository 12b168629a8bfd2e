"""State of a user's objects, lifted in and out of traced functions.

The idea in one paragraph: a *slot* is a place that holds an array. `State` finds every
slot that a trainer reaches, swaps tracers in, lets the user's method run, collects the
new values, and puts the old ones back. One walk (`_walk`) finds the slots, and all that
a step could read as a constant; `_holders`, `_functions` and `_nnx` know what can hold
what. Two walks are compared (`_compare`) to tell whether a trace is still good, and one
can be undone, so that a step that fails leaves nothing behind.
"""

from typing import Any

from armillary.state._access import Access as Access
from armillary.state._access import make_picker as make_picker
from armillary.state._captured import check_captured as check_captured
from armillary.state._captured import write_error as write_error
from armillary.state._functions import captured as captured
from armillary.state._holders import held_by as held_by
from armillary.state._holders import is_claimed as is_claimed
from armillary.state._lift import State as State
from armillary.state._lift import as_array as as_array
from armillary.state._lift import strong as strong
from armillary.state._lift import unsettled_message as unsettled_message
from armillary.state._nnx import is_node as is_node
from armillary.state._nnx import is_variable as is_variable
from armillary.state._same import Fingerprint as Fingerprint
from armillary.state._same import find_constants as find_constants
from armillary.state._slots import Role as Role
from armillary.state._slots import Slot as Slot
from armillary.state._slots import describe as describe
from armillary.state._step_counter import StepCounter as StepCounter
from armillary.state._step_counter import as_step_counter as as_step_counter

__all__ = [
    "Access",
    "Fingerprint",
    "Role",
    "Slot",
    "State",
    "StepCounter",
    "as_array",
    "as_step_counter",
    "captured",
    "check_captured",
    "describe",
    "find_constants",
    "find_slots",
    "has_state",
    "held_by",
    "is_claimed",
    "is_node",
    "is_variable",
    "make_picker",
    "strong",
    "unsettled_message",
    "write_error",
]


def find_slots(root: Any, path: str = "") -> list[Slot]:
    """Returns every slot that `root` reaches, each place once, in a fixed order."""
    return list(State([(root, path)]).slots)


def has_state(root: Any) -> bool:
    """Returns whether `root` reaches any slot."""
    return bool(find_slots(root))
