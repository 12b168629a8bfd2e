"""Finds the operations that use a value in a program."""

from typing import Any

from jax.extend import core

from armillary._jaxpr import is_made_by


class Users:
    """The operations that use a value, looked up once for each program."""

    def __init__(self) -> None:
        self._by_program: dict[int, dict[Any, list[Any]]] = {}

    def find(self, jaxpr: Any, value: Any) -> list[Any]:
        """Returns the operations that use a value, also after a change of its dtype.

        Args:
            jaxpr: The program.
            value: A variable of the program.
        """
        users = self._users_in(jaxpr)
        found: list[Any] = []
        for user in users.get(value, []):
            is_cast = user.primitive.name == "convert_element_type"
            if is_cast:
                found += self.find(jaxpr, user.outvars[0])
            else:
                found.append(user)
        return found

    def _users_in(self, jaxpr: Any) -> dict[Any, list[Any]]:
        """Returns the operations in a program, by the values that they use."""
        key = id(jaxpr)
        if key in self._by_program:
            return self._by_program[key]

        users: dict[Any, list[Any]] = {}
        for equation in jaxpr.eqns:
            for atom in equation.invars:
                is_variable = not isinstance(atom, core.Literal)
                if is_variable:
                    users.setdefault(atom, []).append(equation)
        self._by_program[key] = users
        return users


def is_of_mean(equation: Any) -> bool:
    """Returns whether an operation divides the sum over replicas by their number."""
    if equation.primitive.name != "div":
        return False
    return is_made_by(equation, "pmean", "ReplicaContext.all_reduce")
