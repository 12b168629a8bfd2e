"""`ParameterServerStrategy`: calls whose gradients are next to nothing to compute."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import armillary
from armillary.distribute.coordinator import ClusterCoordinator
from benchmarks.closures import STEP, check_calls


class ParameterServerContestant:
    """Each call reads all variables, and sends a gradient for each."""

    facts: dict[str, Any]

    def setup(self, shapes: list[tuple[int, ...]], num_workers: int) -> None:
        """Starts Ray, workers and one server."""
        strategy = armillary.ParameterServerStrategy(num_workers=num_workers, num_ps=1)
        model = nnx.List(nnx.Param(jnp.zeros(shape)) for shape in shapes)
        optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)

        def step() -> None:
            def replica() -> None:
                variables = nnx.state(model, nnx.Param)
                gradients = jax.tree.map(
                    lambda variable: jnp.maximum(variable, 1.0) * STEP, variables
                )
                optimizer.update(model, gradients)

            strategy.run(replica)

        self._model, self._step, self._num_calls = model, step, 0
        self._coordinator = ClusterCoordinator(strategy)
        self.facts = {"num_ps": 1, "num_workers": num_workers}

    def run(self, num_calls: int) -> float:
        """Runs calls to their end; returns how many updates the variables have had."""
        for _ in range(num_calls):
            self._coordinator.schedule(self._step)
        self._coordinator.join()
        self._num_calls += num_calls
        return check_calls([v[...] for v in self._model], self._num_calls)
