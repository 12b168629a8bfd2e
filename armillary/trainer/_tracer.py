"""Traces a step for each shape of batch, and compiles a program for each kind of chunk.

A traced step depends on three things: the slots of its state, the shapes of its
batches, and the plain Python values (flags, rates, names) that it read in the trace.
Between loops, new slots and new values are detected, and outdated traces and programs
are dropped.

`run_eagerly` runs the same steps without a compiler, to find mistakes. On one device,
it runs line by line: a debugger stops in the step, and `print` shows values.
"""

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from armillary._answers import NAMES
from armillary._checks import counted, list_lines
from armillary._jaxpr import read_settings
from armillary._logging import logger
from armillary._traceback import Owner, owner_of_class
from armillary.data._layout import Active
from armillary.data.feed._chunks import Chunk, check_pieces
from armillary.data.feed._feed import Feed
from armillary.data.feed._gather import Gather
from armillary.distribute.program._batch_sums import warn_of_sums
from armillary.distribute.program._compare import check_same_program
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._step_iterator import (
    MoreBatches,
    StepIterator,
    check_taken,
)
from armillary.distribute.program._step_warnings import MetricWarnings, warn_of_draws
from armillary.distribute.program._trace import explained, trace_step
from armillary.distribute.program._traced_step import TracedStep
from armillary.distribute.replica._context import lifted
from armillary.errors import RetraceError, StateStructureError
from armillary.state._lift import State, as_array
from armillary.state._slots import Role, describe
from armillary.trainer._hooks import Hooks, need_python, trace_hooks
from armillary.trainer._program import Program
from armillary.trainer._runner import StepMethod, recorded_reads
from armillary.typing import PyTree
from armillary.xla._compile import has_slow_loop

_MAX_BATCHES_PER_STEP = 64
_RATES = {"learning_rate", "lr"}
_is_noticing = threading.Lock()
_TRACER = re.compile(r"Tracer\(|Traced<")
_Leaves: TypeAlias = dict[Any, Any]
"""The arrays of batches, by their paths."""


class StepPrograms:
    """The programs of one step, which takes a nest of iterators of this structure."""

    def __init__(
        self, method: StepMethod, gathers: Sequence[Gather], structure: Any
    ) -> None:
        self._method = method
        self._gathers = gathers
        self._structure = structure
        # For each shape of batches, the step, and the number of batches that it takes
        # from each dataset.
        self._traces: dict[Any, tuple[TracedStep, tuple[int, ...]]] = {}
        self._programs: dict[Any, Program] = {}
        # Programs that may be outdated, and the change that made them doubtful.
        self._doubted: dict[Any, Program] = {}
        self._reason = ""
        self._settings = read_settings()
        # The first batches of each shape.
        self._shapes: list[_Leaves] = []
        # The attributes of the owner that steps have read; shared with the state.
        self._reads: set[str] = set()
        # The step, and the hooks in its program; shared with the state.
        self._functions: list[Callable[..., Any]] = [method.fn]
        replicas = method.strategy.num_replicas_in_sync
        self._warnings = MetricWarnings(
            method.name, replicas, is_evaluation=method.is_evaluation
        )
        self._has_traced_hooks = False
        self._has_warned_of_results = False
        self._has_sought_sums = False
        self.hooks: Hooks | None = None  # of the trainer, if they are in the programs
        self.flat: FlatState | None = None  # the state, after `find_state`
        self.batches_per_step: tuple[int, ...] = ()
        self.loops_per_chunk = 1

    def find_state(self) -> FlatState:
        """Finds the current state, and drops outdated traces and programs."""
        flat = self.flat
        settings = read_settings()
        if settings != self._settings:
            self._doubt("settings of JAX, such as a precision, have changed")
            self._settings = settings
        if flat is not None and flat.state.is_current() and flat.fits():
            return flat
        state = self._search()
        # The signature that `flat` had when it was made: the structure of its slots may
        # have changed since then.
        if flat is not None and state.signature() == flat.signature:
            if changes := state.changes_since(flat.state):
                names = ", ".join(sorted(changes)[:5])
                self._doubt(
                    f"it read plain values that have changed ({names}). Hold a value "
                    "that changes often in an array, so that it is an input of the "
                    "compiled step"
                )
            flat.rebind(state)
            return flat
        self._traces.clear()
        self._programs.clear()
        self._doubted.clear()
        if flat is not None:
            self._has_traced_hooks = False
            self.hooks = None
        self.flat = FlatState(state, self._method.strategy)
        return self.flat

    def _search(self) -> State:
        return State([(self._method.owner, "")], self._reads, self._functions)

    def _doubt(self, reason: str) -> None:
        """Marks every program as doubtful.

        The next trace shows whether the step read the changed values.
        """
        self._doubted.update(self._programs)
        self._reason = reason
        self._programs.clear()
        self._traces.clear()
        self._has_traced_hooks &= self.hooks is None

    def find_hooks(self) -> Hooks | None:
        """Finds the state, and the hooks of the trainer unless they stay in Python."""
        if self._method.options.hooks_in_program is False:
            return None
        if self._has_traced_hooks and self.hooks is None:
            return None
        self.find_state()
        if not self._has_traced_hooks:
            self.hooks = self._trace_hooks()
            self._has_traced_hooks = True
        return self.hooks

    def _trace_hooks(self) -> Hooks | None:
        owner = self._method.owner
        flat = self.flat
        assert flat is not None
        is_asked = self._method.options.hooks_in_program is True
        hooks = None
        if is_asked or not need_python(owner):
            with recorded_reads(owner, flat.state.note_read):
                hooks = trace_hooks(owner, flat, is_asked=is_asked)
        if hooks is not None:
            self._functions[1:] = owner.train_loop_begin, owner.train_loop_end
        flat.state.watch()
        if hooks is None:
            # In Python, the hooks may create new state, so search for the state again.
            self.flat = None
        return hooks

    def count_batches(
        self, types: list[PyTree], active: tuple[Active, ...]
    ) -> tuple[int, ...]:
        """Traces the step for its first batches.

        Returns:
            The number of batches that a step takes from each dataset.
        """
        _, self.batches_per_step = self._find_trace(types, active)
        return self.batches_per_step

    def trace(self, types: list[PyTree], active: tuple[Active, ...]) -> None:
        """Traces the step for batches that come later; the trace is kept."""
        self._find_trace(types, active)

    def _find_trace(
        self, batches: list[PyTree], active: tuple[Active, ...]
    ) -> tuple[TracedStep, tuple[int, ...]]:
        leaves, structure = jax.tree.flatten(batches)
        key = (structure, *leaves, active)
        if key not in self._traces:
            check_shapes(self._method, self._shapes, batches)
            self._traces[key] = self._trace(batches, active)
        return self._traces[key]

    def _trace(
        self, batches: list[PyTree], active: tuple[Active, ...]
    ) -> tuple[TracedStep, tuple[int, ...]]:
        method = self._method
        flat = self.flat
        assert flat is not None
        taken = [0] * len(batches)
        returned: list[Any] = []

        def fn(*arguments: Any) -> PyTree:
            triples = zip(self._gathers, arguments, active, strict=True)
            iterators = [
                StepIterator(
                    i, map(gather.layout.wrap, offered, [count] * len(offered))
                )
                for i, (gather, offered, count) in enumerate(triples)
            ]
            result = method(self._structure.unflatten(iterators))
            returned[:] = jax.tree.leaves(result)
            taken[:] = [iterator.num_taken for iterator in iterators]
            return result

        was_current = flat.state.is_current()
        try:
            with (
                recorded_reads(method.owner, flat.state.note_read),
                noticing_prints(method.name),
            ):
                step = trace_step(
                    fn,
                    flat,
                    tuple([batch] * _MAX_BATCHES_PER_STEP for batch in batches),
                    user_fn=method.fn,
                    owner=method.owner_name,
                    taken=taken,
                )
        except MoreBatches:
            raise RetraceError(
                f"`{method.name}` took over {_MAX_BATCHES_PER_STEP} batches in one "
                "step, so it seems to loop over the whole data set. Take a fixed "
                "number with `next(iterator)`; the library calls the step until the "
                "data ends."
            ) from None
        flat.state.watch()
        warn_of_rates(flat.state)
        drops_results = bool(returned) and not method.keep_results
        if drops_results and not self._has_warned_of_results:
            self._has_warned_of_results = True
            self._warn_of_results()
        if was_current and not flat.state.is_current():
            # The step sets a plain value to the same value in every run.
            flat.rebind(self._search())
        check_taken(method.name, taken)
        return step, tuple(taken)

    def _warn_of_results(self) -> None:
        end = "`train_loop_end`"
        if self._method.is_evaluation:
            end = "`eval_end`; or let `eval_begin` return a state, and write "
            end += "`eval_reduce`"
        logger.warning(
            "The result of `%s` is dropped. Update a metric in this method, and return "
            "the result of the metric from %s.",
            self._method.name,
            end,
        )

    def get(self, chunk: Chunk) -> Program:
        """Returns the program for a chunk; the first chunk of a kind compiles it."""
        key = (chunk.signature, chunk.capacity)
        if key not in self._programs:
            self._programs[key] = self._make(chunk, self._doubted.pop(key, None))
        return self._programs[key]

    def _make(self, chunk: Chunk, old: Program | None) -> Program:
        """Returns the program for a chunk; the old program if it is still correct."""
        method = self._method
        flat = self.flat
        assert flat is not None
        step, taken = self._find_trace(chunk.types, chunk.num_active)
        if taken != self.batches_per_step:
            raise RetraceError(
                f"`{method.name}` took {list(self.batches_per_step)} batches of its "
                f"datasets in one step, and now takes {list(taken)}. Batches that were "
                "read ahead cannot be divided again: take the same number in every "
                "step, or make a new trainer."
            )
        if old is not None:
            if old.is_of(step, self.hooks):
                return old
            self._doubted.clear()
            logger.warning(
                "`%s` is compiled again, because %s.", method.name, self._reason
            )
        if (peers := method.strategy.peers) is not None:
            check_same_program(peers, method.name, step.program, method.fn)
        is_slow = has_slow_loop(
            step.program, flat.platform, is_partitioned=flat.split is not None
        )
        if not self._programs:
            if method.is_evaluation:
                check_evaluation(method.name, flat.state, step.changed)
            else:
                check_training(method.name, flat.state, step.changed)
                warn_of_draws(method.name, step)
            if is_slow and method.options.compile_loop:
                logger.info(
                    "`%s` has convolutions that XLA's CPU compiler would run slowly "
                    "inside a loop on the device, so its steps run one by one.",
                    method.name,
                )
        if not self._has_sought_sums:
            self._has_sought_sums = True
            axis = 1 if method.strategy.layout.stacked else 0
            warn_of_sums(method.name, step.program, len(flat.state.paths), axis)
        self._warnings.look(flat.state, step, chunk.num_active)
        return Program(
            step,
            self.batches_per_step,
            self._gathers,
            chunk.capacity,
            flat,
            method,
            None if is_slow else self.hooks,
            num_loops=self.loops_per_chunk,
            is_nested=not is_slow,
        )


def run_eagerly(
    method: StepMethod, feed: Feed[Any], structure: Any
) -> Iterator[tuple[PyTree, bool]]:
    """Yields the result of each step, and whether it ended its batch.

    It ends with the data. If the data ends in the middle of a step, that step does not
    count, but its writes are not undone.
    """
    while all(reader.peek() is not None for reader in feed.readers):
        state = State([(method.owner, "")])
        flat = FlatState(state, method.strategy)
        every = tuple(range(len(state.paths)))
        state.write(flat.join(every, *flat.take(every)))
        taken: list[list[Any]] = [[] for _ in feed.readers]
        pairs = zip(feed.readers, taken, strict=True)
        iterators = [StepIterator(i, _place(*pair)) for i, pair in enumerate(pairs)]
        try:
            with (
                lifted(state, method.strategy),
                explained(method.fn, state, method.owner_name),
            ):
                result = method(jax.tree.unflatten(structure, iterators))
        except MoreBatches:
            feed.note_ends(with_rest=True)
            return
        check_taken(method.name, list(map(len, taken)))
        check_pieces(taken)
        FlatState(state, method.strategy).settle(())
        feed.commit_taken()
        yield result, all(batches[-1].is_last for batches in taken)


def _place(reader: Any, taken: list[Any]) -> Iterator[PyTree]:
    """Yields the batches of a reader on their devices, and adds them to `taken`."""
    for batch in reader:
        taken.append(batch)
        gather = reader.gather
        yield gather.layout.wrap(gather.place(batch), batch.num_active)


def check_shapes(
    method: StepMethod, seen: list[_Leaves], batches: Sequence[PyTree]
) -> None:
    """Checks that batches are like the first ones, and records a new shape.

    The number of examples may differ. `seen` has the first batches of each shape.
    """
    axis = 1 if method.strategy.layout.stacked else 0
    now = dict(jax.tree_util.tree_leaves_with_path(list(batches)))
    changes = [_compare(first, now, axis) for first in seen]
    if not all(changes):
        return
    most = method.options.max_shapes
    kinds = [
        {path: (leaf.ndim, leaf.dtype) for path, leaf in leaves.items()}
        for leaves in (*seen[:1], now)
    ]
    is_shape_only = kinds[0] == kinds[-1]
    if not seen or (is_shape_only and len(seen) < most):
        seen.append(now)
        return
    kind = "Evaluator" if method.is_evaluation else "Trainer"
    fix = (
        "Only the number of examples may be smaller at the end of the data. Pad "
        "sequences to a few lengths (buckets), and pass the number of lengths: "
        f"`Standard{kind}Options(max_shapes={2 * most if most > 1 else 8})`."
        if is_shape_only
        else "Give all batches one dtype and one structure, for example with `.astype` "
        "where they are made; `max_shapes` allows only different shapes."
    )
    shown = "\n".join(changes[0])
    raise RetraceError(
        f"Batches changed after `{method.name}` was compiled for "
        f"{counted(len(seen), 'shape')} of them:\n{shown}\n{fix}"
    )


def _compare(first: _Leaves, now: _Leaves, axis: int) -> list[str]:
    """Returns lines on differences other than the number of examples."""
    changes: list[str] = []
    for path in first | now:
        pair = [leaves.get(path) for leaves in (first, now)]
        parts = [leaf and (leaf.dtype, *leaf.shape[axis + 1 :]) for leaf in pair]
        if parts[0] != parts[1]:
            name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
            old, new = ("nothing" if leaf is None else describe(leaf) for leaf in pair)
            changes.append(f"  {name or 'the batch'}: {old} became {new}")
    return changes


def check_evaluation(name: str, state: State, changed: Sequence[int]) -> None:
    """Raises if an evaluation step changes a model; warns if it uses dropout."""
    owners = {i: state.owners[i] for i in changed}
    learned = [
        i
        for i, slot in owners.items()
        if slot.role is Role.BATCH_STATISTIC or slot.is_parameter()
    ]
    if learned:
        raise StateStructureError(
            f"`{name}` changes {counted(len(learned), 'array')} of a model, but an "
            f"evaluation must not change a model:\n{_list(state, learned)}\n"
            "Evaluate a view of it, which shares its variables (`self.model = "
            "nnx.view(model, use_running_average=True)`, with `deterministic=True` if "
            "it has dropout), and call a Keras model with `training=False`."
        )
    nnx = sys.modules.get("flax.nnx")
    dropouts = [n for n in state._nodes if nnx and isinstance(n, nnx.Dropout)]
    counts = {id(dropout.rngs.count) for dropout in dropouts if dropout.rngs}
    if drawn := [i for i, slot in owners.items() if slot.key in counts]:
        logger.warning(
            "`%s` draws random numbers for dropout, so it evaluates the model in "
            "training mode:\n%s\nEvaluate a view of the model, which shares its "
            "variables: `self.model = nnx.view(model, deterministic=True)`.",
            name,
            _list(state, drawn),
        )


class _Noticing:
    """A stream that forwards all text, and notes whether a tracer was printed."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.has_tracer = False

    def write(self, text: str) -> Any:
        self.has_tracer = self.has_tracer or _TRACER.search(text) is not None
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def noticing_prints(name: str) -> Iterator[None]:
    """Warns if a step prints a tracer, which has no value while it is traced."""
    # One at a time, because two threads would restore each other's stream.
    if sys.stdout is None or not _is_noticing.acquire(blocking=False):
        yield
        return
    stream: Any = _Noticing(sys.stdout)
    try:
        with contextlib.redirect_stdout(stream):
            yield
    finally:
        _is_noticing.release()
    if stream.has_tracer:
        logger.warning(
            "`%s` printed a tracer, which stands for an array without a value, because "
            "Python runs a step only once, while it is traced. To print in each step, "
            'write `jax.debug.print("{}", x)`. To run line by line on one device, use '
            "`compile_step=False` in the options of the trainer.",
            name,
        )


def warn_of_rates(state: State) -> None:
    """Warns if a learning rate was assigned to an optimizer of Flax."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    for node in state.nodes:
        kind = type(node.value)
        # A class that the user wrote may use such an attribute itself.
        if not issubclass(kind, nnx.Optimizer) or owner_of_class(kind) is Owner.USER:
            continue
        for name in sorted(_RATES & vars(node.value).keys()):
            logger.warning(
                "`%s/%s` was assigned, but nothing reads it: the rate of an optimizer "
                "of Flax is in its Optax transformation. %s",
                node.path,
                name,
                NAMES["Optimizer.learning_rate"],
            )


def check_training(name: str, state: State, changed: Sequence[int]) -> None:
    """Warns if a step advances an optimizer, but changes no parameter."""
    nnx = sys.modules.get("flax.nnx")
    leaves = [as_array(leaf) for leaf in state.read()]
    flags = [flag for slot in state.slots for flag in slot.is_of_optimizer()]

    def is_of_optimizer(index: int) -> bool:
        variable = getattr(state.owners[index], "variable", None)
        counts_steps = nnx is not None and isinstance(variable, nnx.OptState)
        return counts_steps or flags[index]

    def is_float(index: int) -> bool:
        return jnp.issubdtype(leaves[index].dtype, jnp.inexact)

    # Metrics, counters and random state change in a step that trains nothing, too.
    moved = [i for i in changed if state.owners[i].role is Role.PLAIN]
    advanced = [i for i in moved if is_of_optimizer(i)]
    if not advanced or any(is_float(i) and not is_of_optimizer(i) for i in moved):
        return

    # A moment of an optimizer has the shape of its parameter.
    shapes = {leaves[i].shape for i in advanced if is_float(i)}

    def has_moment(index: int) -> bool:
        is_plain = state.owners[index].role is Role.PLAIN and is_float(index)
        return is_plain and leaves[index].shape in shapes

    parameters = [
        index
        for index, slot in enumerate(state.owners)
        if slot.is_parameter() or (not is_of_optimizer(index) and has_moment(index))
    ]
    if not parameters:
        return
    logger.warning(
        "`%s` advances an optimizer, but changes none of the parameters that it "
        "reaches, so nothing is trained:\n%s\nWith Flax, the model comes before the "
        "gradients: `optimizer.update(model, gradients)`. Pass the model itself, not a "
        "copy (`nnx.clone`, `nnx.merge`), and assign that model to the trainer. "
        "With Optax alone, apply the updates, and keep the result: `params = "
        "optax.apply_updates(params, updates)`.",
        name,
        _list(state, parameters),
    )


def _list(state: State, indices: Sequence[int]) -> str:
    return list_lines((state.paths[i] for i in indices), most=10)
