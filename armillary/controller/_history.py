"""The scalars of a run, as the methods of a controller return them."""

import math
from array import array
from collections.abc import Iterator, Mapping
from typing import Any


class Records(Mapping[str, list[float]]):
    """Scalars by name: a list for each name, with one number for each step.

    A scalar that is missing at a step is NaN. Nested outputs have names such as
    `"train/loss"`. Values that are not scalars are left out.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    @property
    def steps(self) -> list[int]:
        """The global step of each record."""
        return self._steps.tolist()

    def __getitem__(self, name: str) -> list[float]:
        return self._columns[name].tolist()

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        names = ", ".join(self._columns) or "no scalars"
        return f"{type(self).__name__}({len(self._steps)} records: {names})"


class History(Records):
    """The scalars of one call of `train` or `train_and_evaluate`, for reading only.

    ::

        history = controller.train(steps=1000)
        history["loss"]             # one number for each loop ...
        history.steps               # ... at these global steps
        history.eval["accuracy"]    # one number for each evaluation ...
        history.eval.steps          # ... at these
    """

    def __init__(self) -> None:
        super().__init__()
        self.eval = Records()


def add_record(records: Records, step: int, scalars: Mapping[str, float]) -> None:
    for name in scalars:
        if name not in records._columns:
            records._columns[name] = array("d", [math.nan] * len(records._steps))
    for name, column in records._columns.items():
        column.append(scalars.get(name, math.nan))
    records._steps.append(step)


class RunOutput(dict[str, Any]):
    """The output of the last evaluation of a run, with the history of the run.

    It is the dictionary that Orbit returns, and equal to one without a `history`.
    """

    def __init__(self, output: Mapping[str, Any], history: History) -> None:
        super().__init__(output)
        self.history = history
