"""Tracebacks that show the user's lines, and suggestions for wrong keywords.

Like JAX, the library removes its own frames from an exception that leaves it, unless
`JAX_TRACEBACK_FILTERING=off`. This file also decides whether a class, a function or a
file belongs to the user, to a library, or to Armillary.
"""

import contextlib
import difflib
import enum
import functools
import inspect
import linecache
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

from armillary._answers import answer_names, find_answer

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Libraries that this package imports from any folder. A user's package cannot have such
# a name.
_IMPORTED = ("armillary", "etils", "flax", "jax", "jaxlib", "numpy", "optax", "orbax")
# Other libraries that this package works with. A user's package may have such a name.
_OPTIONAL = frozenset(
    {
        *("datasets", "equinox", "grain", "keras", "rich", "tensorboard"),
        *("tensorboardX", "tensorflow", "torch"),
    }
)
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_IN_SITE = re.compile(r"(.*?[/\\](?:site|dist)-packages)[/\\]([^/\\]+)")
# Modules whose functions make classes. Such a class names one of these modules.
_MAKERS = ("abc", "types")
# Programs that are typed or piped into Python have no file.
_TYPED = ("<stdin>", "<console>", "<ipython-input-", "<python-input-")
_HEAP_TYPE = 1 << 9  # Of `type.__flags__`: set for every class that Python code makes.
_SWITCH = "JAX_TRACEBACK_FILTERING"
_NOTE = f"Armillary has left its own frames out. Set {_SWITCH}=off to see them."

_PROCESSES = "Leave it out: the strategy has joined the processes."
_TRAINER_ONLY = "Leave it out: an evaluation changes nothing that lasts."
_OF_THE_TRAINER = "The trainer takes it: `trainer=Trainer({})`."
_OF_METHODS = "Methods take it: `{}`."
_OF_THE_STRATEGY = "A strategy has the devices: `strategy=armillary.{}`."
_RESTORES = "Leave it out: the `checkpoint_manager` restores the latest checkpoint."
_CLIPS = "Optax clips gradients: `optax.chain(optax.clip_by_global_norm(1.0), ...)`."
_OF_THE_MANAGER = "`CheckpointManager` takes it: `{}`."
_HAS_A_MANAGER = (
    "Write `checkpoint_manager=armillary.CheckpointManager(checkpoint, directory)`."
)
_OF_THE_CONTROLLER = "`Controller` takes it: `{}`."
_OF_THE_DATA = "The data has it: `armillary.data.from_arrays(arrays, {})`."
_OF_THE_EVALUATOR = "The evaluator takes it: `evaluator=Evaluator(eval_dataset)`."
_WEIGHTS = (
    "Weight the losses in `train_step`: `armillary.weighted_mean(losses, weights)`."
)
_NEWEST_STAY = "Leave it out: the newest `max_to_keep` checkpoints stay."
_BEST_STAYS = "Leave it out: `keep_best` keeps the best besides the newest."
_IN_STEPS = "It is called `checkpoint_interval` here, and counts steps."
_KEEPS_BEST = (
    "`CheckpointManager` takes it: `keep_best=..., higher_is_better=...`. To stop "
    "early, write `eval_actions=[armillary.actions.EarlyStopping(...)]`."
)

# Keywords of Orbit, `tf.distribute`, Keras and Lightning, and the advice for each. If
# the advice depends on the class or function, its name is in front.
ANSWERS = {
    "use_tf_function": "It is called `compile_step` here.",
    "use_tf_while_loop": "It is called `compile_loop` here.",
    "use_tpu_summary_optimization": "Leave it out: summaries come between loops.",
    "StandardEvaluatorOptions.on_non_finite": _TRAINER_ONLY,
    "StandardEvaluatorOptions.check_replicas_every": _TRAINER_ONLY,
    "Controller.eval_steps": _OF_METHODS.format("train_and_evaluate(eval_steps=...)"),
    "Controller.eval_interval": _OF_METHODS.format(
        "train_and_evaluate(eval_interval=...)"
    ),
    "Controller.train_steps": _OF_METHODS.format("train_and_evaluate(train_steps=...)"),
    "Controller.steps": _OF_METHODS.format("train(steps=...)"),
    "Controller.max_steps": _OF_METHODS.format("train(steps=...)"),
    "Controller.num_steps": _OF_METHODS.format("train(steps=...)"),
    "Controller.epochs": _OF_METHODS.format("train(epochs=...)"),
    "max_epochs": _OF_METHODS.format("train(epochs=...)"),
    "Controller.train_dataset": _OF_THE_TRAINER.format("train_dataset"),
    "Controller.train_data": _OF_THE_TRAINER.format("train_dataset"),
    "Controller.batch_size": _OF_THE_DATA.format("batch_size=..."),
    "Controller.shuffle": _OF_THE_DATA.format("batch_size=..., shuffle_seed=0"),
    "Controller.seed": (
        "Seeds are where numbers are drawn: `nnx.Rngs(0)` for the model, and "
        "`shuffle_seed=0` for the data."
    ),
    "Controller.eval_dataset": _OF_THE_EVALUATOR,
    "Controller.validation_data": _OF_THE_EVALUATOR,
    "Controller.validation_split": (
        "Divide the arrays first, and give the evaluator its part: "
        "`evaluator=Evaluator(eval_dataset)`."
    ),
    "Controller.validation_steps": _OF_METHODS.format(
        "train_and_evaluate(eval_steps=...)"
    ),
    "Controller.limit_val_batches": _OF_METHODS.format(
        "train_and_evaluate(eval_steps=...)"
    ),
    "Controller.val_check_interval": _OF_METHODS.format(
        "train_and_evaluate(eval_interval=...)"
    ),
    "Controller.num_sanity_val_steps": (
        "Leave it out, and call `controller.evaluate(steps=...)` before training."
    ),
    "Controller.limit_train_batches": _OF_METHODS.format("train(steps=...)"),
    "Controller.fast_dev_run": _OF_METHODS.format("train(steps=...)"),
    "Controller.min_epochs": _OF_METHODS.format("train(epochs=...)"),
    "Controller.steps_per_epoch": (
        "Leave it out: the data has its length, as in `train(epochs=...)`. "
        "`steps_per_loop` is another number, of steps between two log lines."
    ),
    "Controller.max_time": (
        "Call `controller.request_stop(reason)` in one of the `train_actions`."
    ),
    "Controller.initial_epoch": _RESTORES,
    "Controller.loss": "The trainer computes it, in `train_step`.",
    "Controller.metrics": (
        "The trainer holds them: update one in `train_step`, and return "
        '`{"loss": self.loss.compute()}` from `train_loop_end`.'
    ),
    "Controller.learning_rate": "Optax has it: `optax.adam(learning_rate)`.",
    "Controller.lr": "Optax has it: `optax.adam(learning_rate)`.",
    "Controller.class_weight": _WEIGHTS,
    "Controller.sample_weight": _WEIGHTS,
    "Controller.run_eagerly": (
        "Write `armillary.StandardTrainerOptions(compile_step=False)` for the trainer."
    ),
    "Controller.profiler": "Write `train_actions=[armillary.actions.Profile(...)]`.",
    "Controller.deterministic": (
        "Leave it out. For GPUs, set `XLA_FLAGS=--xla_gpu_deterministic_ops=true`."
    ),
    "Controller.benchmark": "Leave it out: XLA chooses between operations.",
    "Controller.default_root_dir": (
        "Write `summary_dir=...`, and "
        "`armillary.CheckpointManager(checkpoint, directory)`."
    ),
    "Controller.checkpoint_dir": _HAS_A_MANAGER,
    "Controller.enable_checkpointing": _HAS_A_MANAGER,
    "Controller.save_weights_only": (
        "Name what to save: `armillary.Checkpoint(model=model)`, for the "
        "`checkpoint_manager`."
    ),
    "Controller.save_top_k": _OF_THE_MANAGER.format("max_to_keep=..., keep_best=..."),
    "Controller.save_best_only": _OF_THE_MANAGER.format("keep_best=..."),
    "Controller.every_n_train_steps": _OF_THE_MANAGER.format("checkpoint_interval=..."),
    "Controller.save_freq": _OF_THE_MANAGER.format("checkpoint_interval=..."),
    "Controller.mode": _OF_THE_MANAGER.format("keep_best=..., higher_is_better=..."),
    "Controller.train.batch_size": _OF_THE_DATA.format("batch_size=..."),
    "Controller.train.callbacks": _OF_THE_CONTROLLER.format(
        "train_actions=[...], eval_actions=[...]"
    ),
    "Controller.train.validation_data": _OF_THE_CONTROLLER.format(
        "evaluator=Evaluator(eval_dataset)"
    ),
    "Controller.train.verbose": _OF_THE_CONTROLLER.format("progress=..."),
    "Controller.model": "The trainer holds it: `self.model = model` in its `__init__`.",
    "Controller.optimizer": (
        "The trainer holds it. Give its count of steps: `global_step=optimizer.step`."
    ),
    "Controller.callbacks": "Write `train_actions=[...]` and `eval_actions=[...]`.",
    "Controller.logger": "Write `summary_dir=...`, or a `summary_manager=...`.",
    "Controller.devices": _OF_THE_STRATEGY.format("MirroredStrategy(devices)"),
    "Controller.accelerator": _OF_THE_STRATEGY.format("MirroredStrategy()"),
    "Controller.num_nodes": _OF_THE_STRATEGY.format("MultiWorkerMirroredStrategy()"),
    "Controller.precision": "Write `dtype=jnp.bfloat16` in the layers of the model.",
    "Controller.verbose": "It is called `progress` here.",
    "Controller.enable_progress_bar": "It is called `progress` here.",
    "Controller.monitor": _KEEPS_BEST,
    "gradient_clip_val": _CLIPS,
    "clipnorm": _CLIPS,
    "accumulate_grad_batches": (
        "Write `StandardTrainerOptions(accumulate_steps=...)` for the trainer."
    ),
    "resume_from_checkpoint": _RESTORES,
    "ckpt_path": _RESTORES,
    "log_every_n_steps": "It is called `log_interval` here.",
    "CheckpointManager.monitor": "It is called `keep_best` here.",
    "EarlyStopping.monitor": "It is called `metric` here.",
    "NewBestMetric.monitor": "It is called `metric` here.",
    "EarlyStopping.restore_best_weights": (
        "Leave it out, and call `checkpoint_manager.restore_best()` after training."
    ),
    "mode": "Say so with `higher_is_better=True`, or `False`.",
    "CheckpointManager.save_top_k": _BEST_STAYS,
    "CheckpointManager.save_best_only": _BEST_STAYS,
    "CheckpointManager.save_last": _NEWEST_STAY,
    "CheckpointManager.every_n_train_steps": _IN_STEPS,
    "CheckpointManager.every_n_epochs": _IN_STEPS,
    "CheckpointManager.period": _IN_STEPS,
    "CheckpointManager.save_freq": _IN_STEPS,
    "CheckpointManager.save_interval_steps": _IN_STEPS,
    "CheckpointManager.dirpath": "It is called `directory` here.",
    "CheckpointManager.filepath": "It is called `directory` here.",
    "CheckpointManager.filename": (
        "Leave it out: a checkpoint is a folder named for its step."
    ),
    "CheckpointManager.save_weights_only": (
        "Name what to save: `armillary.Checkpoint(model=model)`."
    ),
    "enable_async_checkpointing": "Leave it out: every save runs in the background.",
    "hang_timeout": "It is called `hang_timeout_seconds` here.",
    "checkpoint_name": "Leave it out: a checkpoint is a folder named for its step.",
    "Checkpoint.read.rename": (
        "Name the objects as they were saved: `Checkpoint(model={'old name': part})`."
    ),
    "summary_fn": "Use `writer_fn`, which makes the writer of each directory.",
    "SummaryManager.global_step": "Leave it out: `write_summaries` takes the step.",
    "PeriodicAction.global_step": "Leave it out: a `Controller` binds its own.",
    "NewBestMetric.filename": (
        "Use `directory`, in which it makes a file named for the metric."
    ),
    "write_metric": "Leave it out: of several processes, the chief writes.",
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
    "Strategy.run.options": (
        "Leave it out; for options of XLA, write "
        "`StandardTrainerOptions(compiler_options={...})`."
    ),
    "input_signature": "Leave it out: each shape of the arguments is a program.",
    "jit_compile": "Leave it out: XLA compiles every program.",
    "reduce_retracing": "Leave it out: each shape of the arguments is a program.",
}
# Advice for calls that give arguments without the names they need.
_BY_NAME = {
    "from_arrays": "Several arrays are one nest: `from_arrays((x, y), batch_size=64)`.",
}


def hides_frames(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function that users call.

    Exceptions from it, or from the iterator of a generator function, have no frames of
    this library. The error for an unknown keyword names the new name of an old keyword,
    or the nearest keyword. The errors for missing arguments, and for arguments without
    a name, have advice as well.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _leave(error, function, args, kwargs)
            raise  # without this frame, as `_leave` has left it

    @functools.wraps(function)
    def iterate(*args: Any, **kwargs: Any) -> Any:
        try:
            generator: Any = function(*args, **kwargs)
            yield from generator
        except Exception as error:
            _leave(error, function, args, kwargs)
            raise

    return iterate if inspect.isgeneratorfunction(function) else call


def mark_public(namespace: dict[str, Any]) -> None:
    """Marks the names in a package's `__all__`, by default all of its names.

    The package and its classes also give advice for names of other libraries.
    """
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
        if value.__module__.startswith("armillary") and count > 0:
            marked = hides_frames(value)
            if home is value:
                home = sys.modules[value.__module__]
                namespace[name] = marked
            setattr(home, name, marked)
    answer_names(namespace)


def _leave(
    error: Exception,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Adds advice on wrong arguments, and hides own frames in an exception."""
    if isinstance(error, TypeError) and _answer(error, function, args, kwargs):
        error.__traceback__ = None  # Python adds the caller's line later.
        return
    if isinstance(error, AttributeError):
        _note_name(error)
    # A generator may be closed while Python exits, when JAX is gone.
    config = getattr(sys.modules.get("jax"), "config", None)
    if config is None or config.values["jax_traceback_filtering"] != "off":
        _hide(error)


def _answer(
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
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [p.name for p in parameters if p.kind in by_name]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [name for name in kwargs if name not in known]
    if unknown and not takes_any:
        return _explain_keyword(owner, unknown[0], kwargs[unknown[0]], known)

    given = args[1:] if "self" in signature.parameters else args
    in_order = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    others = [
        p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in kwargs
    ]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(given) > len(in_order) and others and not takes_more:
        first = min(others, key=lambda p: p.default is not p.empty).name
        counted = f"{len(in_order)} argument{'' if len(in_order) == 1 else 's'}"
        fix = _BY_NAME.get(owner) or f"Pass the others by name, as in `{first}=...`."
        return f"`{owner}` takes {counted} without a name, but got {len(given)}. {fix}"

    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in by_name
    ]
    filled = {p.name for p in in_order[: len(given)]} | kwargs.keys()
    missing = [name for name in required if name not in filled]
    if not missing:
        return None
    names = ", ".join(f"`{name}`" for name in missing)
    call = ", ".join(f"{name}=..." for name in required)
    what = owner if given is args else _as_variable(owner)
    verb = "is" if len(missing) == 1 else "are"
    return f"`{owner}` needs {names}, which {verb} missing. Write `{what}({call})`."


def _as_variable(owner: str) -> str:
    """Returns `manager.save` for `CheckpointManager.save`; a class is not changed."""
    kind, _, method = owner.rpartition(".")
    words = re.findall("[A-Z][a-z]+", kind)
    return f"{words[-1].lower()}.{method}" if words else owner


def _explain_keyword(owner: str, name: str, value: Any, known: list[str]) -> str:
    answer = ANSWERS.get(f"{owner}.{name}") or ANSWERS.get(name)
    renamed = re.match("It is called `(.*?)` here", answer or "")
    if renamed is not None and renamed[1] not in known:
        answer = None  # The new name belongs to another function.
    word = name.strip("_")
    longer = [each for each in known if each == word or each.endswith(f"_{name}")]
    # A less similar name would mislead: `validation_steps` is not `eval_actions`.
    found = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.69)
    if found:
        nearest = f"Did you mean `{found[0]}`?"
    elif known:
        nearest = f"It has {', '.join(f'`{each}`' for each in known)}."
    else:
        nearest = "It has no arguments."
    return (
        f"`{name}` is {value!r}, but `{owner}` has no such argument. "
        f"{answer or nearest}"
    )


def _note_name(error: AttributeError) -> None:
    """Adds advice on a name that objects of Flax, Keras or JAX do not have."""
    kind = type(error.obj)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(error.obj, jax.Array):
        kind = jax.Array
    answer = None
    if error.name is not None and owner_of_class(kind) is Owner.LIBRARY:
        answer = find_answer(kind, error.name)
    if answer is not None and answer not in getattr(error, "__notes__", ()):
        error.add_note(answer)


def _hide(error: BaseException) -> None:
    """Removes own frames from an exception and from all exceptions that led to it."""
    entries = list(_entries(error.__traceback__))
    notes = [note for note in getattr(error, "__notes__", ()) if note != _NOTE]
    # The note is added unless JAX has added its own, or Armillary raised the error.
    has_note = any(_SWITCH in note for note in notes)
    if any(map(_is_own, entries)) and not (has_note or _is_raised(entries[-1])):
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
    """Returns whether a `raise` statement of this package raised an exception."""
    file = entry.tb_frame.f_code.co_filename
    line = linecache.getline(file, entry.tb_lineno).strip()
    return _is_own(entry) and line.startswith("raise")


def _entries(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(entry: types.TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    # Context managers of this package run through `contextlib`.
    return is_own_file(file) or file == contextlib.__file__


def is_own_file(file: str) -> bool:
    """Returns whether a file is a part of this package."""
    return file.startswith(_PACKAGE)


class Owner(enum.IntEnum):
    """The owner of a class, a function or a module."""

    USER = 0
    PACKAGE = 1  # installed, but unknown to Armillary
    LIBRARY = 2  # Python itself, Armillary, or a library that it works with


def is_library_file(file: str) -> bool:
    """Returns whether a file belongs to a library, as `owner_of_file` decides."""
    return owner_of_file(file) is Owner.LIBRARY


@functools.lru_cache(maxsize=4096)
def owner_of_file(file: str) -> Owner:
    """Returns the owner of the code in a file.

    Code without a file is a library's, unless it was typed or piped into Python.
    """
    if file.startswith(_TYPED):
        return Owner.USER
    if file.startswith(("<", *_imported_folders())):
        return Owner.LIBRARY

    in_site = _IN_SITE.match(file)
    if in_site is None:
        is_python = file.startswith(_STANDARD_LIBRARY)
        return Owner.LIBRARY if is_python else Owner.USER

    site, entry = in_site.groups()
    name = entry.partition(".")[0]
    is_known = name in _OPTIONAL and _is_installed(site, name)
    return Owner.LIBRARY if is_known else Owner.PACKAGE


def _imported_folders() -> Iterator[str]:
    for name in _IMPORTED:
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            yield folder + os.sep


@functools.lru_cache(maxsize=256)
def _is_installed(site: str, name: str) -> bool:
    """Returns whether the library with this name was installed in a folder.

    Otherwise, the package with this name is part of a distribution of the user.
    """
    try:
        entries = os.listdir(site)
    except OSError:
        return False
    return any(
        entry.lower().startswith(name.lower()) and entry.endswith("-info")
        for entry in entries
    )


def owner_of_module(module: Any) -> Owner:
    """Returns the owner of a module, from its file, because names can be faked."""
    known = getattr(module, "__dict__", {})
    file = known.get("__file__")
    if isinstance(file, str):
        return owner_of_file(file)
    origin = getattr(known.get("__spec__"), "origin", None)
    if origin in ("built-in", "frozen"):
        return Owner.LIBRARY
    # A compiled library makes modules without a file inside its own.
    above = str(known.get("__name__", "")).rpartition(".")[0]
    return owner_of_module(sys.modules[above]) if above in sys.modules else Owner.USER


def owner_of_function(function: types.FunctionType) -> Owner:
    """Returns the owner of a Python function.

    A decorator of a library gives its own function the module name of the wrapped
    function, and code that is run by `exec` can have the name of any module. So a
    function belongs to a library only if both its named module and its globals do.
    """
    names = function.__globals__
    home = str(names.get("__name__"))
    module = sys.modules.get(home)
    if module is None or vars(module) is not names:
        return Owner.USER
    owner = owner_of_module(module)
    if function.__module__ == home:
        return owner
    return min(owner, owner_of_module(sys.modules.get(function.__module__)))


@functools.lru_cache(maxsize=4096)
def owner_of_class(kind: type) -> Owner:
    """Returns the owner of a class.

    A class may name a module that does not contain it: `type("Sweep", (Trainer,), {})`
    names the module of the metaclass, and `exec` without a `__name__` names `builtins`.
    """
    name = kind.__module__ if isinstance(kind.__module__, str) else ""
    while name and name not in sys.modules:
        name = name.rpartition(".")[0]
    module = sys.modules.get(name)
    owner = owner_of_module(module)
    if owner is Owner.USER or _find_class(module, kind.__qualname__) is kind:
        return owner

    is_made_in_c = not kind.__flags__ & _HEAP_TYPE
    has_room = kind.__dictoffset__ or "__slots__" in vars(kind)
    if is_made_in_c or not has_room:
        return owner

    functions = [
        each for each in vars(kind).values() if isinstance(each, types.FunctionType)
    ]
    if name in _MAKERS or not functions:
        return Owner.USER
    return min(map(owner_of_function, functions))


def _find_class(module: Any, path: str) -> Any:
    found = module
    for name in path.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found
