"""Advice for arrays of optimizers that a program calls like methods."""

import dis
import types

from armillary._owners import Owner, owner_of_file
from armillary.advice._foreign_names import NAMES

_ANSWERS = {
    "step": "`step` of an optimizer of Flax is its number of steps, not a method. "
    "Write `optimizer.update(model, gradients)`, after "
    '`gradients = armillary.all_reduce("mean", gradients)`.',
    "learning_rate": "`learning_rate` of an optimizer of Keras is a number, not a "
    f"schedule. {NAMES['Optimizer.learning_rate(step)']}",
}


def explain_called_array(error: TypeError) -> str | None:
    """Returns the advice for an error that a call in the user's code raised."""
    if "is not callable" not in str(error):
        return None
    last = None
    entry = error.__traceback__
    while entry is not None:
        # A variable of Flax passes the call on to its array, in frames of Flax.
        if owner_of_file(entry.tb_frame.f_code.co_filename) is Owner.USER:
            last = entry
        entry = entry.tb_next
    return None if last is None else _ANSWERS.get(_called_name(last) or "")


def _called_name(entry: types.TracebackType) -> str | None:
    """Returns the attribute that a line called when its error was raised."""
    start = None
    for instruction in reversed(list(dis.get_instructions(entry.tb_frame.f_code))):
        if instruction.offset > entry.tb_lasti:
            continue
        # The called expression begins where the call begins, unlike the arguments.
        place = instruction.positions and (
            instruction.positions.lineno,
            instruction.positions.col_offset,
        )
        start = start or place
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and place == start:
            return instruction.argval
    return None
