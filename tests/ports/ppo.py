"""Proximal policy optimization whose games, batches and updates are one program.

There is no dataset: each update plays the games on, and learns from what it has seen.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import armillary
from tests.ports.port import NUM_STEPS, Port, Result, keys_of_replicas, on_replicas

NUM_GAMES, NUM_MOVES, GAME_LENGTH = 8, 6, 5
NUM_EPOCHS, NUM_MINIBATCHES = 2, 2
DISCOUNT, SMOOTHING, CLIP = 0.95, 0.9, 0.2


class Game(NamedTuple):
    """A chase on a line: the player moves, and is worth the more the closer it is."""

    player: jax.Array
    target: jax.Array
    num_moves: jax.Array


class Moves(NamedTuple):
    """The observations and actions; the first axis has the moves."""

    seen: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    is_last: jax.Array


class ActorCritic(nn.Module):
    """Logits of the three moves, and the value of a position."""

    @nn.compact
    def __call__(self, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = nn.tanh(nn.Dense(8)(seen))
        return nn.Dense(3)(hidden), nn.Dense(1)(hidden)[..., 0]


def begin(key: jax.Array) -> Game:
    player, target = jax.random.uniform(key, (2,), minval=-1.0)
    return Game(player, target, jnp.zeros((), jnp.int32))


def observe(game: Game) -> jax.Array:
    return jnp.stack([game.player, game.target])


def play(game: Game, action: jax.Array, key: jax.Array) -> tuple[Game, Any, Any]:
    player = game.player + 0.25 * (action - 1)
    num_moves = game.num_moves + 1
    is_last = num_moves == GAME_LENGTH
    moved = Game(player, game.target, num_moves)
    after = jax.tree.map(
        lambda new, old: jnp.where(is_last, new, old), begin(key), moved
    )
    return after, -jnp.abs(player - game.target), is_last


def make_runner() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    network = ActorCritic()
    train = TrainState.create(
        apply_fn=network.apply,
        params=network.init(keys[0], jnp.zeros(2)),
        tx=optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.02)),
    )
    games = jax.vmap(begin)(jax.random.split(keys[1], NUM_GAMES))
    return {"train": train, "games": games, "key": keys[2]}


def advantages_of(moves: Moves, last_value: jax.Array) -> jax.Array:
    def add(carry: Any, move: Moves) -> Any:
        advantage, next_value = carry
        goes_on = 1.0 - move.is_last
        error = move.reward + DISCOUNT * next_value * goes_on - move.value
        advantage = error + DISCOUNT * SMOOTHING * goes_on * advantage
        return (advantage, move.value), advantage

    first = jnp.zeros_like(last_value), last_value
    return jax.lax.scan(add, first, moves, reverse=True)[1]


def loss_fn(params: Any, apply_fn: Any, moves: Moves, advantages: Any) -> jax.Array:
    logits, value = apply_fn(params, moves.seen)
    log_probs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_probs, moves.action[:, None], axis=1)[:, 0]
    ratio = jnp.exp(chosen - moves.log_prob)
    scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    of_actor = -jnp.minimum(ratio * scaled, clipped * scaled).mean()
    of_critic = ((value - moves.value - advantages) ** 2).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=-1).mean()
    return of_actor + 0.5 * of_critic - 0.01 * entropy


def update(runner: dict[str, Any], reduce: Any, take: Any, collect: Any) -> Any:
    """Plays some moves of each game, and learns from them.

    Args:
        runner: The parameters, the games and the key.
        reduce: Returns the mean of gradients over replicas.
        take: Returns the games that this replica plays.
        collect: Returns the games of all replicas.
    """
    train, games = runner["train"], take(runner["games"])
    num_games = games.player.shape[0]

    def move(carry: Any, _: Any) -> tuple[Any, Moves]:
        games, key = carry
        key, for_action, for_games = jax.random.split(key, 3)
        seen = jax.vmap(observe)(games)
        logits, value = train.apply_fn(train.params, seen)
        action = jax.random.categorical(for_action, logits)
        log_prob = jax.nn.log_softmax(logits)[jnp.arange(num_games), action]
        keys = jax.random.split(for_games, num_games)
        games, reward, is_last = jax.vmap(play)(games, action, keys)
        return (games, key), Moves(seen, action, log_prob, value, reward, is_last)

    def learn(carry: Any, _: Any) -> Any:
        train, key = carry
        key, for_order = jax.random.split(key)
        order = jax.random.permutation(for_order, NUM_MOVES * num_games)
        order = order.reshape(NUM_MINIBATCHES, -1)
        flat = jax.tree.map(
            lambda each: each.reshape(-1, *each.shape[2:]), (moves, advantages)
        )

        def descend(train: TrainState, rows: jax.Array) -> Any:
            own = jax.tree.map(lambda each: each[rows], flat)
            grad_fn = jax.value_and_grad(loss_fn)
            loss, grads = grad_fn(train.params, train.apply_fn, *own)
            return train.apply_gradients(grads=reduce(grads)), loss

        train, losses = jax.lax.scan(descend, train, order)
        return (train, key), losses

    (games, key), moves = jax.lax.scan(move, (games, runner["key"]), None, NUM_MOVES)
    last_value = train.apply_fn(train.params, jax.vmap(observe)(games))[1]
    advantages = advantages_of(moves, last_value)
    (train, key), losses = jax.lax.scan(learn, (train, key), None, NUM_EPOCHS)
    after = {"train": train, "games": collect(games), "key": key}
    return after, {"loss": losses.mean(), "reward": moves.reward.mean()}


def take_share(games: Game, index: jax.Array, num_replicas: int) -> Game:
    size = NUM_GAMES // num_replicas
    return jax.tree.map(
        lambda each: jax.lax.dynamic_slice_in_dim(each, index * size, size), games
    )


def run_original(num_replicas: int) -> Result:
    def nothing(value: Any) -> Any:
        return value

    if num_replicas == 1:
        train = jax.jit(
            lambda runner: jax.lax.scan(
                lambda runner, _: update(runner, nothing, nothing, nothing),
                runner,
                None,
                NUM_STEPS,
            )
        )
        _, metrics = train(make_runner())
        return Result([float(each) for each in metrics["loss"]], {})

    def step(runner: Any, keys: jax.Array) -> Any:
        index = jax.lax.axis_index("batch")
        after, metrics = update(
            {**runner, "key": keys[0]},
            lambda grads: jax.lax.pmean(grads, "batch"),
            lambda games: take_share(games, index, num_replicas),
            lambda games: jax.lax.all_gather(games, "batch", tiled=True),
        )
        # The stored key is the one that the first replica leaves.
        data = jax.lax.all_gather(jax.random.key_data(after["key"]), "batch")[0]
        after = {**after, "key": jax.random.wrap_key_data(data)}
        return after, jax.lax.pmean(metrics, "batch")

    compiled = on_replicas(step, num_replicas)
    runner, losses = make_runner(), []
    for _ in range(NUM_STEPS):
        keys = keys_of_replicas(runner["key"], num_replicas)
        runner, metrics = compiled(runner, keys)
        losses.append(float(metrics["loss"]))
    return Result(losses, {})


def train_step(runner: Any) -> Any:
    context = armillary.get_replica_context()
    index, num_replicas = (
        context.replica_id_in_sync_group,
        context.num_replicas_in_sync,
    )
    return update(
        runner,
        lambda grads: armillary.all_reduce("mean", grads),
        lambda games: take_share(games, index, num_replicas),
        lambda games: context.all_gather(games, axis=0),
    )


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    return armillary.StepTrainer(train_step, make_runner(), strategy=strategy)


PORT = Port(run_original, make_trainer, exact=("one device",))
