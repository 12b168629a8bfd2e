"""The trainer of digits in several processes, and its values as JSON."""

from typing import Any

import numpy as np
import optax
from flax import nnx

from armillary.data import from_arrays
from tests.problems import MLP, Classifier, make_digits


def make_trainer(strategy: Any, seed: int = 0) -> Classifier:
    digits = from_arrays(make_digits(72), batch_size=16, shuffle_seed=3, repeat=True)
    dataset = strategy.distribute_dataset(digits)
    return Classifier(strategy, MLP(nnx.Rngs(seed)), optax.adam(1e-2), dataset)


def local_rows(strategy: Any, value: Any) -> list[np.ndarray]:
    return [np.asarray(row) for row in strategy.local_results(value)]


def read_numbers(output: Any) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in output.items()}


def digest(value: np.ndarray) -> str:
    return np.ascontiguousarray(value).tobytes().hex()[:4000]
