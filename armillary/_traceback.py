"""What users call: its tracebacks show their lines, and its keywords are suggested.

Like JAX, the library removes its own frames from an exception that leaves it, unless
`JAX_TRACEBACK_FILTERING=off`. Also tells whose code this is, by its module or file.
"""

import contextlib
import difflib
import functools
import inspect
import linecache
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = frozenset(
    {
        *("armillary", "datasets", "equinox", "etils", "flax", "grain", "jax"),
        *("jaxlib", "keras", "numpy", "optax", "orbax", "rich", "tensorboard"),
        *("tensorboardX", "tensorflow", "torch"),
    }
)
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_SWITCH = "JAX_TRACEBACK_FILTERING"
_NOTE = f"Armillary has left its own frames out. Set {_SWITCH}=off to see them."

_PROCESSES = "Leave it out: the processes are those that the strategy has joined."
_TRAINER_ONLY = "Leave it out: an evaluation changes nothing that lasts."

# Keywords of Orbit, `tf.distribute` and Lightning, and what to write here. Where the
# name alone says too little, the class or function stands before it.
ANSWERS = {
    "use_tf_function": "It is called `compile_step` here.",
    "use_tf_while_loop": "It is called `compile_loop` here.",
    "use_tpu_summary_optimization": "Leave it out: summaries come between loops.",
    "StandardEvaluatorOptions.on_non_finite": _TRAINER_ONLY,
    "StandardEvaluatorOptions.check_replicas_every": _TRAINER_ONLY,
    "Controller.eval_steps": "Methods take it: `train_and_evaluate(eval_steps=...)`.",
    "max_epochs": "Methods take it: `train(epochs=...)`.",
    "log_every_n_steps": "It is called `log_interval` here.",
    "monitor": "It is called `keep_best` here.",
    "mode": "Say so with `higher_is_better=True`, or `False`.",
    "save_top_k": "Leave it out: `keep_best` keeps the best besides the newest.",
    "enable_async_checkpointing": "Leave it out: every save goes on in the background.",
    "hang_timeout": "It is called `hang_timeout_seconds` here.",
    "checkpoint_name": "Leave it out: a checkpoint is a folder named for its step.",
    "summary_fn": "Use `writer_fn`, which makes the writer of each directory.",
    "SummaryManager.global_step": "Leave it out: `write_summaries` takes the step.",
    "PeriodicAction.global_step": "Leave it out: a `Controller` binds its own.",
    "filename": "Use `directory`, in which it makes a file named for the metric.",
    "signatures": "Pass one function as `model`, and examples for it as `args`.",
    "SaveCheckpointIfPreempted.cluster_resolver": _PROCESSES,
    "termination_watcher_fn": "It is called `watcher` here.",
    "experimental_fetch_to_device": "Leave it out: batches are always on the devices.",
    "experimental_per_replica_buffer_size": "It is called `prefetch` here.",
    "experimental_place_dataset_on_device": "It is called `place_on_device` here.",
    "MultiWorkerMirroredStrategy.communication": "Write `communication_options="
    "armillary.cluster.CommunicationOptions(implementation=...)`.",
    "cross_device_ops": "Leave it out, or use `armillary.MirroredStrategy`, which has "
    "it.",
    "reduce_to_device": "Leave it out, and put that device first in `devices` of the "
    "strategy.",
    "accumulation_fn": "Leave it out, and derive from "
    "`armillary.distribute.CrossDeviceOps` to combine values in another way.",
    "tpu_cluster_resolver": "It is called `resolver` here.",
    "experimental_device_assignment": "Leave it out: a replica here is one device.",
}


def hides_frames(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function that users call.

    No exception brings own frames out of it, nor out of the iterator that a generator
    function returns. A keyword that it does not have is answered with the new name of
    an old one, or with the nearest one.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _leave(error, function, kwargs)
            raise  # without this frame, as `_leave` has left it

    @functools.wraps(function)
    def iterate(*args: Any, **kwargs: Any) -> Any:
        try:
            generator: Any = function(*args, **kwargs)
            yield from generator
        except Exception as error:
            _leave(error, function, kwargs)
            raise

    return iterate if inspect.isgeneratorfunction(function) else call


def mark_public(namespace: dict[str, Any]) -> None:
    """Marks what is in a package's `__all__`, by default all names that it has."""
    kinds = {name: type(each) for name, each in namespace.items() if name[0] != "_"}
    own = sorted(name for name in kinds if kinds[name] is not types.ModuleType)
    for name in namespace.setdefault("__all__", own):
        value = home = namespace.get(name)
        if isinstance(value, type):
            name = "__init__"
            home = next(cls for cls in value.__mro__ if name in vars(cls))
            value = vars(home)[name]
        if not isinstance(value, types.FunctionType) or hasattr(value, "__wrapped__"):
            continue
        code = value.__code__
        count = code.co_argcount - code.co_posonlyargcount + code.co_kwonlyargcount
        if value.__module__.startswith("armillary") and count > (name == "__init__"):
            marked = hides_frames(value)
            if home is value:
                home = sys.modules[value.__module__]
                namespace[name] = marked
            setattr(home, name, marked)


def _leave(
    error: Exception, function: Callable[..., Any], kwargs: Mapping[str, Any]
) -> None:
    """Answers a wrong keyword, and hides own frames of what leaves a function."""
    if isinstance(error, TypeError) and _answer(error, function, kwargs):
        error.__traceback__ = None  # The caller's line is yet to come.
        return
    # A generator may be ended when Python has ended, and JAX is gone.
    config = getattr(sys.modules.get("jax"), "config", None)
    if config is None or config.values["jax_traceback_filtering"] != "off":
        _hide(error)


def _answer(
    error: TypeError, function: Callable[..., Any], kwargs: Mapping[str, Any]
) -> bool:
    """Says more in Python's error of a keyword, if a function does not have it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Of some builtins.
        return False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [p.name for p in parameters if p.kind in by_name and p.name != "self"]
    unknown = [name for name in kwargs if name not in known]
    if not (known and unknown) or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return False
    name, owner = unknown[0], function.__qualname__.removesuffix(".__init__")
    answer = ANSWERS.get(f"{owner}.{name}") or ANSWERS.get(name)
    longer = [each for each in known if each.endswith(f"_{name}")]
    found = longer or difflib.get_close_matches(name, known, n=1)
    nearest = (
        f"Did you mean `{found[0]}`?"
        if found
        else f"It has {', '.join(f'`{each}`' for each in known)}."
    )
    error.args = (
        f"`{name}` is {kwargs[name]!r}, but `{owner}` has no such argument. "
        f"{answer or nearest}",
    )
    return True


def _hide(error: BaseException) -> None:
    """Removes own frames from an exception and from all exceptions that led to it."""
    entries = list(_entries(error.__traceback__))
    notes = [note for note in getattr(error, "__notes__", ()) if note != _NOTE]
    # One note says so, unless JAX has added its own, or the error is one of ours.
    is_said = any(_SWITCH in note for note in notes)
    if any(map(_is_own, entries)) and not (is_said or _is_raised(entries[-1])):
        notes.append(_NOTE)
    if notes != getattr(error, "__notes__", []):
        error.__notes__ = notes
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        kept = None
        for entry in reversed(list(_entries(current.__traceback__))):
            if not _is_own(entry):
                line = entry.tb_lineno
                kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, line)
        current.__traceback__ = kept
        pending += [current.__cause__, current.__context__]


def _is_raised(entry: types.TracebackType) -> bool:
    """Returns whether this package raised an exception itself, in its own words."""
    file = entry.tb_frame.f_code.co_filename
    line = linecache.getline(file, entry.tb_lineno).strip()
    return _is_own(entry) and line.startswith("raise")


def _entries(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(entry: types.TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    # Through `contextlib` run the context managers of this package.
    return file.startswith(_PACKAGE) or file == contextlib.__file__


def is_library(module: str | None) -> bool:
    """Returns whether a module is one of Python's, of this package or what it uses."""
    name = (module or "").partition(".")[0]
    return name in _LIBRARIES or name in sys.stdlib_module_names


@functools.lru_cache(maxsize=4096)
def is_library_file(file: str) -> bool:
    """Returns whether a file belongs to such a module, or code has no file."""
    if file.startswith(_STANDARD_LIBRARY):
        return "-packages" not in file
    modules = (sys.modules.get(name) for name in _LIBRARIES)
    files = (getattr(module, "__file__", None) for module in modules)
    folders = (os.path.dirname(file) + os.sep for file in files if file)
    return file.startswith(("<", *folders))
