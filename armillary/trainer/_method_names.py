"""Finds methods of trainers and evaluators that no loop would call."""

import difflib
import inspect
import re

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
    kinds = [kind for kind in owner.__mro__ if kind not in base.__mro__]
    own = {name: each for kind in kinds for name, each in vars(kind).items()}
    left_out = set(hooks).difference(own)
    own = {name: each for name, each in own.items() if inspect.isfunction(each)}
    named = {name for each in own.values() for name in each.__code__.co_names}
    for name in own:
        if hasattr(base, name) or name in named:
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
