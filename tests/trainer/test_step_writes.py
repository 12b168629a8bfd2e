"""What a step writes is what such a step is for, or it is told."""

import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.errors import StateStructureError
from tests.problems import MLP, make_digits, make_strategy


class Evaluator(armillary.StandardEvaluator):
    def __init__(self, model, num_replicas=None):
        super().__init__(armillary.data.from_arrays(make_digits(8), batch_size=4))
        self.strategy = armillary.DefaultStrategy()
        if num_replicas is not None:
            self.strategy = make_strategy(num_replicas)
        self.model, self.accuracy = model, nnx.metrics.Accuracy()

    def eval_step(self, iterator):
        def step_fn(batch):
            logits = self.model(batch["image"])
            self.accuracy.update(logits=logits, labels=batch["label"])

        self.strategy.run(step_fn, args=(next(iterator),))


@pytest.mark.parametrize("num_replicas", [None, 2])
def test_an_evaluation_that_changes_batch_statistics_is_an_error(num_replicas):
    model = MLP(nnx.Rngs(0))
    before = np.array(model.norm.mean[...])

    with pytest.raises(
        StateStructureError,
        match=r"`eval_step` changes 2 arrays of a model, which an evaluation leaves as "
        r"it is:\n  model/norm/mean\n  model/norm/var\nEvaluate a view of it.*"
        r"`self.model = nnx.view\(model, use_running_average=True\)`",
    ):
        Evaluator(model, num_replicas).evaluate(-1)
    np.testing.assert_array_equal(model.norm.mean[...], before)


def test_an_evaluation_that_trains_is_an_error():
    class Tuning(Evaluator):
        def eval_step(self, iterator):
            next(iterator)
            self.model.bias[...] += 1

    with pytest.raises(StateStructureError, match=r"changes 1 array of.*\n +model/b"):
        Tuning(nnx.Linear(2, 3, rngs=nnx.Rngs(0))).evaluate(1)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [None, 2])
def test_dropout_in_an_evaluation_is_a_warning(num_replicas, caplog):
    model = nnx.view(MLP(nnx.Rngs(0)), use_running_average=True)

    Evaluator(model, num_replicas).evaluate(-1)

    (record,) = caplog.records
    assert record.getMessage() == (
        "`eval_step` draws random numbers for dropout, so that its results are those "
        "of a model in training mode:\n  model/dropout/rngs/count\nEvaluate a view of "
        "it, which shares its variables: `self.model = nnx.view(model, "
        "deterministic=True)`."
    )


def test_other_random_numbers_in_an_evaluation_are_meant(caplog):
    class Sampling(Evaluator):
        def eval_step(self, iterator):
            next(iterator)
            self.model.normal((2,))

    Sampling(nnx.Rngs(0)).evaluate(-1)
    assert not caplog.records
