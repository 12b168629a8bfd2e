"""Finds methods of trainers and evaluators that no loop would call."""

import difflib
import inspect
import re
from typing import Any

_HOOKS = (
    "a trainer has `train_loop_begin`, `train_step` and `train_loop_end`, and an "
    "evaluator `eval_begin`, `eval_step`, `eval_reduce` and `eval_end`"
)
# Hooks of Keras and Lightning.
_FOREIGN = re.compile(
    r"on_((fit|train|validation|test)(_epoch|_batch)?|epoch)_(start|begin|end)|"
    r"(training|validation|test)_(step|epoch_end)|configure_optimizers"
)


def check_hooks(owner: type, base: type, *hooks: str) -> None:
    """Raises if a method's name is close to a hook, or is a hook of another library.

    It runs before Python says that an abstract method is missing, because a method
    with the name of another library is the reason for that.
    """
    own: dict[str, Any] = {}
    for kind in owner.__mro__:
        if kind not in base.__mro__:
            own.update(vars(kind))
    left_out = set(hooks).difference(own)
    methods = {
        name: attribute
        for name, attribute in own.items()
        if inspect.isfunction(attribute)
    }
    called: set[str] = set()
    for method in methods.values():
        called.update(method.__code__.co_names)

    for name in methods:
        if hasattr(base, name) or name in called:
            continue
        meant = name.replace("start", "begin").replace("finish", "end")
        near = difflib.get_close_matches(meant, left_out, n=1, cutoff=0.85)
        if not (near or _FOREIGN.fullmatch(name)):
            continue
        fix = f"the method is called `{near[0]}`" if near else _HOOKS
        raise TypeError(
            f"`{owner.__name__}.{name}` would never be called: {fix}. Rename it. "
            f"If you call it yourself, name it `_{name}`."
        )
