"""Ways to run a step: options of the trainer, JAX's tools for debugging, own state."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from armillary.errors import ReplicaMismatchError
from tests.differential.harness import Batch, Case, Refusal, Replica, replace
from tests.differential.layers import LAYERS, METRICS, Network, error
from tests.differential.optimizers import CASES as OPTIMIZERS
from tests.differential.programs import CASES as PROGRAMS

OPTIONS: tuple[dict[str, Any], ...] = (
    {"compile_loop": False},
    {"steps_per_chunk": 2},
    {"on_non_finite": "skip"},
    {"check_replicas_every": 1},
)
NAMED = {case.name: case for case in (*LAYERS, *METRICS, *OPTIMIZERS, *PROGRAMS)}
CHEAP = (
    "nnx.Linear",
    "nnx.BatchNorm and nnx.Dropout",
    "nnx.metrics.Average",
    "optax.adam",
    "lax.scan",
    "lax.cond (local predicate of shared branches)",
)


def describe(options: dict[str, Any]) -> str:
    """Returns options as they are written."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


EAGER = {"compile_step": False}
OPTION_CASES = [
    replace(NAMED[name], name=f"{name} with {describe(options)}", options=(options,))
    for options in OPTIONS
    for name in CHEAP
] + [
    replace(
        NAMED[name], name=f"{name} with {describe(EAGER)}", options=(EAGER,), loops=((2, 1),)
    )
    for name in ("nnx.metrics.Average", "lax.scan", "optax.sgd")
]


def _setting(
    name: str, setting: Callable[[], contextlib.AbstractContextManager[Any]]
) -> list[Case]:
    return [
        replace(NAMED[case], name=f"{name}: {case}", setting=setting, loops=((2, 1),))
        for case in ("nnx.BatchNorm and nnx.Dropout", "optax.adam", "lax.scan")
    ]


TOOLS = [
    *_setting("jax.disable_jit", jax.disable_jit),
    *_setting("jax.checking_leaks", jax.checking_leaks),
    *_setting("jax.debug_nans", lambda: jax.debug_nans(True)),
    *_setting("jax.debug_infs", lambda: jax.debug_infs(True)),
    *_setting("jax.debug_key_reuse", lambda: jax.debug_key_reuse(True)),
    *_setting("jax.default_matmul_precision", lambda: jax.default_matmul_precision("highest")),
    *_setting("jax.transfer_guard", lambda: jax.transfer_guard("log")),
]  # fmt: skip


class Remembering(nnx.Module):
    """A model with a row of memory for each replica, in one array."""

    def __init__(self, num_rows: int = 4) -> None:
        self.model = Network()
        self.memory = nnx.Variable(jnp.zeros((num_rows, 4)))


def _remember(state: Any, batch: Batch, replica: Replica) -> None:
    """Keeps the mean activation of a replica, which differs from the others'."""
    state.memory[...] = state.memory[...].at[0].set(state.model.first(batch["x"]).mean(0))


STATE = [
    Case(
        name="state of a replica's own in a variable",
        make=Remembering,
        step=_remember,
        refusal=Refusal(
            ReplicaMismatchError,
            "must be equal on all replicas",
            "keep a row for each replica, and gather the rows at the end of the step",
            (1, 2, 4),
        ),
    ),
]
CASES: list[Case] = [*OPTION_CASES, *TOOLS, *STATE]
del optax, error
