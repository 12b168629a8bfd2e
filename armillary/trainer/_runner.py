"""The common base of trainers and evaluators: finds their strategy, data and step."""

import contextlib
import inspect
from collections.abc import Iterator

from armillary._jaxpr import is_in_trace
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._context import get_strategy, has_strategy
from armillary.errors import ReplicaContextError
from armillary.state._holders import held_by
from armillary.trainer._recorded_reads import RecordedReads
from armillary.trainer._setup import Setup
from armillary.trainer._step_method import StepMethod


class Runner(RecordedReads):
    """The base of objects that run their own step many times."""

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

    def _get_setup(self, attribute: str, argument: str) -> Setup:
        if attribute not in vars(self):
            raise TypeError(
                f"`{type(self).__name__}.__init__` did not call `super().__init__`, "
                f"which takes the data. Begin it with `super().__init__({argument})`."
            )
        return vars(self)[attribute]

    def _get_method(
        self,
        setup: Setup,
        strategy: Strategy,
        name: str,
        *,
        keep_results: bool = False,
    ) -> StepMethod:
        """Returns a step of this object, with the options of its `Setup`."""
        source = inspect.getattr_static(self, name)
        if hasattr(source, "lower"):
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
            options=setup.options,
            is_evaluation=name.startswith("eval"),
            keep_results=keep_results,
            source=source,
        )
