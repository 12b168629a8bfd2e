"""The base of analyses that follow values through the program of one replica.

It knows how replicas come to hold equal or different values. Each analysis says what
that means for its facts.
"""

from typing import Any

from armillary._dataflow import Dataflow, Fact
from armillary.distribute.analysis._operations import (
    DRAWS,
    SOURCES,
    is_collective,
    is_equal_after,
    reduced_by_ops,
)
from armillary.distribute.analysis._users import Users, is_of_mean


class ReplicaDataflow(Dataflow[Fact]):
    """Follows facts through the program of one replica.

    Calls, branches, loops and all operations that concern one replica alone are
    followed as in `Dataflow`.

    Args:
        axis_name: The axis of replicas.
    """

    mixes_scatters = False
    """If true, a scatter mixes its operands.

    Otherwise, facts go through its program, which combines single numbers. There, facts
    about axes are lost.
    """

    def __init__(self, axis_name: str) -> None:
        super().__init__()
        self.axis_name = axis_name
        self._users = Users()

    def follow_reduction(
        self, equation: Any, operands: list[Fact], by_ops: str
    ) -> list[Fact]:
        """Returns the facts of results that are equal on all replicas.

        `by_ops` is the operation if a `CrossDeviceOps` reduces, and empty if JAX does.
        """
        raise NotImplementedError

    def follow_exchange(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        """Returns the facts of values that other replicas sent, or groups reduced."""
        raise NotImplementedError

    def follow_source(self, equation: Any, operands: list[Fact]) -> Fact:
        """Returns the fact of results that may differ for any operands."""
        raise NotImplementedError

    def follow_draw(self, equation: Any, operands: list[Fact]) -> list[Fact] | None:
        """Returns the facts of random numbers; `None` for the default rules."""
        del equation, operands

    def follow_mark(self, equation: Any, operand: Fact) -> Fact:
        """Returns the fact of a value that a function of the library has marked."""
        return self.mix(equation, [operand])

    def transfer(self, equation: Any, operands: list[Fact]) -> list[Fact] | None:
        """Sorts operations by their meaning for replicas; `None` for all others."""
        name = equation.primitive.name
        num_results = len(equation.outvars)
        if name == "name":
            return [self.follow_mark(equation, operands[0])]
        if self.mixes_scatters and name.startswith("scatter"):
            return [self.mix(equation, operands)] * num_results
        if name in DRAWS:
            return self.follow_draw(equation, operands)
        if name in SOURCES:
            return [self.follow_source(equation, operands)] * num_results
        by_ops = reduced_by_ops(equation)
        if by_ops:
            # `_own_ops` has proved that the results are equal. The arrays that the
            # `CrossDeviceOps` has captured come before the arrays to reduce.
            return self.follow_reduction(equation, operands[-num_results:], by_ops)
        if is_equal_after(equation, self.axis_name):
            return self.follow_reduction(equation, operands, by_ops)
        if is_collective(equation, self.axis_name):
            return self.follow_exchange(equation, operands)
        return None

    def find_users(self, result: Any) -> list[Any]:
        """Returns the operations that use a result in the program that is followed."""
        return self._users.find(self.jaxpr, result)

    def is_mean(self, result: Any, by_ops: str) -> bool:
        """Returns whether a sum over replicas is divided by their number."""
        if by_ops:
            return by_ops == "mean"
        users = self.find_users(result)
        return bool(users) and all(map(is_of_mean, users))
