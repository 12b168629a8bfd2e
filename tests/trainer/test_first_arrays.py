"""The first arrays of a state leave memory when steps have replaced them."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import armillary


def make_data():
    rows = np.arange(32, dtype=np.float32)
    return armillary.data.from_arrays(rows, batch_size=8, repeat=True)


def make_params():
    return {"kernel": jnp.zeros((4, 4)), "biases": [jnp.zeros(4), jnp.ones(4)]}


def make_train_state():
    state = TrainState.create(apply_fn=None, params=make_params(), tx=optax.adam(1e-3))
    return state.replace(step=jnp.zeros((), jnp.int32))


def move(state, change):
    """Adds a number to each array of a state."""
    return jax.tree.map(lambda array: array + change.astype(array.dtype), state)


def step(state, batch):
    change = armillary.all_reduce("mean", jnp.mean(batch))
    return move(state, change), {"change": change}


class Trainer(armillary.StandardTrainer):
    """Replaces the value of an attribute at each step."""

    def __init__(self, state):
        super().__init__(make_data())
        self.state = state

    def train_step(self, iterator):
        self.state = move(self.state, jnp.mean(next(iterator)))


class InPlaceTrainer(armillary.StandardTrainer):
    """Writes into a dictionary at each step."""

    def __init__(self, state):
        super().__init__(make_data())
        self.state = state

    def train_step(self, iterator):
        self.state["kernel"] = self.state["kernel"] + jnp.mean(next(iterator))
        self.state["biases"][:] = move(self.state["biases"], jnp.ones(()))


class ModelTrainer(armillary.StandardTrainer):
    """Updates a model of NNX."""

    def __init__(self, _):
        super().__init__(make_data())
        self.model = nnx.Linear(1, 4, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(1e-3), wrt=nnx.Param)

    @property
    def state(self):
        return nnx.to_pure_dict(nnx.state((self.model, self.optimizer)))

    def train_step(self, iterator):
        batch = next(iterator)[:, None]
        gradients = nnx.grad(lambda model: jnp.mean(model(batch)))(self.model)
        self.optimizer.update(self.model, gradients)


class FunctionTrainer:
    """Replaces an attribute in `armillary.function`."""

    def __init__(self, state):
        self.state = state

    @armillary.function
    def _step(self):
        self.state = move(self.state, jnp.ones(()))

    def train(self, num_steps):
        for _ in range(num_steps):
            self._step()


TRAINERS = {
    "pure step": lambda state: armillary.StepTrainer(step, state, make_data()),
    "attribute": Trainer,
    "model": ModelTrainer,
    "function": FunctionTrainer,
}
STATES = {
    "dictionary": make_params,
    "tuple": lambda: (jnp.zeros((4, 4)), jnp.zeros(4)),
    "array": lambda: jnp.zeros((4, 4)),
    "TrainState": make_train_state,
}


def refer_to(trainer):
    """Returns weak references to the arrays of a state, except for numbers."""
    leaves = jax.tree.leaves(trainer.state)
    return [weakref.ref(leaf) for leaf in leaves if leaf.ndim]


def count_held(references):
    """Counts arrays that still take memory."""
    gc.collect()
    arrays = [reference() for reference in references]
    return sum(array is not None and not array.is_deleted() for array in arrays)


@pytest.mark.parametrize("way", TRAINERS)
@pytest.mark.parametrize("kind", STATES)
def test_nothing_holds_the_first_arrays_of_a_state(way, kind):
    trainer = TRAINERS[way](STATES[kind]())
    references = refer_to(trainer)
    assert count_held(references) == len(references) > 0

    trainer.train(2)

    assert count_held(references) == 0


def test_nothing_holds_the_first_arrays_of_a_dictionary_that_steps_write_into():
    trainer = InPlaceTrainer(make_params())
    references = refer_to(trainer)

    trainer.train(2)

    assert count_held(references) == 0


def test_nothing_holds_the_arrays_that_the_user_has_replaced():
    trainer = Trainer(make_params())
    trainer.train(2)
    trainer.state = make_params()
    references = refer_to(trainer)
    trainer.train(2)
    assert count_held(references) == 0
