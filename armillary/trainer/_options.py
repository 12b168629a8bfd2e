"""The options of trainers and evaluators."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from armillary._checks import check_instance, check_one_of, check_positive_int
from armillary.xla._precision import parse_precision
from armillary.xla._remat import Remat, find_policy


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of trainers and evaluators: see `StandardTrainerOptions`."""

    compile_loop: bool = True
    compile_step: bool = True
    steps_per_chunk: int | None = None
    max_chunk_bytes: int = 256 * 2**20
    compiler_options: Mapping[str, Any] | None = None
    max_shapes: int = 1
    precision: str | None = None
    # Options that only trainers have are off here.
    on_non_finite: str | None = field(default=None, init=False, repr=False)
    check_replicas_every: int | None = field(default=None, init=False, repr=False)
    compile_hooks: bool | None = field(default=False, init=False, repr=False)
    accumulate_steps: int = field(default=1, init=False, repr=False)
    remat: Remat | None = field(default=None, init=False, repr=False)
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
        if self.precision is not None:
            parse_precision(self.precision)
            if not self.compile_step:
                raise ValueError(
                    f"`compile_step` is False, but `precision` is {self.precision!r}, "
                    "which changes compiled steps. Leave one of them out."
                )

    @property
    def compute_dtype(self) -> str | None:
        """The dtype of products in a step; `None` if they keep their dtypes."""
        dtype = None if self.precision is None else parse_precision(self.precision)
        return None if dtype == "float32" else dtype

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
        precision: Mixed precision. With `"bf16"`, matrix products and convolutions of
            the step compute in bfloat16, and add up in float32. All other operations
            keep float32, and so do parameters, gradients, losses and the optimizer.
            The long form is `"params=f32,compute=bf16,output=f32"`. `"f16"` needs loss
            scaling (`docs/recipes/mixed_precision.md`).
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
        remat: Rematerialization (activation checkpointing), which saves memory: the
            values that `armillary.value_and_grad` keeps for the backward pass. All
            others are computed again. `"dots_saveable"` keeps the results of products,
            and `"full"` only the inputs of parts of the model (`docs/train/remat.md`).
            It may be any policy of `jax.checkpoint_policies`.
        read_ahead: Whether batches may be read while earlier steps run. If `False`,
            each batch is read right before its step, in the thread that trains, with
            the state after the previous step. Use this for data that depends on the
            parameters, such as games that the model plays. Each step is then a separate
            program, and the device waits while Python makes the batch.
        check_replicas_every: Steps after which to compare the copies of the state on
            all replicas, when a loop has ended. The first loop of a process is always
            compared. If any differ, `ReplicaDivergenceError` names arrays and replicas.
            `None` does not compare.
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
        TypeError: If an option is of the wrong type.
        ValueError: If a number is below 1, or `on_non_finite`, `precision` or `remat`
            is not one of its values. Also if steps that are not compiled are to be
            checked, or have a `precision`, or if `steps_per_chunk` is above 1 without
            `read_ahead`.
    """

    on_non_finite: Literal["raise", "skip"] | None = None
    check_replicas_every: int | None = None
    compile_hooks: bool | None = None
    accumulate_steps: int = 1
    remat: Remat | None = None
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
        if self.remat is not None:
            find_policy(self.remat)
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

    The options for compilation, chunks, shapes and precision are the same as in
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
