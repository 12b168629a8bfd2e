"""Tests that a name of another library is an error with the line to write."""

import copy
import inspect
import pickle

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.trainer import AbstractTrainer


def test_a_package_answers_and_stays_a_plain_module():
    with pytest.raises(AttributeError) as caught:
        _ = armillary.cluster.CollectiveCommunication
    assert "`armillary.cluster.CommunicationImplementation`" in str(caught.value)
    assert caught.value.name == "CollectiveCommunication"
    assert not hasattr(armillary.cluster, "CollectiveCommunication")
    assert getattr(armillary.cluster, "CollectiveCommunication", 3) == 3
    assert "CollectiveCommunication" not in dir(armillary.cluster)
    assert inspect.getmembers(armillary.cluster, inspect.isclass)


def test_an_import_is_answered_too():
    with pytest.raises(ImportError, match=r"'get_value' from 'armillary.*np\.asarray"):
        exec("from armillary.utils import get_value")
    with pytest.raises(
        ImportError, match=r"import name 'nothing' from 'armillary.utils'"
    ):
        exec("from armillary.utils import nothing")
    names = {}
    exec("from armillary.utils import *", names)
    assert names["SummaryManager"] is armillary.summary.SummaryManager


def test_an_unknown_name_is_python_s_own_error():
    with pytest.raises(AttributeError) as caught:
        _ = armillary.data.from_array
    assert str(caught.value) == "module 'armillary.data' has no attribute 'from_array'"
    # Python adds the nearest name to the traceback.
    assert caught.value.obj is armillary.data
    with pytest.raises(AttributeError, match=r"has no attribute 'runs'$"):
        _ = armillary.get_strategy().runs


def test_an_object_answers_and_stays_a_plain_object():
    strategy = armillary.OneDeviceStrategy("cpu:0")
    with pytest.raises(AttributeError, match=r"no attribute 'group'\. .*strategy\.run"):
        _ = strategy.group
    assert not hasattr(strategy, "group")
    assert "group" not in dir(strategy)
    context = armillary.InputContext(2, 0, 4)
    assert pickle.loads(pickle.dumps(context)) == copy.deepcopy(context) == context


class Broken(AbstractTrainer):
    @property
    def fit(self):
        return self.missing.value

    def train(self, num_steps):
        raise NotImplementedError


def test_the_error_of_a_property_is_not_hidden():
    with pytest.raises(
        AttributeError, match=r"'Broken' object has no attribute 'missing"
    ):
        _ = Broken().fit


class Fallback:
    def __getattr__(self, name):
        if name.startswith("virtual_"):
            return name
        raise AttributeError(name)


class Both(AbstractTrainer, Fallback):
    def train(self, num_steps):
        raise NotImplementedError


def test_another_base_class_still_finds_its_attributes():
    assert Both().virtual_number == "virtual_number"


class Trainer(armillary.StandardTrainer):
    def __init__(self, begin=None, step=None):
        batches = np.ones((8, 2), np.float32)
        super().__init__(armillary.data.from_arrays(batches, batch_size=4))
        self.model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
        self.loss = nnx.metrics.Average("loss")
        self.begin = begin or (lambda self: None)
        self.step = step or (lambda self, loss: None)

    def train_loop_begin(self):
        self.begin(self)

    def train_step(self, iterator):
        self.step(self, jnp.sum(self.model(next(iterator))))


@pytest.mark.parametrize(
    "code",
    [
        {"step": lambda self, loss: self.log("loss", loss)},
        {"begin": lambda self: self.log_dict({})},
    ],
)
def test_a_log_of_lightning_names_the_metric_to_return(code):
    with pytest.raises(AttributeError, match=r"`train_loop_end`: `return \{") as caught:
        Trainer(**code).train(1)
    assert "update(values=loss)" in str(caught.value)
    assert not hasattr(Trainer(), "log")


def test_a_global_step_that_a_trainer_lacks_names_the_counters():
    with pytest.raises(AttributeError, match=r"`trainer\.optimizer\.step`"):
        _ = Trainer().global_step


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (
            {"begin": lambda self: self.loss.reset_states()},
            "`metric.reset()`",
        ),
        (
            {"begin": lambda self: self.optimizer.iterations},
            "`optimizer.step`",
        ),
        (
            {"step": lambda self, loss: self.optimizer.minimize(loss)},
            "`loss, gradients = armillary.value_and_grad(loss_fn, variables)`",
        ),
        (
            {"step": lambda self, loss: self.optimizer.apply_gradients([])},
            "`optimizer.update(model, gradients)`",
        ),
        (
            {"step": lambda self, loss: loss.backward()},
            "`loss, gradients = armillary.value_and_grad(loss_fn, variables)`",
        ),
        (
            {"step": lambda self, loss: self.model.bias.assign(loss)},
            "`variable[...] = x`",
        ),
    ],
    ids=["reset_states", "iterations", "minimize", "apply", "backward", "assign"],
)
def test_a_name_that_flax_or_jax_lacks_gets_a_note(code, line):
    with pytest.raises(AttributeError) as caught:
        Trainer(**code).train(1)
    [note] = [note for note in caught.value.__notes__ if line in note]
    assert note.startswith("Write ")
