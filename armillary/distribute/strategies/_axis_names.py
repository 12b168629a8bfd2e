"""The names in a model's annotations, as Flax knows them in a scope and in a step.

Flax keeps rules of its own, from a name to an axis of the mesh. In a scope, the rules
of the strategy come first, and rules that the program has set count for other names.
"""

import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

_MODULES = ("flax.nnx", "flax.linen")
# The module of Flax that places a new variable by its annotation, and holds the rules.
_PLACES = "flax.core.spmd"
_UNKNOWN = re.compile(r"Resource axis: (\S+) of ")


@contextmanager
def with_axis_names(
    rules: Mapping[str, Any], axes: Collection[str] = ()
) -> Iterator[None]:
    """Sets the names for new variables of NNX, and for constraints of Linen.

    Args:
        rules: The axis of the mesh for each name.
        axes: The axes of the mesh, for the note on an error.
    """
    pairs = tuple(rules.items())
    others = [pair for pair in find_program_rules() if pair[0] not in rules]
    both = (*pairs, *others)
    with ExitStack() as stack:
        if pairs:
            for name in _MODULES:
                # Not by an import: a program without Flax must not load it.
                module = sys.modules.get(name)
                if module is not None:
                    stack.enter_context(module.logical_axis_rules(both))
        try:
            yield
        except Exception as error:  # JAX has several classes for these errors.
            _add_note(error, axes)
            raise


def find_program_rules() -> tuple[tuple[str, Any], ...]:
    """Returns the rules of Flax in effect, such as `nnx.logical_axis_rules` sets."""
    module = sys.modules.get(_PLACES)
    return () if module is None else tuple(module.get_logical_axis_rules() or ())


def explain_unknown_name(name: str, axes: Collection[str]) -> str:
    """Returns why a name in an annotation has no meaning, and how to give it one."""
    *_, last = axes
    return (
        f"{name!r} is not an axis of the mesh, which has {list(axes)}. Write "
        f'`logical_rules={{"{name}": "{last}"}}` to choose an axis, or '
        f'`{{"{name}": None}}` to leave it whole.'
    )


def _add_note(error: Exception, axes: Collection[str]) -> None:
    """Explains an error of a variable that Flax could not place in a scope."""
    has_note = any("logical_rules" in note for note in getattr(error, "__notes__", ()))
    if has_note or not _is_raised_in(error.__traceback__, _PLACES):
        return
    found = _UNKNOWN.search(str(error))
    if found is None:
        reason = (
            "The annotation of a variable does not fit its shape, or the axes "
            f"{list(axes)} of the mesh."
        )
    else:
        reason = explain_unknown_name(found[1], axes)
    error.add_note(
        f"{reason} Flax places each variable that is made in `strategy.scope()`. "
        "`strategy.make(fn)` makes the model, too, and its errors name the variable."
    )


def _is_raised_in(traceback: types.TracebackType | None, module: str) -> bool:
    """Returns whether an error has passed through a module."""
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__") == module:
            return True
        traceback = traceback.tb_next
    return False
