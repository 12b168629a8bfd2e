"""How a trainer and an evaluator run their steps: what users may set."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from armillary._checks import (
    check_instance,
    check_one_of,
    check_positive_int,
)


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """What trainers and evaluators have in common: see `StandardTrainerOptions`.

    What a trainer alone can be told is off here.

    Raises:
        ValueError: If a number is below 1.
    """

    compile_loop: bool = True
    compile_step: bool = True
    steps_per_chunk: int | None = None
    max_chunk_bytes: int = 256 * 2**20
    compiler_options: Mapping[str, Any] | None = None
    max_shapes: int = 1
    on_non_finite: str | None = field(default=None, init=False, repr=False)
    check_replicas_every: int | None = field(default=None, init=False, repr=False)
    compile_hooks: bool | None = field(default=False, init=False, repr=False)
    accumulate_steps: int = field(default=1, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("compile_loop", "compile_step"):
            check_one_of(name, getattr(self, name), (True, False))
        if self.steps_per_chunk is not None:
            check_positive_int("steps_per_chunk", self.steps_per_chunk)
        check_positive_int("max_chunk_bytes", self.max_chunk_bytes)
        check_positive_int("max_shapes", self.max_shapes)
        if (options := self.compiler_options) is not None:
            fix = 'Use a dictionary, such as `{"xla_cpu_enable_fast_math": True}`.'
            check_instance("compiler_options", options, Mapping, fix)

    @property
    def hooks_in_program(self) -> bool | None:
        """As `compile_hooks`; what looks at each step may end a loop at any of them."""
        is_watched = self.on_non_finite or self.check_replicas_every
        is_compiled = self.compile_loop and self.compile_step
        return self.compile_hooks if is_compiled and not is_watched else False


@dataclass(frozen=True, kw_only=True)
class StandardTrainerOptions(LoopOptions):
    """How a `StandardTrainer` runs its steps.

    Args:
        compile_loop: Whether many steps run as one device program. Off, the same
            compiled step runs from a Python loop, with bit-identical results.
        compile_step: Whether the step is compiled at all. Off, every operation runs
            when Python reaches it, for debugging: slow, equal up to rounding. What
            `run` of several replicas is given is traced and proved as in a compiled
            step; on one device it runs line by line, and `print` shows values.
        steps_per_chunk: Most steps in one device program, and most batches that are
            stacked for it. Results do not depend on it. More save time between
            programs, but delay the first step and need more memory. `None` takes as
            many as `steps_per_loop` of the `Controller`, or as the first call of
            `train` by hand: at most 100, and the steps of several loops up to 20.
        max_chunk_bytes: Most memory of one stack of batches, in bytes. There are two or
            three at a time: one in use and those read ahead.
        compiler_options: Options of XLA, as in `jax.jit(compiler_options=...)`. They go
            before the ones that are chosen by looking at the step: on CPUs, steps with
            convolutions use YNNPACK for sums alone. Results are equal up to rounding
            under other options. A name that XLA does not know is an error of JAX.
        max_shapes: How many shapes batches may have, their number of examples aside:
            one program is compiled for each, when it is met first. More are a
            `RetraceError`. Only steps in a row with batches of one shape are one device
            program; results do not depend on that.
        on_non_finite: What to do if a step leaves more values that are infinite or not
            a number in an array of its state than there were before. `"raise"` undoes
            the step, runs no further one, and raises `NonFiniteError`; state and data
            are those before the step. `"skip"` undoes the step and goes on; only
            counters and random keys move on, see below. `None` looks at nothing.
        accumulate_steps: Parts in which `armillary.value_and_grad(..., batch=batch)`
            takes each replica's share of a batch, one after the other: memory for the
            activations of one part, one update, and gradients, summed over replicas
            once, that are those of the whole batch. The examples of a replica must
            be a multiple of it.
        check_replicas_every: Steps after which to compare the copies of the state on
            all replicas, when a loop has ended. If any differ, `ReplicaDivergenceError`
            names arrays and replicas. `None` does not compare.
        compile_hooks: Whether `train_loop_begin` and `train_loop_end` are part of the
            device program, so that it can run many loops. `None` traces them, and they
            are if all they do is to reset and compute metrics of Flax or Keras, and
            arithmetic with arrays of the trainer. `True` says that they need no Python
            (they print nothing, and keep no count): they are then traced, once, like
            the step. Loops that are watched (`on_non_finite`, `check_replicas_every`)
            or not compiled leave them in Python.

    A step that is skipped leaves every array as it was, but for random keys and
    integers of 32 or 64 bits outside metrics, batch statistics and the state of Optax:
    the global step counts it.

    Raises:
        ValueError: If a number is below 1, or `on_non_finite` is none of its values.
    """

    on_non_finite: Literal["raise", "skip"] | None = None
    check_replicas_every: int | None = None
    compile_hooks: bool | None = None
    accumulate_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("on_non_finite", self.on_non_finite, (None, "raise", "skip"))
        check_positive_int("accumulate_steps", self.accumulate_steps)
        check_one_of("compile_hooks", self.compile_hooks, (None, True, False))
        if self.check_replicas_every is not None:
            check_positive_int("check_replicas_every", self.check_replicas_every)


@dataclass(frozen=True, kw_only=True)
class StandardEvaluatorOptions(LoopOptions):
    """How a `StandardEvaluator` runs its steps.

    Compilation, chunks and shapes are as in `StandardTrainerOptions`; with
    `steps_per_chunk=None`, a complete evaluation counts as a call of 20 steps.

    Args:
        recreate_iterator_for_each_eval: Whether each call of `evaluate` begins a new
            pass over the data, as in Orbit. Off, it continues where the last one
            stopped, and begins anew when the data has ended, or after an error or
            Ctrl-C.

    Raises:
        ValueError: If a number is below 1.
    """

    recreate_iterator_for_each_eval: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "recreate_iterator_for_each_eval"
        check_one_of(name, self.recreate_iterator_for_each_eval, (True, False))
