"""Tests that the operation or the batch that made the first NaN is named."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.data import from_arrays
from armillary.errors import NonFiniteError
from tests.problems import make_strategy
from tests.tiers import slow_after_first


class Trainer(armillary.StandardTrainer):
    """Adds up what `use` makes of each batch."""

    def __init__(self, use, num_replicas=None, x=1.0, data=None, **options):
        arrays = {"x": np.full((16, 2), x, np.float32), "label": np.full(16, 7)}
        if data is None:
            data = from_arrays(arrays, batch_size=4)
        options = {"on_non_finite": "raise", **options}
        super().__init__(data, armillary.StandardTrainerOptions(**options))
        self.strategy = armillary.distribute.DefaultStrategy()
        if num_replicas is not None:
            self.strategy = make_strategy(num_replicas)
        self.use = use
        self.total, self.scale = jnp.zeros(()), jnp.zeros(())

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(scale):
                return armillary.compute_average_loss(self.use(batch, scale))

            loss, slope = jax.value_and_grad(loss_fn)(self.scale)
            slope = armillary.all_reduce("sum", slope)
            self.scale = self.scale - slope
            return loss

        losses = self.strategy.run(step_fn, args=(next(iterator),))
        self.total = self.total + self.strategy.reduce("sum", losses)


def log(batch, scale):
    return jnp.log(batch["x"][:, 0] * scale)  # here: log


def masked_root(batch, scale):
    x = batch["x"][:, 0] * scale
    harmless = jnp.where(x > 0, jnp.log(jax.lax.stop_gradient(x)), 0.0)
    return jnp.sqrt(x) + harmless  # here: div


def overflow(batch, scale):
    powers = jnp.exp(1e3 * batch["x"] + scale)  # here: exp
    return (powers / powers.sum(axis=-1, keepdims=True)).sum(axis=-1)


def loop(batch, scale):
    def grow(carry, _):
        return carry * 1e30, None

    start = batch["x"].sum() + scale
    return batch["x"][:, 0] * jax.lax.scan(grow, start, None, 4)[0]  # here: scan


@jax.jit
def in_a_program(batch, scale):
    return log(batch, scale)


def train(use, *args, **options):
    with pytest.raises(
        NonFiniteError, match=r"(?s)(total|scale): .*The state is"
    ) as caught:
        Trainer(use, *args, **options).train(2)
    return str(caught.value)


def find_line(name):
    """Returns the line of this file that is marked, for a pattern."""
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if f"  # here: {name}" in line)
    return re.escape(f"`{name}`, at {__file__}:{number} (")


@slow_after_first("num_replicas", [None, 2])
@slow_after_first(
    ("use", "name"),
    [
        (log, "log"),
        (masked_root, "div"),
        (overflow, "exp"),
        (loop, "scan"),
        (in_a_program, "log"),
    ],
)
def test_the_operation_is_named_with_the_line_of_the_user(use, name, num_replicas):
    message = train(use, num_replicas)

    start = "The first operation to leave such values is "
    assert re.search(start + find_line(name), message), message


@pytest.mark.slow
def test_an_index_that_lies_outside_is_named_with_the_line_of_the_user():
    def use(batch, scale):
        import optax

        logits = jnp.ones((4, 3)) * scale
        losses = optax.losses.softmax_cross_entropy_with_integer_labels
        return losses(logits, batch["label"])

    message = train(use)

    assert re.search(
        r"is `gather`, at \S+test_first_nan.py:\d+ \(use\)\. One of its "
        "indices is out of range: for example, a label that is not a class.",
        message,
    ), message


def test_a_bad_batch_is_named():
    message = train(lambda batch, s: batch["x"][:, 0] * s, 2, x=np.nan)
    assert "They come from the batch, whose `x` holds such values. Lower" in message

    data = from_arrays(np.full((2, 4), np.inf, np.float32), batch_size=2)
    message = train(lambda x, scale: x[:, 0] * (1 + scale), data=data)
    assert "from the batch, whose `values` holds such values." in message


@pytest.mark.slow
def test_the_search_leaves_state_and_data_as_they_were():
    trainer = Trainer(log)
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=find_line("log")):
            trainer.train(4)
    assert (float(trainer.total), float(trainer.scale)) == (0, 0)

    trainer.scale = jnp.ones(())
    trainer.use = lambda batch, scale: batch["x"][:, 0] * scale
    trainer.train(9)
    assert float(trainer.total) == 1.0 + 0 - 1 - 2


HOW_TO_FIND = (
    "The state is the same as before that step. To find the operation, begin the "
    "program "
    'with `jax.config.update("jax_debug_nans", True)` (`jax_debug_infs` for '
    "infinities) and run the step with `StandardTrainerOptions(compile_step=False)` on "
    "one device. Lower the learning "
)


def test_the_message_says_how_to_look_if_a_step_cannot_be_repeated():
    batch = {"x": np.zeros((4, 2), np.float32)}
    assert HOW_TO_FIND in train(log, data=lambda: (batch for _ in range(4)))


def test_a_search_that_fails_does_not_hide_the_error(monkeypatch, caplog):
    def fail(*args):
        raise MemoryError("too large")

    monkeypatch.setattr("armillary.trainer._loop.find_origin", fail)

    assert HOW_TO_FIND in train(log)
    assert "The bad step could not be repeated: MemoryError('too large')" in caplog.text
