"""A step as a device program, with the parts of its results that are not arrays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from armillary._jaxpr import call_program
from armillary.state._captured import Fingerprint
from armillary.state._slots import is_equal
from armillary.typing import PyTree

ARRAY = object()
"""Replaces each array in a list of results that also has other values."""


class TracedStep(NamedTuple):
    """A program from `(*slots, *arguments)` to `(*changed slots, *results)`.

    Attributes:
        program: The program.
        changed: The indices of the slots that it changes.
        result_tree: The structure of the results.
        static_results: The results, with `ARRAY` in place of each array.
        fingerprint: The fingerprint of the program, to compare it with others.
    """

    program: core.ClosedJaxpr
    changed: tuple[int, ...]
    result_tree: Any
    static_results: tuple[Any, ...]
    fingerprint: Fingerprint

    def call(
        self, slots: Sequence[Any], arguments: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Runs or traces the program; returns changed slots and result arrays."""
        outputs = call_program(self.program, [*slots, *arguments])
        num_changed = len(self.changed)
        return outputs[:num_changed], outputs[num_changed:]

    def with_program(self, program: core.ClosedJaxpr) -> "TracedStep":
        """Returns the step with a program of the same inputs and outputs."""
        return self._replace(program=program, fingerprint=Fingerprint(program))

    @property
    def result_types(self) -> list[Any]:
        """Shapes and dtypes of the arrays among the results."""
        return self.program.out_avals[len(self.changed) :]

    def is_same(self, other: "TracedStep") -> bool:
        """Returns whether two traces have the same program and the same results."""
        is_same_form = (
            self.changed == other.changed
            and self.result_tree == other.result_tree
            and len(self.static_results) == len(other.static_results)
            # Not `==`, which compares NumPy arrays value by value.
            and all(map(is_equal, self.static_results, other.static_results))
        )
        return is_same_form and self.fingerprint.is_same(other.fingerprint)

    def results(self, arrays: Sequence[Any]) -> PyTree:
        """Returns the step's results as the user's function returned them."""
        rest = iter(arrays)
        return self.result_tree.unflatten(
            next(rest) if value is ARRAY else value for value in self.static_results
        )
