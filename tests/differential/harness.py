"""Trains one small case twice: in plain JAX on the whole batch, and on N replicas.

A case makes a state and changes it in a step. The step asks its `Replica` for the few
things that differ between the two worlds: the average over the whole batch, a total
or a mean over replicas, the rows of all of them. The state must be the same in the end,
in float64, however the steps are divided into loops, and equal on all replicas.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary

ROWS, WIDTH, STEPS, CLASSES = 8, 6, 3, 3
_numbers = np.random.default_rng(0)
DATA = {
    "x": _numbers.normal(size=(STEPS * ROWS, WIDTH)),
    "y": _numbers.normal(size=STEPS * ROWS),
    "label": _numbers.integers(0, CLASSES, STEPS * ROWS),
}
OTHER_REPLICAS = 0xA5B111A2
WHOLE = ((3,), (1, 1, 1), (2, 1))

Batch = dict[str, Any]
Losses = Callable[[Any, Batch], Any]


class Replica:
    """The facts that a step needs about the replica that runs it."""

    def average(self, losses: Any) -> Any:
        """Returns this replica's part of the average loss over the whole batch."""
        return armillary.compute_average_loss(losses)

    def weighted_mean(self, losses: Any, weights: Any) -> Any:
        """Returns its part of the weighted mean over the whole batch."""
        return armillary.weighted_mean(losses, weights)

    def total(self, tree: Any) -> Any:
        """Returns the sum over replicas, such as of gradients of an `average`."""
        return armillary.all_reduce("sum", tree)

    def mean(self, tree: Any) -> Any:
        """Returns the mean over replicas, such as of gradients of a plain mean."""
        return armillary.all_reduce("mean", tree)

    def pmean(self, tree: Any) -> Any:
        """Returns the mean over replicas in the words of JAX."""
        return jax.lax.pmean(tree, "replica")

    def psum(self, tree: Any) -> Any:
        """Returns the sum over replicas in the words of JAX."""
        return jax.lax.psum(tree, "replica")

    def shared(self, tree: Any) -> Any:
        """Returns this replica's part of what all replicas add to the loss."""
        return armillary.scale_regularization_loss(tree)

    def whole(self, loss_fn: Any, op: str = "sum", **options: Any) -> Any:
        """Returns the loss of all replicas, which has their derivatives."""
        return armillary.over_replicas(loss_fn, op, **options)

    def gather(self, tree: Any) -> Any:
        """Returns the rows of all replicas."""
        return armillary.get_replica_context().all_gather(tree, 0)


class WholeBatch(Replica):
    """The same questions, asked in plain JAX."""

    def average(self, losses: Any) -> Any:
        return jnp.sum(losses) / jnp.shape(losses)[0]

    def weighted_mean(self, losses: Any, weights: Any) -> Any:
        return jnp.sum(losses * weights) / jnp.sum(weights)

    def total(self, tree: Any) -> Any:
        return tree

    mean = pmean = psum = shared = gather = total

    def whole(self, loss_fn: Any, op: str = "sum", **options: Any) -> Any:
        del op, options
        return loss_fn


@dataclass(frozen=True)
class Refusal:
    """An error in place of a result, on these numbers of replicas (0: no strategy)."""

    error: type[Exception]
    match: str
    way_out: str
    replicas: tuple[int, ...] = (2, 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One construct.

    Args:
        name: The construct, for the table.
        make: Makes the state: an NNX object.
        step: Changes the state, given a batch and the replica.
        program: Trains and compares by itself, given the strategy and the number of
            replicas, in place of `make` and `step`.
        reference: The step on the whole batch, given the number of replicas, where it
            is not `step`.
        between: Called after every loop with the state and the steps done so far.
        loops: How the steps are divided into loops.
        covers: Public names that have a case by this one.
        note: The meaning of equal, where it is not obvious.
        refusal: The error or warning in place of a result.
        tolerance: Largest relative difference: more if a library computes in float32.
        options: Sets of options of the trainer to try.
        setting: Makes a context in which the trainer runs.
        is_here: Whether the installed releases have the construct. Older releases
            lack it, and only the page shows the case there.
    """

    name: str
    make: Callable[[], Any] = nnx.Dict
    step: Callable[[Any, Batch, Replica], None] = lambda state, batch, replica: None
    program: Callable[[Any, int], None] | None = None
    reference: Callable[[Any, Batch, int], None] | None = None
    between: Callable[[Any, int], None] | None = None
    loops: tuple[tuple[int, ...], ...] = WHOLE
    covers: tuple[str, ...] = ()
    note: str = ""
    refusal: Refusal | None = None
    tolerance: float = 1e-8
    options: tuple[dict[str, Any], ...] = ({},)
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_here: bool = True

    def take_whole(self, state: Any, batch: Batch, num_replicas: int) -> None:
        """Takes a step in plain JAX."""
        if self.reference is not None:
            self.reference(state, batch, num_replicas)
        else:
            self.step(state, batch, WholeBatch())


def descend(model: Any, grads: Any) -> None:
    """Takes a step of gradient descent."""
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))


def training(
    name: str, make: Callable[[], Any], losses: Losses, **options: Any
) -> Case:
    """Returns a case that trains a model on losses, one per example."""

    def step(model: Any, batch: Batch, replica: Replica) -> None:
        grads = nnx.grad(lambda model: replica.average(losses(model, batch)))(model)
        descend(model, replica.total(grads))

    return Case(name=name, make=lambda: widen(make()), step=step, **options)


def widen(model: Any) -> Any:
    """Turns float32 into float64: layers of Flax make float32 parameters."""

    def wide(leaf: Any) -> Any:
        return leaf.astype("float64") if leaf.dtype == jnp.float32 else leaf

    nnx.update(model, jax.tree.map(wide, nnx.state(model)))
    return model


def by_shard(
    name: str, make: Callable[[], Any], losses: Losses, **options: Any
) -> Case:
    """Returns a case whose losses depend on the shard: statistics, random numbers.

    The reference computes the losses of each shard in turn, with the keys folded by
    hand, and takes the mean of the batch statistics.
    """

    def reference(model: Any, batch: Batch, num_replicas: int) -> None:
        graph, params, statistics, keys, others = nnx.split(
            model, nnx.Param, nnx.BatchStat, _is_key, ...
        )

        def loss_fn(params: Any) -> Any:
            results = []
            for i in range(max(num_replicas, 1)):
                folded = jax.tree.map(lambda key, i=i: _fold(key, i), keys)
                parts = (params, statistics, folded, others)
                replica = nnx.merge(graph, *parts, copy=True)
                own_batch = shard(batch, i, num_replicas)
                loss = WholeBatch().average(losses(replica, own_batch))
                results.append((loss, *nnx.state(replica, nnx.BatchStat, _is_rest)))
            loss, own, rest = zip(*results, strict=True)
            mean = jax.tree.map(lambda *values: sum(values) / len(values), *own)
            return sum(loss) / len(loss), (mean, rest[0])

        grads, (statistics, rest) = jax.grad(loss_fn, has_aux=True)(params)
        descend(model, grads)
        nnx.update(model, statistics, rest)

    return training(name, make, losses, reference=reference, **options)


def _is_key(path: Any, value: Any) -> bool:
    array = value.get_value() if isinstance(value, nnx.Variable) else value
    return jax.dtypes.issubdtype(getattr(array, "dtype", None), jax.dtypes.prng_key)


def _is_rest(path: Any, value: Any) -> bool:
    return not isinstance(value, nnx.Param) and not _is_key(path, value)


def _fold(keys: Any, replica: int) -> Any:
    """Returns the keys of a replica. The first replica uses the stored keys."""
    if replica == 0:
        return keys

    def fold(key: Any) -> Any:
        return jax.random.fold_in(jax.random.fold_in(key, OTHER_REPLICAS), replica)

    return jax.vmap(fold)(keys.reshape(-1)).reshape(keys.shape)


def shard(batch: Batch, index: int, num_replicas: int) -> Batch:
    """Returns a replica's rows."""
    rows = ROWS // max(num_replicas, 1)
    return {name: a[index * rows : (index + 1) * rows] for name, a in batch.items()}


def functions(prefix: str, losses: dict[str, Losses], **options: Any) -> list[Case]:
    """Returns cases for losses of a vector of `WIDTH` weights."""
    return [
        training(prefix + name, _weights, _of_weights(fn), **options)
        for name, fn in losses.items()
    ]


def _weights() -> Any:
    return nnx.Dict(w=nnx.Param(jnp.linspace(0.5, 1.5, WIDTH)))


def _of_weights(fn: Losses) -> Losses:
    return lambda model, batch: fn(model.w[...], batch)


def can_merge(case: Case) -> bool:
    """Returns whether a case may share its program with others."""
    shared = (WHOLE, ({},), 1e-8, None, None, nullcontext)
    own = (case.loops, case.options, case.tolerance, case.between, case.refusal)
    return (*own, case.setting) == shared and case.program is None


def merge(cases: Sequence[Case]) -> Case:
    """Returns one case that takes the steps of many: one program to compile."""
    if len(cases) == 1:
        return cases[0]

    def make() -> Any:
        return nnx.List([case.make() for case in cases])

    def step(states: Any, batch: Batch, replica: Replica) -> None:
        for case, state in zip(cases, states, strict=True):
            case.step(state, batch, replica)

    def by_shard(states: Any, batch: Batch, num_replicas: int) -> None:
        for case, state in zip(cases, states, strict=True):
            case.take_whole(state, batch, num_replicas)

    name = ", ".join(case.name for case in cases)
    reference = by_shard if any(case.reference for case in cases) else None
    return Case(name=name, make=make, step=step, reference=reference)


class Trainer(armillary.StandardTrainer):
    """Runs the step of a case."""

    def __init__(self, case: Case, strategy: Any, options: dict[str, Any]) -> None:
        source = armillary.data.from_arrays(DATA, batch_size=ROWS, repeat=True)
        on_demand = armillary.data.InputOptions(prefetch=0)
        dataset = strategy.distribute_dataset(source, on_demand)
        super().__init__(dataset, armillary.StandardTrainerOptions(**options))
        self.strategy = strategy
        with strategy.scope():
            self.state = case.make()
        self.step = case.step

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            self.step(self.state, batch, Replica())

        self.strategy.run(step_fn, args=(next(iterator),))


def check(cases: Sequence[Case], replicas: Sequence[int]) -> None:
    """Asserts that cases that share a program give what plain JAX gives.

    Raises:
        AssertionError: If one does not. It names all that do not.
    """
    problems: dict[str, str] = {}
    if len(cases) > 1:
        with contextlib.suppress(Exception):
            return check_case(merge(cases), replicas)
    for case in cases:
        try:
            check_case(case, replicas)
        except Exception as error:
            problems[case.name] = f"{type(error).__name__}: {error}"
    report = "\n".join(f"{name}: {problem}" for name, problem in problems.items())
    assert not problems, report


def check_case(case: Case, replicas: Sequence[int]) -> None:
    """Asserts that a case gives what plain JAX gives, or is refused as it says."""
    train_whole = functools.cache(functools.partial(_train_whole, case))
    for num_replicas in replicas:
        if case.program is not None:
            case.program(_strategy(num_replicas), num_replicas)
            continue
        refusal = case.refusal
        if refusal is not None and num_replicas in refusal.replicas:
            _check_refused(case, refusal, num_replicas)
            continue
        expected = train_whole(num_replicas if case.reference is not None else 0)
        for options in case.options:
            with case.setting():
                _check_equal(case, num_replicas, options, expected)


def _check_refused(case: Case, refusal: Refusal, num_replicas: int) -> None:
    with pytest.raises(refusal.error, match=refusal.match):
        _train(Trainer(case, _strategy(num_replicas), {}), case, case.loops[0])


def _check_equal(
    case: Case, num_replicas: int, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    trainer = Trainer(case, _strategy(num_replicas), options)
    begin = jax.tree.map(_copy, nnx.state(trainer.state))
    for loops in case.loops:
        if case.between is not None:
            trainer = Trainer(case, _strategy(num_replicas), options)
        else:
            nnx.update(trainer.state, jax.tree.map(_copy, begin))
        _train(trainer, case, loops)
        where = f"{case.name} on {num_replicas} replicas, loops {loops}, {options}"
        _compare(_values(trainer.state), expected, case.tolerance, where)


def _train(trainer: Trainer, case: Case, loops: Sequence[int]) -> None:
    done = 0
    for num_steps in loops:
        trainer.train(num_steps)
        done += num_steps
        if case.between is not None:
            case.between(trainer.state, done)


def _strategy(num_replicas: int) -> Any:
    if not num_replicas:
        return armillary.distribute.DefaultStrategy()
    return armillary.MirroredStrategy(jax.devices()[:num_replicas])


def _train_whole(case: Case, num_replicas: int) -> dict[str, Any]:
    """Returns the state after all steps in plain JAX."""

    @nnx.jit
    def step(state: Any, batch: Batch) -> None:
        case.take_whole(state, batch, num_replicas)

    state = case.make()
    for i in range(STEPS):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        step(state, {name: jnp.asarray(array[rows]) for name, array in DATA.items()})
        if case.between is not None:
            case.between(state, i + 1)
    return _values(state)


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def _values(state: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(state))
    return {jax.tree_util.keystr(path): _raw(leaf) for path, leaf in leaves}


def _raw(leaf: Any) -> Any:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _compare(
    actual: dict[str, Any], expected: dict[str, Any], tolerance: float, where: str
) -> None:
    assert actual.keys() == expected.keys(), where
    for path, value in expected.items():
        copies = [np.asarray(part.data) for part in actual[path].addressable_shards]
        for replica, copy in enumerate(copies):
            np.testing.assert_allclose(
                copy,
                value,
                tolerance,
                tolerance / 100,
                err_msg=f"{where}: {path}, copy {replica}",
            )
