"""Tests of warnings about rows of a replica that stand for rows of the whole batch.

Each program trains on one device and on four. A program gets a warning if and only if
its numbers differ.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import armillary
from tests.tiers import slow_after_first

RNG = np.random.default_rng(0)
BATCH_SIZE = 16
DATA = {
    "x": RNG.normal(size=(48, 3)).astype(np.float32),
    "y": RNG.normal(size=(48, 3)).astype(np.float32),
    "label": RNG.integers(0, 3, 48).astype(np.int32),
    "partner": RNG.integers(0, BATCH_SIZE, 48).astype(np.int32),
}
FIRST_ROW = "replica_id_in_sync_group * num_rows"
losses_of = optax.softmax_cross_entropy_with_integer_labels


def gather(rows):
    return armillary.get_replica_context().all_gather(rows, axis=0)


def number_rows(rows):
    """Returns the numbers of rows of this replica in the whole batch."""
    own = armillary.get_replica_context().replica_id_in_sync_group
    return jnp.arange(len(rows)) + own * len(rows)


def vectors_of(w, batch):
    return jnp.tanh(batch["x"] * w[None]), jnp.tanh(batch["y"] * w[None])


def views_of(w, batch):
    return jnp.concatenate(vectors_of(w, batch))


def table_of(w, batch):
    """Compares the rows of this replica with all rows."""
    x, y = vectors_of(w, batch)
    return x @ gather(y).T


def labels_loss(w, batch):
    table = table_of(w, batch)
    return losses_of(table, jnp.arange(len(table))).mean()


def captured_loss(w, batch):
    """Takes its labels from NumPy."""
    return losses_of(table_of(w, batch), np.arange(len(batch["x"]))).mean()


def eye_loss(w, batch):
    table = jax.nn.log_softmax(table_of(w, batch))
    return -(table * jnp.eye(*table.shape)).sum(axis=1).mean()


def diagonal_loss(w, batch):
    return -jnp.diag(jax.nn.log_softmax(table_of(w, batch))).mean()


def slice_loss(w, batch):
    x, y = vectors_of(w, batch)
    return ((x - gather(y)[: len(x)]) ** 2).mean()


def masked_loss(w, batch):
    """Compares each example with all other examples of all replicas."""
    x, _ = vectors_of(w, batch)
    table = x @ gather(x).T
    rows = jnp.arange(len(x))
    return jax.nn.logsumexp(table.at[rows, rows].set(-1e9), axis=1).mean()


def accuracy(w, batch):
    found = table_of(w, batch).argmax(axis=1)
    return (found == jnp.arange(len(found))).mean()


def own_accuracy(w, batch):
    found = table_of(w, batch).argmax(axis=1)
    return (found == number_rows(found)).mean()


def joined_loss(w, batch):
    """Finds the second view of an example, among gathered views."""
    views = gather(views_of(w, batch))
    table = views @ views.T - 1e9 * jnp.eye(len(views))
    half = jnp.arange(len(views) // 2)
    return losses_of(table, jnp.concatenate([half + len(half), half])).mean()


def split_loss(w, batch):
    first, second = jnp.split(gather(views_of(w, batch)), 2)
    return ((first - second) ** 2).mean()


def rolled_loss(w, batch):
    views = gather(views_of(w, batch))
    return ((views - jnp.roll(views, len(views) // 2, axis=0)) ** 2).mean()


def chosen_loss(w, batch):
    """Compares each row with the row of the batch that its partner numbers."""
    x, y = vectors_of(w, batch)
    return ((x - y[batch["partner"]]) ** 2).mean()


def right_labels_loss(w, batch):
    table = table_of(w, batch)
    return losses_of(table, number_rows(table)).mean()


def right_mask_loss(w, batch):
    table = jax.nn.log_softmax(table_of(w, batch))
    mask = jax.nn.one_hot(number_rows(table), table.shape[1])
    return -(table * mask).sum(axis=1).mean()


def whole_loss(w, batch):
    """Gathers the rows of both sides."""
    x, y = map(gather, vectors_of(w, batch))
    table = x @ y.T
    return losses_of(table, jnp.arange(len(table))).mean() - jnp.diag(table).mean()


def whole_views_loss(w, batch):
    """Gathers each view before it joins them."""
    views = jnp.concatenate([*map(gather, vectors_of(w, batch))])
    table = views @ views.T - 1e9 * jnp.eye(len(views))
    half = jnp.arange(len(views) // 2)
    return losses_of(table, jnp.concatenate([half + len(half), half])).mean()


def own_views_loss(w, batch):
    """Finds the second views of own examples, and compares them with all views."""
    views = views_of(w, batch)
    near = (views * jnp.roll(views, len(views) // 2, axis=0)).sum(axis=1)
    return (jax.nn.logsumexp(views @ gather(views).T, axis=1) - near).mean()


def numbered_views_loss(w, batch):
    """Finds views of the same example by numbers that are gathered, too."""
    views = views_of(w, batch)
    numbers = jnp.tile(number_rows(batch["x"]), 2)
    is_same = numbers[:, None] == gather(numbers)[None]
    table = jax.nn.log_softmax(views @ gather(views).T)
    return -jnp.where(is_same, table, 0).sum(axis=1).mean()


def first_column_loss(w, batch):
    """A loss with the right answer in the first column, as for a queue of negatives."""
    x, y = vectors_of(w, batch)
    right = (x * y).sum(axis=1, keepdims=True)
    table = jnp.concatenate([right, x @ gather(y).T], axis=1)
    return losses_of(table, jnp.zeros(len(table), int)).mean()


def marked_views_loss(w, batch):
    """Compares only views of one kind, which their place among own views tells."""
    views = views_of(w, batch)
    is_first = jnp.arange(len(views)) < len(views) // 2
    others = gather(views_of(w, batch)) ** 2
    table = jnp.where(is_first[:, None], views @ others.T, 0)
    return table.mean()


def chosen_of_all_loss(w, batch):
    x, y = vectors_of(w, batch)
    return ((x - gather(y)[batch["partner"]]) ** 2).mean()


def entries_loss(w, batch):
    """Chooses one of its own entries for each example."""
    x, y = vectors_of(w, batch)
    chosen = jax.vmap(lambda row, place: row[place])(x, batch["label"])
    rows = jnp.arange(len(y))
    return (chosen + y[rows, batch["label"]]).mean()


def ordered_loss(w, batch):
    x, y = vectors_of(w, batch)
    order = jnp.argsort(batch["label"])
    return ((x[order] - y[order]) ** 2).mean()


WRONG = {
    "labels": (labels_loss, FIRST_ROW),
    "captured labels": (captured_loss, FIRST_ROW),
    "an identity matrix": (eye_loss, FIRST_ROW),
    "a diagonal": (diagonal_loss, FIRST_ROW),
    "the first rows": (slice_loss, FIRST_ROW),
    "a mask": (masked_loss, FIRST_ROW),
    "labels of joined views": (joined_loss, "Gather each part"),
    "halves of joined views": (split_loss, "Gather each part"),
    "joined views in turn": (rolled_loss, "Gather each part"),
    "numbers in the batch": (chosen_loss, "all_gather(rows, axis=0)"),
}
RIGHT = {
    "numbers of the whole batch": right_labels_loss,
    "a mask of the whole batch": right_mask_loss,
    "all rows of both sides": whole_loss,
    "views gathered one by one": whole_views_loss,
    "own views": own_views_loss,
    "numbers of views": numbered_views_loss,
    "the first column": first_column_loss,
    "one kind of views": marked_views_loss,
    "numbers among all rows": chosen_of_all_loss,
    "entries of each example": entries_loss,
    "an order": ordered_loss,
}


def loss_step(loss_fn):
    def step(w, batch):
        loss, gradient = jax.value_and_grad(loss_fn)(w, batch)
        return w - 0.1 * armillary.all_reduce("mean", gradient), {"loss": loss}

    return step


def metric_step(metric_fn):
    return lambda w, batch: (w, {"metric": metric_fn(w, batch)})


def is_equal(step):
    """Returns whether three steps give the same numbers on one device and on four."""
    results: list[list[np.ndarray]] = []
    for num_devices in (1, 4):
        trainer = armillary.StepTrainer(
            step,
            np.array([1.0, -0.5, 2.0], np.float32),
            armillary.data.from_arrays(DATA, batch_size=BATCH_SIZE),
            strategy=armillary.MirroredStrategy(jax.devices()[:num_devices]),
        )
        metrics = trainer.train(3)
        results.append(jax.tree.leaves(jax.device_get((trainer.state, metrics))))
    return all(np.allclose(a, b, rtol=1e-4) for a, b in zip(*results, strict=True))


@slow_after_first("kind", WRONG)
def test_rows_that_are_mistaken_for_rows_of_the_batch_are_found(kind, caplog):
    loss_fn, fix = WRONG[kind]

    assert not is_equal(loss_step(loss_fn))

    assert caplog.messages
    for message in caplog.messages:
        assert f"({loss_fn.__name__})" in message
        assert "4 replicas" in message
        assert fix in message


@slow_after_first("kind", RIGHT)
def test_rows_of_the_batch_are_fine(kind, caplog):
    assert is_equal(loss_step(RIGHT[kind]))

    assert caplog.messages == []


@pytest.mark.slow
def test_an_accuracy_that_numbers_own_rows_is_found(caplog):
    assert not is_equal(metric_step(accuracy))
    (message,) = caplog.messages
    assert FIRST_ROW in message
    caplog.clear()

    assert is_equal(metric_step(own_accuracy))
    assert caplog.messages == []
