"""What a call of a controller has seen: the scalars of its loops and evaluations."""

import math
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import jax


class Records(Mapping[str, list[float]]):
    """Scalars by name: for each name a list, with one number for each step.

    A number is NaN where its name was missing. Nested outputs have names such as
    `"train/loss"`; what is no scalar is left out.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    @property
    def steps(self) -> list[int]:
        """The global step of each record."""
        return self._steps.tolist()

    def __getitem__(self, name: str) -> list[float]:
        if name not in self._columns:
            known = ", ".join(map(repr, self._columns)) or "nothing"
            raise KeyError(f"{name!r} was not recorded, but {known}")
        column = self._columns[name].tolist()
        return column + [math.nan] * (len(self._steps) - len(column))

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        names = ", ".join(self._columns) or "no scalars"
        return f"{type(self).__name__}({len(self._steps)} records: {names})"


class History(Records):
    """What one call of `train` or `train_and_evaluate` has seen, for reading only.

    ::

        history = controller.train(steps=1000)
        history["loss"]             # one number for each loop ...
        history.steps               # ... at these global steps
        history.eval["accuracy"]    # one number for each evaluation ...
        history.eval.steps          # ... at these

    Attributes:
        eval: The evaluations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eval = Records()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; eval: {self.eval!r})"


def add_record(records: Records, step: int, scalars: Mapping[str, float]) -> None:
    """Adds the scalars of a step."""
    num_before = len(records._steps)
    records._steps.append(step)
    for name, number in scalars.items():
        column = records._columns.setdefault(name, array("d"))
        if len(column) < num_before:
            column.extend([math.nan] * (num_before - len(column)))
        column.append(number)


@jax.tree_util.register_pytree_with_keys_class
class RunOutput(dict[str, Any]):
    """The output of the last evaluation of a run, with the history of the run.

    It is the dictionary that Orbit returns, and equal to one without a history.

    Args:
        output: What the evaluator returned.
        history: What the run has seen.

    Attributes:
        history: As given.
    """

    def __init__(self, output: Mapping[str, Any], history: History) -> None:
        super().__init__(output)
        self.history = history

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """Returns what a dictionary does: a tree of results holds no history."""
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Any) -> dict[str, Any]:
        """Returns a plain dictionary."""
        return dict(zip(names, values, strict=True))
