"""Canned estimators for tests."""

from typing import Any

import numpy as np

from armillary import estimator
from tests.estimator.problems import (
    X,
    make_config,
    make_input_fn,
)
from tests.problems import read_state

COLUMNS = [
    estimator.numeric_column("a"),
    estimator.numeric_column("b", shape=(2,)),
]


def rows_of(made: Any, key: str, labels: np.ndarray) -> np.ndarray:
    return np.array([row[key] for row in made.predict(make_input_fn(X, labels))])


def state_of(made: estimator.Estimator) -> dict[str, np.ndarray]:
    model = made._model
    return read_state({"modules": model.modules, "optimizer": model.optimizer})


def make_linear(folder, replicas):
    return estimator.LinearRegressor(
        COLUMNS, folder, optimizer="SGD", config=make_config(replicas)
    )
