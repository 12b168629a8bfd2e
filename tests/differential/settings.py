"""Ways to run a step: options of the trainer, JAX's tools for debugging, own state."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import armillary
from armillary.errors import ReplicaMismatchError
from tests.differential.harness import (
    DATA,
    ROWS,
    STEPS,
    WHOLE,
    WIDTH,
    Batch,
    Case,
    Refusal,
    Replica,
    shard,
)
from tests.differential.layers import LAYERS, METRICS, Network
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
        NAMED[name],
        name=f"{name} with {describe(EAGER)}",
        options=(EAGER,),
        loops=((2, 1),),
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
    *_setting(
        "jax.default_matmul_precision", lambda: jax.default_matmul_precision("highest")
    ),
]


class Remembering(nnx.Module):
    """A model that remembers what it saw."""

    def __init__(self) -> None:
        self.model = Network()
        self.memory = nnx.Variable(jnp.zeros(4))


def _remember(state: Any, batch: Batch, replica: Replica) -> None:
    """Keeps the mean activation of a replica, which differs from the others'."""
    state.memory[...] = state.model.first(batch["x"]).mean(0)


class OwnState(armillary.StandardTrainer):
    """Keeps a value of each replica's own between steps."""

    def __init__(self, strategy: Any, make_own: Callable[[], Any], step: Any) -> None:
        source = armillary.data.from_arrays(DATA, batch_size=ROWS, repeat=True)
        super().__init__(
            strategy.distribute_dataset(source, armillary.data.InputOptions(prefetch=0))
        )
        self.strategy, self.step = strategy, step
        self.own = strategy.distribute_values_from_function(lambda _: make_own())
        self.w = jnp.ones(WIDTH)

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Batch, own: Any) -> Any:
            def loss_fn(w: Any) -> Any:
                losses, new = self.step(w, batch, own)
                return armillary.compute_average_loss(losses), new

            grads, new = jax.grad(loss_fn, has_aux=True)(self.w)
            self.w = self.w - 0.1 * armillary.all_reduce("sum", grads)
            return new

        self.own = self.strategy.run(step_fn, args=(next(iterator), self.own))


def own_state(name: str, make_own: Callable[[], Any], step: Any) -> Case:
    """Returns a case in which every replica has a state of its own.

    The reference trains on the shards in turn, each with its own state.
    """

    def program(strategy: Any, num_replicas: int) -> None:
        count = max(num_replicas, 1)
        w, owns = jnp.ones(WIDTH), [make_own() for _ in range(count)]
        for i in range(STEPS):
            batch = {
                n: jnp.asarray(a[i * ROWS : (i + 1) * ROWS]) for n, a in DATA.items()
            }

            def loss_fn(w: Any, batch: Batch = batch, owns: Any = tuple(owns)) -> Any:
                parts = [
                    step(w, shard(batch, r, count), own) for r, own in enumerate(owns)
                ]
                return sum(losses.sum() for losses, _ in parts) / ROWS, [
                    p[1] for p in parts
                ]

            grads, owns = jax.jit(jax.grad(loss_fn, has_aux=True))(w)
            w = w - 0.1 * grads
        for loops in WHOLE:
            trainer = OwnState(strategy, make_own, step)
            for num_steps in loops:
                trainer.train(num_steps)
            np.testing.assert_allclose(trainer.w, w, 1e-8)
            for actual, own in zip(
                strategy.local_results(trainer.own), owns, strict=True
            ):
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, 1e-8), actual, own
                )

    note = "a value of `distribute_values_from_function`, passed to `run` and returned"
    return Case(name=name, program=program, note=note)


def _environment(w: Any, batch: Batch, own: Any) -> Any:
    """Moves an environment, and learns from where it is."""
    position, velocity = own["position"], own["velocity"]
    velocity = 0.9 * velocity + jax.lax.stop_gradient(batch["x"].mean(0) @ w)
    position = position + velocity
    losses = (batch["x"] @ w - batch["y"] - 0.01 * position) ** 2
    return losses, {"position": position, "velocity": velocity}


def _make_environment() -> Any:
    return {"position": jnp.zeros(()), "velocity": jnp.ones(())}


STATE = [
    Case(
        name="state of a replica's own in a variable",
        make=Remembering,
        step=_remember,
        refusal=Refusal(
            ReplicaMismatchError,
            "must be equal on all replicas",
            "keep it in a value of `strategy.distribute_values_from_function`, pass it "
            "to `run` as an argument, and assign the value that `run` returns",
        ),
    ),
    own_state(
        "state of a replica's own (an environment)", _make_environment, _environment
    ),
]
CASES: list[Case] = [*OPTION_CASES, *TOOLS, *STATE]
