"""A call of a user's function that changes state, as `Strategy.run` traces it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from armillary.distribute._global_arrays import is_array_or_number
from armillary.distribute.replica._context import Scope, is_in_inner_trace
from armillary.distribute.replica._policy import Policy, enter_step
from armillary.distribute.replica._replica import ReplicaContext
from armillary.distribute.replica._writes import combined_writes
from armillary.errors import ReplicaContextError
from armillary.state._lift import State, as_array
from armillary.typing import PyTree

_MAX_PATHS = 3


class Call:
    """A call of a function that changes state, with its changes and its results.

    Attributes:
        name: The name of the function.
        before: The arrays of the state before the call.
        policies: The policy of each array.
        changed: The indices of the arrays that the function has changed.
    """

    def __init__(self, fn: Callable[..., PyTree], state: State) -> None:
        self.name = getattr(fn, "__name__", "the step")
        self.before = [as_array(leaf) for leaf in state.read()]
        self.policies = [Policy.MIRRORED] * len(self.before)
        self.changed: list[int] = []
        self._fn = fn
        self._state = state
        # The returned values in one list, with the structure of the result.
        self._values: list[Any] = []
        self._treedef: Any = None

    def run(
        self,
        context: ReplicaContext,
        slots: list[Any],
        args: Any,
        kwargs: Any,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Calls the function.

        Returns:
            The changed arrays before the call and after it, and the arrays that the
            function returned.
        """
        state = self._state
        start: list[Any] = []
        for policy, slot in zip(self.policies, slots, strict=True):
            start.append(enter_step(policy, slot, context))

        with (
            state.swapped(start),
            Scope(context.strategy, context),
            combined_writes(state, context),
        ):
            result = self._fn(*args, **kwargs)
            # Objects that hold state are leaves, because they must not be copied.
            self._values, self._treedef = jax.tree.flatten(result, is_leaf=state.holds)
            after = state.collect(start, self.name)

        self.changed = []
        old: list[Any] = []
        new: list[Any] = []
        for i, (old_array, new_array) in enumerate(zip(start, after, strict=True)):
            # By identity, because a traced array has no value to compare.
            if new_array is not old_array:
                self.changed.append(i)
                old.append(old_array)
                new.append(new_array)

        returned: list[Any] = []
        for value in self._values:
            if is_array_or_number(value):
                returned.append(jnp.asarray(value))
        return old, new, returned

    def split_outputs(self, outputs: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """Divides the outputs of a traced `run` into its three results."""
        count = len(self.changed)
        before = outputs[:count]
        after = outputs[count : 2 * count]
        returned = outputs[2 * count :]
        return before, after, returned

    def write(self, values: Sequence[Any]) -> None:
        """Writes the new values of the changed arrays into the state.

        Args:
            values: The new values, in the order of `changed`.

        Raises:
            ReplicaContextError: If a transformation of JAX surrounds the call, because
                its tracers must not stay in the state.
        """
        if not self.changed:
            return
        if is_in_inner_trace():
            paths = [self._state.paths[i] for i in self.changed]
            shown = ", ".join(paths[:_MAX_PATHS])
            if len(paths) > _MAX_PATHS:
                shown += " and more"
            raise ReplicaContextError(
                f"`strategy.run` of `{self.name}` was called inside `jax.jit`, "
                "`nnx.jit` or another transformation of JAX, and changes state of the "
                f"step ({shown}). Call it without the transformation, because the step "
                "is compiled already. Or decorate its caller with "
                "`@armillary.function`."
            )
        after = self._state.read()
        for i, value in zip(self.changed, values, strict=True):
            after[i] = value
        self._state.write(after, set(self.changed))

    def returned(self, arrays: Iterable[Any]) -> PyTree:
        """Returns the result of the function, with `arrays` in place of its arrays."""
        rest = iter(arrays)
        values: list[Any] = []
        for value in self._values:
            values.append(next(rest) if is_array_or_number(value) else value)
        return self._treedef.unflatten(values)
