"""The compiled programs of one step, for as long as they are good.

There is one for each kind of chunk. When the state has other places, plain values that
the step read have changed, or the hooks of the trainer are other ones, all are dropped.
"""

from typing import Any

from armillary._logging import logger
from armillary.data._layout import Active
from armillary.data.feed._chunk_builder import Chunk
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._hardly_meant import (
    MetricWarnings,
    tell_of_training,
)
from armillary.distribute.program._same_program import check_same_program
from armillary.errors import RetraceError
from armillary.trainer._guard import LoopGuard
from armillary.trainer._hooks import Hooks
from armillary.trainer._loop_data import LoopData
from armillary.trainer._options import LoopOptions
from armillary.trainer._program import Program
from armillary.trainer._step_method import StepMethod
from armillary.trainer._step_writes import check_writes
from armillary.trainer._tracer import StepTracer
from armillary.typing import PyTree
from armillary.xla._steps import has_slow_loop


class Programs:
    """Traces and compiles one step, which takes batches from `data`.

    Attributes:
        flat: The state on its devices; `None` before `find_state`.
        hooks: What of the trainer is part of the programs; see `find_hooks`.
    """

    def __init__(
        self,
        method: StepMethod,
        data: LoopData,
        options: LoopOptions,
        guard: LoopGuard,
        *,
        keep_results: bool,
    ) -> None:
        self._method, self._data = method, data
        self._options, self._guard = options, guard
        self._keep_results = keep_results
        layouts = [dataset.layout for dataset in data.datasets]
        self._tracer = StepTracer(method, data.structure, layouts, options.max_shapes)
        self._programs: dict[Any, Program] = {}
        self._warnings = MetricWarnings(
            method.name, method.strategy.num_replicas_in_sync
        )
        self.hooks: Hooks | None = None

    @property
    def flat(self) -> FlatState | None:
        return self._tracer.flat

    def find_state(self) -> FlatState:
        """Finds the state as it is now, and drops what is out of date."""
        self._refresh()
        flat = self._tracer.flat
        assert flat is not None
        return flat

    def _refresh(self) -> None:
        if self._tracer.find_state():
            self._programs.clear()

    def find_hooks(self) -> Hooks | None:
        """Finds the state, and the hooks of the trainer unless they stay in Python.

        They do if that is what the options say, or the code of the hooks, or if each
        step is a program of its own.
        """
        in_program = self._options.hooks_in_program
        if in_program is False:
            return None
        if not self._tracer.has_python_hooks:
            self._refresh()
        hooks = self._tracer.hooks(is_asked=in_program is True)
        if hooks is not self.hooks:
            self.hooks = hooks
            self._programs.clear()
        return hooks

    def count_batches(
        self, types: list[PyTree], active: tuple[Active, ...]
    ) -> tuple[int, ...]:
        """Traces the step for its first batches; returns how many of each it takes."""
        return self._tracer.trace(types, active).batches_per_step

    def get(self, chunk: Chunk) -> Program:
        """Returns the program for a chunk, compiled at the first one of its kind."""
        key = (chunk.signature, chunk.capacity)
        if key not in self._programs:
            self._programs[key] = self._make(chunk)
        return self._programs[key]

    def _make(self, chunk: Chunk) -> Program:
        name, peers = self._method.name, self._method.strategy.peers
        is_evaluation = name.startswith("eval")
        trace = self._tracer.trace(chunk.types, chunk.num_active)
        step, per_step = trace.step, self._data.batches_per_step
        if trace.batches_per_step != per_step:
            raise RetraceError(
                f"`{name}` took {list(per_step)} batches of its "
                f"datasets in one step, and now takes {list(trace.batches_per_step)}. "
                "Batches that were read ahead cannot be shared out anew: take the same "
                "number in every step, or make a new trainer."
            )
        if peers is not None:
            check_same_program(peers, name, step.program, self._method.fn)
        flat = self._tracer.flat
        assert flat is not None
        if not self._programs:
            check_writes(name, flat.state, step.changed)
            if not is_evaluation:
                tell_of_training(self._method.fn, name, step)
        replicas = self._method.strategy.num_replicas_in_sync
        is_uneven = any(active != replicas for active in chunk.num_active)
        self._warnings.look(flat.state, step, is_uneven=is_uneven and is_evaluation)
        is_slow = has_slow_loop(
            step.program, flat.platform, is_partitioned=flat.split is not None
        )
        if is_slow and self._options.compile_loop and not self._programs:
            logger.info(
                "`%s` has convolutions that XLA's CPU compiler runs slowly inside a "
                "loop on the device: its steps run one by one.",
                name,
            )
        return Program(
            step,
            per_step,
            [dataset.gather.on_device for dataset in self._data.datasets],
            chunk.capacity,
            flat,
            keep_results=self._keep_results,
            is_nested=not is_slow,
            guard=self._guard.for_step(flat.state, step.program.in_avals, step.changed),
            hooks=None if is_slow else self.hooks,
            compiler_options=self._options.compiler_options,
        )
