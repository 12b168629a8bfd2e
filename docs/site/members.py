"""The members of a class that its page of the reference describes.

A page shows what a user may call, inherited members included. Members that only other
parts of the library call are internal, and stand in `INTERNAL`.
"""

import inspect
from functools import cached_property
from typing import NamedTuple

# By the class that a member belongs to. A class inherits the list of its bases.
INTERNAL = {
    "Checkpoint": (
        "find_missing",
        "find_slots",
        "data_positions",
        "missing_before",
        "passing",
        "read_content",
        "read_leaves",
    ),
    "CheckpointManager": (
        "bind_evaluation",
        "bind_step_counter",
        "has_saved_step",
        "is_due",
        "read_content",
    ),
    "ClusterCoordinator": ("leave_out", "statistics", "take_statistics"),
    "DistributedDataset": (
        "check_repositionable",
        "global_batches",
        "open_reader",
        "prefetch",
    ),
    "EarlyStopping": ("begin_training",),
    "IndexedDataset": (
        "fingerprints",
        "order_of_examples",
        "read_rows",
        "row_types",
        "rows_at_once",
        "spaced_rows",
        "take_examples",
    ),
    "LoopOptions": ("hooks_in_program",),
    "ParameterServerStrategy": ("actor_options", "describe_absent", "name_task"),
    "PerReplica": ("active", "is_shared", "parts"),
    "Profile": ("end_training",),
    "ReduceOp": ("of",),
    "ReplicaContext": (
        "is_active",
        "is_first",
        "num_active",
        "reduce_merged",
        "run_merged",
    ),
    "ScheduledResolver": ("hold_alone",),
    "StandardTrainer": ("begin_epoch", "prepare", "start"),
    "StepAction": ("bind_step_counter", "last_step", "resume_at"),
    "StepEvaluator": ("eval_begin", "eval_end", "eval_reduce", "eval_step"),
    "StepTrainer": ("train_loop_begin", "train_loop_end", "train_step"),
    "Strategy": (
        "described",
        "input_context",
        "layout",
        "leave_program_mesh",
        "peers",
    ),
    "SummaryManager": ("resume_at",),
}


class Members(NamedTuple):
    """The members of a class that its page describes, and other names of them."""

    methods: list[str]
    properties: list[str]
    aliases: dict[str, str]


def find_members(value: type) -> Members:
    """Returns the public members of a class, its own first, in the order of the source.

    Args:
        value: A class of the library.

    Returns:
        The methods and the properties to describe, and the names that mean the same as
        another one, such as `experimental_run_v2` for `run`.
    """
    own = [base for base in value.__mro__ if base.__module__.startswith("armillary")]
    internal = {name for base in own for name in INTERNAL.get(base.__name__, ())}
    defined = dict.fromkeys(name for base in own for name in vars(base))

    members = Members(methods=[], properties=[], aliases={})
    for name in defined:
        if name.startswith("_") or name in internal or not _is_documented(own, name):
            continue
        original = _find_original(value, name)
        if original != name:
            members.aliases[name] = original
        elif inspect.isroutine(inspect.getattr_static(value, name)):
            members.methods.append(name)
        else:
            members.properties.append(name)
    return members


def _find_functions(base: type, name: str) -> list[object]:
    """Returns what holds the docstring and the name of a member that `base` defines."""
    member = vars(base).get(name)
    if isinstance(member, property):
        return [member.fget]
    if isinstance(member, cached_property):
        return [member.func]
    if isinstance(member, classmethod | staticmethod):
        return [member.__func__]
    return [member] if inspect.isroutine(member) else []


def _is_documented(own: list[type], name: str) -> bool:
    """Returns whether a class or one of its bases describes a member."""
    found = [function for base in own for function in _find_functions(base, name)]
    return any(getattr(function, "__doc__", None) for function in found)


def _find_original(value: type, name: str) -> str:
    """Returns the name under which a member was defined."""
    owner = next(base for base in value.__mro__ if name in vars(base))
    for function in _find_functions(owner, name):
        original = getattr(inspect.unwrap(function), "__name__", name)
        is_public = hasattr(value, original) and not original.startswith("_")
        if is_public and original != name:
            return original
    return name
