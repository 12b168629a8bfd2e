"""Tests of TensorFlow's spellings, old and new, under every strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary import MirroredStrategy
from armillary.distribute import Strategy
from tests.distribute.contract import strategy as strategy

ROWS = np.arange(16, dtype=np.float32)
SPELLINGS = {
    "experimental_distribute_dataset": "distribute_dataset",
    "experimental_distribute_datasets_from_function": (
        "distribute_datasets_from_function"
    ),
    "experimental_distribute_values_from_function": "distribute_values_from_function",
    "experimental_local_results": "local_results",
    "experimental_make_numpy_dataset": "make_numpy_dataset",
    "experimental_run_v2": "run",
    "make_experimental_numpy_dataset": "make_numpy_dataset",
    "unwrap": "local_results",
}


def add_up(strategy, batch):
    total = strategy.run(lambda x: jnp.sum(x), args=(batch,))
    return float(strategy.reduce("sum", total))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_spelling_is_the_same_method(spelling):
    assert getattr(Strategy, spelling) is getattr(Strategy, SPELLINGS[spelling])


def test_a_subclass_overrides_all_spellings_of_a_method():
    class Renamed(MirroredStrategy):
        def local_results(self, value):
            return "its own", value

    class Derived(Renamed):
        pass

    for kind in (Renamed, Derived):
        strategy = kind(jax.devices()[:1])
        assert strategy.experimental_local_results(1) == ("its own", 1)
        assert strategy.unwrap(1) == ("its own", 1)
    assert MirroredStrategy.experimental_local_results is Strategy.local_results


def test_arrays_become_a_distributed_dataset(strategy):
    dataset = strategy.make_experimental_numpy_dataset(
        {"x": ROWS}, batch_size=8, shuffle_seed=0
    )
    batches = list(strategy.experimental_distribute_dataset(dataset))
    sums = [add_up(strategy, batch["x"]) for batch in batches]
    assert len(sums) == 2 and sum(sums) == ROWS.sum()


def test_an_iterator_is_initialized_for_each_epoch(strategy):
    dataset = strategy.make_numpy_dataset(ROWS, batch_size=8)
    iterator = strategy.make_dataset_iterator(dataset)
    for _ in range(2):
        iterator.initialize()
        sums = []
        for _ in range(2):
            total = strategy.experimental_run(lambda x: jnp.sum(x), iterator)
            sums.append(float(strategy.reduce("sum", total)))
        assert sums == [ROWS[:8].sum(), ROWS[8:].sum()]
    with pytest.raises(StopIteration):
        strategy.experimental_run(lambda x: x, iterator)


def test_initialize_leaves_a_pass_that_was_begun():
    strategy = MirroredStrategy(jax.devices()[:2])
    dataset = strategy.make_numpy_dataset(ROWS, batch_size=8, shuffle_seed=0)
    distributed = strategy.distribute_dataset(dataset)
    expected = [np.ravel(batch.stacked) for _ in range(2) for batch in distributed]

    iterator = strategy.make_dataset_iterator(dataset)
    iterator.initialize()  # Nothing was read, so this is the first pass.
    first = np.ravel(iterator.get_next().stacked)
    iterator.initialize()
    second = np.ravel(iterator.get_next().stacked)
    np.testing.assert_array_equal(first, expected[0])
    np.testing.assert_array_equal(second, expected[2])


def test_a_function_of_the_input_context_gives_per_replica_batches(strategy):
    def input_fn(context):
        size = context.get_per_replica_batch_size(8)
        return strategy.make_numpy_dataset(ROWS[:8], batch_size=size)

    iterator = strategy.make_input_fn_iterator(input_fn)
    assert add_up(strategy, iterator.get_next()) == ROWS[:8].sum()


def test_the_end_of_the_data_is_an_optional_without_a_value(strategy):
    iterator = iter(strategy.distribute_dataset([ROWS[:8], ROWS[8:]]))
    sums = []
    batch = iterator.get_next_as_optional()
    while batch.has_value():
        sums.append(add_up(strategy, batch.get_value()))
        batch = iterator.get_next_as_optional()
    assert sums == [ROWS[:8].sum(), ROWS[8:].sum()]
    with pytest.raises(ValueError, match=r"`get_value\(\)`.*`if batch\.has_value"):
        batch.get_value()


def test_experimental_run_needs_no_iterator_but_takes_no_dataset(strategy):
    assert float(strategy.unwrap(strategy.experimental_run(lambda: jnp.ones(())))[0])
    dataset = strategy.distribute_dataset([ROWS])
    with pytest.raises(TypeError, match=r"`input_iterator` is .*iter\(dataset\)"):
        strategy.experimental_run(lambda x: x, dataset)


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy):
        dataset = strategy.make_numpy_dataset(ROWS, batch_size=8)
        super().__init__(strategy.distribute_dataset(dataset))
        self.strategy = strategy
        self.total = jnp.zeros(())

    def train_step(self, iterator):
        def step(batch):
            self.total += armillary.all_reduce("sum", jnp.sum(batch))

        self.strategy.experimental_run(step, iterator)


def test_experimental_run_works_in_a_compiled_step():
    trainer = Trainer(MirroredStrategy(jax.devices()[:4]))
    trainer.train(2)
    assert float(trainer.total) == ROWS.sum()
