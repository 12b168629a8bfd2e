"""Advice for calls with wrong, missing or unnamed arguments."""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from armillary._shorten import shorten
from armillary.advice._foreign_keywords import ANSWERS

# Advice for calls that give arguments without the names they need.
_BY_NAME = {
    "from_arrays": "Several arrays are one nest: `from_arrays((x, y), batch_size=64)`.",
}
# The advice for a missing argument, if `name=...` does not show it.
_MISSING = {
    "Controller.global_step": "Write `global_step=trainer.global_step` for a "
    "`StepTrainer`. Otherwise the optimizer counts the steps: "
    "`global_step=trainer.optimizer.step` of Flax, or "
    "`global_step=model.optimizer.iterations` of Keras.",
}
# The parts of a class that have files of their own. Users know the class.
_PARTS = {"DataMethods": "Strategy", "ValueMethods": "Strategy", "Placed": "Strategy"}


def explain_wrong_call(
    error: TypeError,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> bool:
    """Replaces the text of Python's error if arguments do not fit a function.

    Returns whether it did.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some builtins have no signature.
        return False
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        text = _explain_call(function, signature, args, kwargs)
    else:
        return False  # The error is about something else.
    if text is not None:
        error.args = (text,)
    return text is not None


def _explain_call(
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> str | None:
    owner = function.__qualname__.removesuffix(".__init__")
    kind, dot, method = owner.rpartition(".")
    owner = f"{_PARTS.get(kind, kind)}{dot}{method}"
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    in_order = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    only_named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    kinds = {p.kind for p in parameters}

    known = [p.name for p in (*in_order, *only_named)]
    required = [p.name for p in (*in_order, *only_named) if p.default is p.empty]
    given = args[1:] if "self" in signature.parameters else args
    filled = {p.name for p in in_order[: len(given)]} | kwargs.keys()
    missing = [name for name in required if name not in filled]
    unknown = [name for name in kwargs if name not in known]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        name = unknown[0]
        advice = _find_option(name, parameters)
        text = _explain_keyword(owner, name, kwargs[name], known, advice)
        # The unknown keyword may be one of the missing ones under another name.
        others: list[str] = []
        for argument in missing:
            if f"`{argument}" not in text:
                others.append(f"`{argument}=...`")
        is_guess = "Did you mean" in text
        if others and not is_guess:
            text += f" It also needs {', '.join(others)}."
        return text

    takes_any_number = inspect.Parameter.VAR_POSITIONAL in kinds
    has_too_many = len(given) > len(in_order) and not takes_any_number
    not_given = [p for p in only_named if p.name not in kwargs]
    if has_too_many and not_given:
        # Required ones come first.
        first = min(not_given, key=lambda p: p.default is not p.empty).name
        counted = f"{len(in_order)} argument{'' if len(in_order) == 1 else 's'}"
        fix = _BY_NAME.get(owner) or f"Pass the others by name, as in `{first}=...`."
        return f"`{owner}` takes {counted} without a name, but got {len(given)}. {fix}"

    if not missing:
        return None
    names = ", ".join(f"`{name}`" for name in missing)
    call = ", ".join(f"{name}=..." for name in required)
    callee = owner if given is args else _as_variable(owner)
    is_one = len(missing) == 1
    verb = "is" if is_one else "are"
    answer = _MISSING.get(f"{owner}.{missing[0]}")
    if answer is not None and is_one:
        return f"`{owner}` needs {names}, which is missing. {answer}"
    return f"`{owner}` needs {names}, which {verb} missing. Write `{callee}({call})`."


def _as_variable(owner: str) -> str:
    """Returns `manager.save` for `CheckpointManager.save`; a class is not changed."""
    kind, _, method = owner.rpartition(".")
    words = re.findall("[A-Z][a-z]+", kind)
    return f"{words[-1].lower()}.{method}" if words else owner


def _find_option(name: str, parameters: list[inspect.Parameter]) -> str | None:
    """Returns the argument to write if an options class of a function has `name`."""
    for parameter in parameters:
        for kind in get_args(parameter.annotation) or (parameter.annotation,):
            is_options = isinstance(kind, type) and kind.__name__.endswith("Options")
            if is_options and name in inspect.signature(kind).parameters:
                call = f"{parameter.name}={kind.__name__}({name}=...)"
                return f"It is an option: `{call}`."
    return None


def _explain_keyword(
    owner: str, name: str, value: Any, known: list[str], advice: str | None
) -> str:
    answer = ANSWERS.get(f"{owner}.{name}") or ANSWERS.get(name)
    renamed = re.match("It is called `(.*?)` here", answer or "")
    if renamed is not None and renamed[1] not in known:
        answer = None  # The new name belongs to another function.
    answer = answer or advice
    word = name.strip("_")
    longer = [
        argument
        for argument in known
        if argument == word or argument.endswith(f"_{name}")
    ]
    # A less similar name would mislead: `validation_steps` is not `eval_actions`.
    found = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.69)
    if found:
        nearest = f"Did you mean `{found[0]}`?"
    elif known:
        nearest = f"It has {', '.join(f'`{argument}`' for argument in known)}."
    else:
        nearest = "It has no arguments."
    return (
        f"`{name}` is {shorten(value)}, but `{owner}` has no such argument. "
        f"{answer or nearest}"
    )
