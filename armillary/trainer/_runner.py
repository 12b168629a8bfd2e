"""The common base of trainers and evaluators: options, a step, data, a strategy."""

import contextlib
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax

from armillary._checks import check_instance, check_one_of, check_positive_int
from armillary._copies import OfOneProcess, refuse_copy
from armillary._jaxpr import is_in_trace
from armillary.data._dataset import DistributedDataset, DistributedIterator
from armillary.data.feed._stream import Prefetcher
from armillary.data.sources._source import Source
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._context import get_strategy, has_strategy
from armillary.distribute.replica._gradient import accumulating
from armillary.errors import ReplicaContextError
from armillary.goodput._stopwatch import Category, get_stopwatch
from armillary.lifeline._lifeline import waiting
from armillary.state._holders import held_by
from armillary.trainer._no_data import NoBatches, takes
from armillary.typing import PyTree

# The interval at which the device is checked. The wait ends when data arrives.
_POLL_SECONDS = 0.002


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of trainers and evaluators: see `StandardTrainerOptions`."""

    compile_loop: bool = True
    compile_step: bool = True
    steps_per_chunk: int | None = None
    max_chunk_bytes: int = 256 * 2**20
    compiler_options: Mapping[str, Any] | None = None
    max_shapes: int = 1
    # Options that only trainers have are off here.
    on_non_finite: str | None = field(default=None, init=False, repr=False)
    check_replicas_every: int | None = field(default=None, init=False, repr=False)
    compile_hooks: bool | None = field(default=False, init=False, repr=False)
    accumulate_steps: int = field(default=1, init=False, repr=False)
    read_ahead: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        check_one_of("compile_loop", self.compile_loop, (True, False))
        check_one_of("compile_step", self.compile_step, (True, False))
        if self.steps_per_chunk is not None:
            check_positive_int("steps_per_chunk", self.steps_per_chunk)
        check_positive_int("max_chunk_bytes", self.max_chunk_bytes)
        check_positive_int("max_shapes", self.max_shapes)
        if (options := self.compiler_options) is not None:
            fix = 'Use a dictionary, such as `{"xla_cpu_enable_fast_math": True}`.'
            check_instance("compiler_options", options, Mapping, fix)

    @property
    def hooks_in_program(self) -> bool | None:
        """`compile_hooks`, but False if steps are checked, or not compiled.

        A check of each step may end a loop at any step, and then Python runs the hooks.
        """
        is_watched = self.on_non_finite or self.check_replicas_every
        is_compiled = self.compile_loop and self.compile_step
        return self.compile_hooks if is_compiled and not is_watched else False


@dataclass(frozen=True, kw_only=True)
class StandardTrainerOptions(LoopOptions):
    """Options of a `StandardTrainer`.

    Args:
        compile_loop: Whether many steps run as one device program. If `False`, the same
            compiled step runs from a Python loop, with bit-identical results.
        compile_step: Whether the step is compiled at all. If `False`, every operation
            runs when Python reaches it, for debugging. This is slow, and results are
            equal up to rounding. On several replicas, the function given to `run` is
            traced and checked as in a compiled step. On one device, it runs line by
            line, and `print` shows values.
        steps_per_chunk: Most steps in one device program, and most batches that are
            stacked for it. Results do not depend on it. More steps save time between
            programs, but they delay the first step and need more memory. `None` takes
            `steps_per_loop` of the `Controller`, or `num_steps` of the first call of
            `train`, but at most 100. Short loops share a chunk of up to 20 steps.
        max_chunk_bytes: Most memory of one stack of batches, in bytes. There are two or
            three stacks at a time: one in use, and the stacks that are read ahead.
        compiler_options: Options of XLA, as in `jax.jit(compiler_options=...)`. They
            override the options that Armillary chooses for a step. (On CPUs, steps with
            convolutions use YNNPACK only for sums.) With different options, results are
            equal up to rounding. A name that XLA does not know is an error of JAX.
        max_shapes: The number of different shapes that batches may have. The number of
            examples does not count. One program is compiled for each shape, when it
            appears first. More shapes are a `RetraceError`. Only consecutive steps with
            batches of one shape are one device program; results do not depend on that.
        on_non_finite: The reaction to a step after which an array of the state has more
            values that are infinite or not a number than before. `"raise"` undoes the
            step, runs no further step, and raises `NonFiniteError`; state and data are
            the same as before the step. `"skip"` undoes the step and continues; only
            counters and random keys advance, see below. `None` checks nothing.
        accumulate_steps: Gradient accumulation: the number of parts in which
            `armillary.value_and_grad(..., batch=batch)` takes each replica's share of a
            batch, one after the other. Only the activations of one part need memory.
            There is one update. The gradients, summed over replicas once, equal the
            gradients of the whole batch. The examples of a replica must be a multiple
            of this number.
        read_ahead: Whether batches may be read while earlier steps run. If `False`,
            each batch is read right before its step, in the thread that trains, with
            the state after the previous step. Use this for data that depends on the
            parameters, such as games that the model plays. Each step is then a separate
            program, and the device waits while Python makes the batch.
        check_replicas_every: Steps after which to compare the copies of the state on
            all replicas, when a loop has ended. If any differ, `ReplicaDivergenceError`
            names arrays and replicas. `None` does not compare.
        compile_hooks: Whether `train_loop_begin` and `train_loop_end` are part of the
            device program, so that it can run many loops. `None` reads their code: they
            are part of it if they only reset and compute metrics of Flax or Keras, set
            arrays, count, and do arithmetic for the output. `True` declares that they
            need no Python: for example, they do not print, and do not change plain
            values. They are then traced once, like the step. With `on_non_finite` or
            `check_replicas_every`, or without compilation, they run in Python.

    A step that is skipped changes no array, except random keys and integers of 32 or 64
    bits outside metrics, batch statistics and the state of Optax. So the global step
    counts it.

    Raises:
        ValueError: If a number is below 1, or `on_non_finite` is not one of its values.
            Also if steps that are not compiled are to be checked, or if
            `steps_per_chunk` is above 1 without `read_ahead`.
    """

    on_non_finite: Literal["raise", "skip"] | None = None
    check_replicas_every: int | None = None
    compile_hooks: bool | None = None
    accumulate_steps: int = 1
    read_ahead: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("read_ahead", self.read_ahead, (True, False))
        if not self.read_ahead and self.steps_per_chunk not in (None, 1):
            raise ValueError(
                f"`read_ahead` is False, but `steps_per_chunk` is "
                f"{self.steps_per_chunk}, and the batches of a chunk are read before "
                "its first step. Leave `steps_per_chunk` out."
            )
        check_one_of("on_non_finite", self.on_non_finite, (None, "raise", "skip"))
        check_positive_int("accumulate_steps", self.accumulate_steps)
        check_one_of("compile_hooks", self.compile_hooks, (None, True, False))
        if self.check_replicas_every is not None:
            check_positive_int("check_replicas_every", self.check_replicas_every)
        if not self.compile_step and (self.on_non_finite or self.check_replicas_every):
            raise ValueError(
                "`compile_step` is False, but `on_non_finite` and "
                "`check_replicas_every` check compiled steps. Leave them out. To find "
                'the line of a NaN, use `jax.config.update("jax_debug_nans", True)`.'
            )


@dataclass(frozen=True, kw_only=True)
class StandardEvaluatorOptions(LoopOptions):
    """Options of a `StandardEvaluator`.

    The options for compilation, chunks and shapes are the same as in
    `StandardTrainerOptions`. With `steps_per_chunk=None`, a complete evaluation uses
    chunks of 20 steps.

    Args:
        recreate_iterator_for_each_eval: Whether each evaluation begins at the first
            batch. With `False`, which is the default in Orbit, an evaluation continues
            where the last evaluation ended. It begins again once the data has ended.
            Checkpoints do not save this position.

    Raises:
        ValueError: If a number is below 1.
    """

    recreate_iterator_for_each_eval: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "recreate_iterator_for_each_eval"
        check_one_of(name, self.recreate_iterator_for_each_eval, (True, False))


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


@dataclass
class Run(OfOneProcess):
    """The data, options and loop of a step, separate from the user's attributes."""

    _why_not_copied = "its loop has threads and programs of this process"
    _copy_instead = (
        "Make a new object in the process that uses it, and give it the state: save "
        "and restore a `Checkpoint`, or copy a model by `nnx.clone`."
    )

    datasets: PyTree
    options: Any
    steps_per_loop: int | None = None
    loop: Any = None  # the last loop, a `Loop` or an `AsynchronousLoop`
    has_warned: bool = False  # about data that resumes or ends in an unexpected way
    # The distributed datasets, and the nest from which they were made.
    _parts: Sequence[DistributedDataset] | None = None
    _nest: PyTree = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.loop is not None:
            raise refuse_copy("A trainer or an evaluator that has run steps", self)
        return object.__reduce_ex__(self, protocol)

    def distribute(self, strategy: Strategy) -> Sequence[DistributedDataset]:
        """Returns the datasets distributed by a strategy, and keeps their positions."""
        before = self._parts if self._nest is self.datasets else None
        if before is not None and all(
            each.layout == strategy.layout for each in before
        ):
            return before
        leaves, _ = flatten_datasets(self.datasets)
        self._parts = parts = [distribute(each, strategy) for each in leaves]
        self._nest = self.datasets
        for old, new in zip(before or (), parts, strict=False):
            if old is not new and old.is_repositionable:
                new.set_state(old.get_state())
        return parts

    def hold(self, strategy: Strategy) -> Sequence[DistributedDataset]:
        """Returns the datasets as they are distributed, by a strategy if they are not.

        Their positions are the same under every strategy. A save may be outside of the
        strategy that trains, and must not end the loop.
        """
        parts = self._parts
        if parts is None or self._nest is not self.datasets:
            return self.distribute(strategy)
        return parts


def make_run(
    argument: str, datasets: PyTree, options: LoopOptions | None, kind: type
) -> Run:
    """Returns the `Run` for the datasets that a user gave as `argument`."""
    if options is not None:
        fix = f"Write `options=armillary.{kind.__name__}(...)`."
        check_instance("options", options, kind, fix)
    for each in flatten_datasets(datasets)[0]:
        _check_is_no_pass(argument, each)
        is_one = isinstance(each, Iterable | Callable | Source)
        if isinstance(each, tuple) and not each:
            raise TypeError(
                f"`{argument}` is (), which holds no data set. Pass a data set, or "
                "None for a step that makes its own data."
            )
        if not is_one or isinstance(each, str | bytes | bytearray | dict):
            raise TypeError(
                f"`{argument}` has {each!r:.80} of type {type(each).__name__}, but it "
                "must hold data sets. Use `armillary.data.from_arrays(arrays, "
                "batch_size=...)`, or an iterable of batches."
            )
    return Run(datasets, options or kind())


class StepMethod(NamedTuple):
    """A step that the user wrote: a function of a nest of iterators."""

    owner: Any  # the root of the search for state
    fn: Callable[[Any], PyTree]
    name: str  # for messages
    strategy: Strategy
    options: LoopOptions
    is_evaluation: bool  # It must not change the model; it may get parts of batches.
    keep_results: bool = False

    def __call__(self, iterators: Any) -> PyTree:
        if iterators is None:
            argument = "eval_dataset" if self.is_evaluation else "train_dataset"
            iterators = NoBatches(argument, self.name)
        with accumulating(self.options.accumulate_steps, self.name):
            return self.fn(iterators)

    @property
    def owner_name(self) -> str:
        return "the evaluator" if self.is_evaluation else "the trainer"


def check_step_signature(step: Callable[..., Any], owner: str) -> None:
    """Raises if a step takes other arguments than one iterator.

    Args:
        step: The step, without its trainer.
        owner: The class of the trainer or evaluator, for the message.
    """
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # Some built-in functions have no signature.
        return
    if takes(signature, 1):
        return
    name = getattr(step, "__name__", "the step")
    first = "self, " if inspect.ismethod(step) else ""
    raise TypeError(
        f"`{owner}.{name}` has the arguments `{signature}`, but a step gets one "
        f"argument, an iterator over batches. Write `def {name}({first}iterator):`, "
        "and take a batch in it: `x, y = next(iterator)`."
    )


_recorders: dict[int, Callable[[str], None]] = {}


@contextlib.contextmanager
def recorded_reads(owner: Any, record: Callable[[str], None]) -> Iterator[None]:
    """Calls `record` with the name of each attribute that is read from `owner`."""
    if not isinstance(owner, Runner):
        record("__dict__")  # It cannot record reads, so every attribute counts.
    _recorders[id(owner)] = record
    try:
        yield
    finally:
        del _recorders[id(owner)]


class Runner:
    """The base of objects that run their own step many times."""

    if not TYPE_CHECKING:  # as a type checker would take every attribute to exist

        def __getattribute__(self, name: str) -> Any:
            if _recorders and (record := _recorders.get(id(self))) is not None:
                record(name)
            return super().__getattribute__(name)

    @contextlib.contextmanager
    def _in_strategy(self) -> Iterator[Strategy]:
        """Enters the strategy that is in effect, or the strategy in an attribute.

        Inside, a mesh that the program has set (`jax.set_mesh`) is not in effect.
        """
        own = []
        if not has_strategy():
            own = [value for _, value in held_by(self) if isinstance(value, Strategy)]
        strategy = own[0] if own else get_strategy()
        scope = strategy.scope() if own else contextlib.nullcontext()
        with scope, strategy.leave_program_mesh():
            yield strategy

    def _get_run(self, attribute: str, argument: str) -> Run:
        if attribute not in vars(self):
            raise TypeError(
                f"`{type(self).__name__}.__init__` did not call `super().__init__`, "
                f"which takes the data. Begin it with `super().__init__({argument})`."
            )
        return vars(self)[attribute]

    def _get_method(
        self, run: Run, strategy: Strategy, name: str, *, keep_results: bool = False
    ) -> StepMethod:
        """Returns a step of this object, with the options of its `Run`."""
        if hasattr(inspect.getattr_static(self, name), "lower"):
            raise TypeError(
                f"`{type(self).__name__}.{name}` is decorated with `jit`, which "
                "cannot take a trainer as an argument. Remove the decorator: the loop "
                "compiles its steps."
            )
        if is_in_trace():
            raise ReplicaContextError(
                f"A `{type(self).__name__}` was called inside `jax.jit` or another "
                "transformation of JAX. Call it outside of all transformations: its "
                "loop is compiled already."
            )
        step = getattr(self, name)
        return StepMethod(
            owner=self,
            fn=step,
            name=getattr(step, "__name__", name),
            strategy=strategy,
            options=run.options,
            is_evaluation=name.startswith("eval"),
            keep_results=keep_results,
        )


def flatten_datasets(nest: PyTree) -> tuple[list[Any], Any]:
    """Flattens a nest of datasets.

    A list that holds arrays is a single dataset, and its items are the batches. `None`
    is a nest without datasets, for a step that makes its own data.
    """
    if nest is None:
        return [], jax.tree.structure(None)
    leaves, structure = jax.tree.flatten(nest, is_leaf=_is_dataset)
    if not leaves or any(hasattr(leaf, "dtype") for leaf in leaves):
        return [nest], jax.tree.structure(0)
    return leaves, structure


def _is_dataset(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        # JAX warns of iterators unless `is_leaf` returns true for them.
        return isinstance(value, Iterator)
    leaves = jax.tree.leaves(value, is_leaf=lambda part: isinstance(part, Iterator))
    return any(hasattr(leaf, "dtype") for leaf in leaves)


def _check_is_no_pass(name: str, dataset: Any) -> None:
    """Raises if a dataset is an iterator over a distributed dataset."""
    if isinstance(dataset, DistributedIterator):
        raise TypeError(
            f"`{name}` is an iterator over a distributed dataset, but it must be the "
            "dataset itself. Write `dataset` instead of `iter(dataset)`: each loop "
            "continues where the last loop ended, and a checkpoint has the position."
        )


def distribute(dataset: Any, strategy: Strategy) -> DistributedDataset:
    """Returns a distributed dataset; the strategy distributes other data sets."""
    _check_is_no_pass("dataset", dataset)
    if not isinstance(dataset, DistributedDataset):
        return strategy.distribute_dataset(dataset)
    if dataset.layout != strategy.layout:
        raise ValueError(
            f"The dataset was distributed over {dataset.layout.num_replicas} replicas "
            f"by another strategy than {strategy!r}, under which the step runs. Run "
            "the step under the strategy of the dataset (`with strategy.scope():`, or "
            "`strategy=strategy` of the `Controller` or of `predict`), or pass the "
            "data set from before `distribute_dataset`."
        )
    return dataset


@contextlib.contextmanager
def waiting_for_data(
    queue: Prefetcher[Any] | None, strategy: Strategy
) -> Iterator[None]:
    """Records how long the device is idle in a block that reads from a queue."""
    stopwatch = get_stopwatch()
    dispatch = strategy.dispatch
    if stopwatch is not None:
        stopwatch.moves += 1
    if stopwatch is None or (queue is not None and queue.is_ready):
        yield
        return
    while queue is not None and dispatch.in_flight():
        with waiting():
            is_coming = queue.is_coming(_POLL_SECONDS)
        if not is_coming:
            break
    category = stopwatch.category
    with stopwatch.phase(Category.DATA):
        yield
        if dispatch.in_flight():
            stopwatch.category = category
