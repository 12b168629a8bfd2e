"""Finds methods of trainers and evaluators that no loop would call."""

import difflib
import inspect
import re
from typing import Any

_HOOKS = (
    "a trainer has `train_loop_begin`, `train_step` and `train_loop_end`, and an "
    "evaluator `eval_begin`, `eval_step`, `eval_reduce` and `eval_end`"
)
# Hooks of Lightning that have another name here.
_RENAMED = {
    "on_train_epoch_start": "train_loop_begin",
    "on_train_epoch_end": "train_loop_end",
    "training_epoch_end": "train_loop_end",
    "validation_step": "eval_step",
    "test_step": "eval_step",
    "on_validation_epoch_start": "eval_begin",
    "on_validation_epoch_end": "eval_end",
    "validation_epoch_end": "eval_end",
}
# Advice for names whose replacement is not a method of the same class.
_ELSEWHERE = {
    "validation_step": "Write `eval_step` of a `StandardEvaluator`.",
    "test_step": "Write `eval_step` of a `StandardEvaluator`.",
    "configure_optimizers": (
        "In `__init__`, write `self.optimizer = nnx.Optimizer(self.model, "
        "optax.adam(1e-3), wrt=nnx.Param)`."
    ),
}
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
        hook = near[0] if near else _RENAMED.get(name)
        if hook in left_out:
            fix = f": the method is called `{hook}`. Rename it."
        elif name in _ELSEWHERE:
            fix = f". {_ELSEWHERE[name]} Remove this method."
        else:
            fix = f": {_HOOKS}. Rename it."
        raise TypeError(
            f"`{owner.__name__}.{name}` would never be called{fix} If you call it "
            f"yourself, name it `_{name}`."
        )
