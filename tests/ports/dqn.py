"""Q-learning with a game, a replay buffer and exploration in Python."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import armillary
from tests.ports.port import BATCH_SIZE, Arrays, Port, Result

NUM_UPDATES, MOVES_PER_UPDATE, CAPACITY = 6, 3, 32
DISCOUNT, TARGET_INTERVAL = 0.9, 2
OPTIMIZER = optax.adam(0.01)


def make_params() -> dict[str, jax.Array]:
    first, last = jax.random.split(jax.random.key(0))
    return {
        "first": 0.5 * jax.random.normal(first, (3, 8)),
        "last": 0.5 * jax.random.normal(last, (8, 2)),
    }


def values_of(params: Any, seen: Any) -> jax.Array:
    return jnp.tanh(seen @ params["first"]) @ params["last"]


read_values = jax.jit(values_of)


def loss_fn(params: Any, target: Any, batch: Any) -> jax.Array:
    best = values_of(target, batch["after"]).max(axis=-1)
    goal = batch["reward"] + DISCOUNT * best * (1 - batch["is_last"])
    values = values_of(params, batch["seen"])
    chosen = jnp.take_along_axis(values, batch["action"][:, None], axis=1)[:, 0]
    return jnp.mean((chosen - goal) ** 2)


class Play:
    """A game, the buffer of its moves, and the exploration of its player.

    The player walks on a line from -2, and wins at 2.
    """

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.place, self.num_moves, self.num_stored = -2.0, 0, 0
        self.buffer = {
            "seen": np.zeros((CAPACITY, 3), np.float32),
            "action": np.zeros(CAPACITY, np.int32),
            "reward": np.zeros(CAPACITY, np.float32),
            "after": np.zeros((CAPACITY, 3), np.float32),
            "is_last": np.zeros(CAPACITY, np.float32),
        }

    def observe(self) -> np.ndarray:
        return np.array([self.place, self.num_moves / 10, 1.0], np.float32)

    def move(self, params: Any) -> None:
        seen = self.observe()
        if self.rng.uniform() < 0.3:
            action = int(self.rng.integers(2))
        else:
            action = int(np.argmax(read_values(params, seen)))
        self.place += 2.0 * action - 1 + self.rng.normal(scale=0.1)
        self.num_moves += 1
        has_won, is_last = self.place >= 2, self.num_moves == 10
        row = self.num_stored % CAPACITY
        stored = (seen, action, float(has_won), self.observe(), has_won or is_last)
        for array, value in zip(self.buffer.values(), stored, strict=True):
            array[row] = value
        self.num_stored += 1
        if has_won or is_last:
            self.place, self.num_moves = -2.0, 0

    def sample(self) -> Arrays:
        num_rows = min(self.num_stored, CAPACITY)
        rows = self.rng.integers(num_rows, size=BATCH_SIZE)
        return {name: array[rows] for name, array in self.buffer.items()}

    def get_state(self) -> dict[str, Any]:
        return {
            "buffer": self.buffer,
            "numbers": (self.place, self.num_moves, self.num_stored),
            "rng": self.rng.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        for name, array in self.buffer.items():
            array[...] = state["buffer"][name]
        self.place, self.num_moves, self.num_stored = state["numbers"]
        self.rng.bit_generator.state = state["rng"]


def run_original(num_replicas: int) -> Result:
    @jax.jit
    def update(params: Any, target: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, target, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    params = target = make_params()
    opt_state, play, losses = OPTIMIZER.init(params), Play(), []
    for number in range(1, NUM_UPDATES + 1):
        for _ in range(MOVES_PER_UPDATE):
            play.move(params)
        params, opt_state, loss = update(params, target, opt_state, play.sample())
        losses.append(float(loss))
        if number % TARGET_INTERVAL == 0:
            target = params
    return Result(losses, {})


def train_step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], state["target"], batch)
    grads = armillary.all_reduce("mean", grads)
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    number = state["number"] + 1
    target = optax.periodic_update(params, state["target"], number, TARGET_INTERVAL)
    after = {
        "params": params,
        "target": target,
        "opt_state": opt_state,
        "number": number,
    }
    return after, {"loss": loss}


class Games:
    """Batches of the replay buffer, each after some moves with the current state."""

    def __init__(self) -> None:
        self.play = Play()
        self.trainer: armillary.StepTrainer | None = None

    def __call__(self) -> Iterator[Arrays]:
        assert self.trainer is not None
        while True:
            for _ in range(MOVES_PER_UPDATE):
                self.play.move(self.trainer.state["params"])
            yield self.play.sample()


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    params, games = make_params(), Games()
    state = {
        "params": params,
        "target": params,
        "opt_state": OPTIMIZER.init(params),
        "number": 0,
    }
    trainer = armillary.StepTrainer(
        train_step,
        state,
        games,
        strategy=strategy,
        # A batch is made with the parameters of the step before.
        options=armillary.StandardTrainerOptions(read_ahead=False),
    )
    games.trainer = trainer
    return trainer


def make_checkpoint(trainer: Any) -> armillary.Checkpoint:
    play = trainer.train_dataset.play
    return armillary.Checkpoint(trainer=trainer, play=play)


PORT = Port(
    run_original,
    make_trainer,
    make_checkpoint=make_checkpoint,
    num_steps=NUM_UPDATES,
    exact=("one device",),
)
