"""Tests that tracebacks show the user's lines without the library's lines."""

import re
import subprocess
import sys
import traceback
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.errors import CapturedStateError
from tests.patience import patience
from tests.problems import make_strategy

unreached = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
SWITCH = "JAX_TRACEBACK_FILTERING"


@pytest.fixture(autouse=True)
def filtering() -> Iterator[None]:
    """Hides frames, as for users; the tests of the library see all of them."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, use):
        super().__init__([np.ones((4, 3), np.float32)] * 2)
        self.strategy, self.use = strategy, use
        self.step = jnp.zeros((), jnp.int32)

    def train_step(self, iterator):
        self.step = self.step + 1
        self.strategy.run(self.use, args=(next(iterator),))


def make_controller(num_replicas, use):
    trainer = Trainer(make_strategy(num_replicas), use)
    return armillary.Controller(
        trainer=trainer, global_step=lambda: trainer.step, steps_per_loop=1
    )


def multiply(x):
    return x @ jnp.ones((4, 3))


def find_own_frames(error):
    folder = armillary.__file__.removesuffix("__init__.py")
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename.startswith(folder)]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_mistake_in_a_step_shows_the_lines_of_the_user_only(num_replicas):
    with pytest.raises(TypeError, match="contracting dimensions") as caught:
        make_controller(num_replicas, multiply).train(2)

    assert not find_own_frames(caught.value)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names.index("train_step") < names.index("multiply")
    notes = [note for note in caught.value.__notes__ if SWITCH in note]
    assert len(notes) == 1


def test_the_switch_of_jax_shows_all_frames():
    jax.config.update("jax_traceback_filtering", "off")

    with pytest.raises(TypeError, match="contracting dimensions") as caught:
        make_controller(2, multiply).train(2)
    assert len(find_own_frames(caught.value)) > 10
    assert not [n for n in getattr(caught.value, "__notes__", ()) if SWITCH in n]


def test_the_cause_of_an_error_is_shortened_as_well():
    def write(_):
        unreached.bias[...] = unreached.bias[...] + 1

    class Writer(Trainer):
        def train_step(self, iterator):
            write(next(iterator))

    with pytest.raises(CapturedStateError, match="writes 2 variables") as caught:
        Writer(armillary.distribute.DefaultStrategy(), None).train(1)
    assert not find_own_frames(caught.value)
    assert caught.value.__cause__ is not None
    assert not find_own_frames(caught.value.__cause__)


def test_an_error_in_a_prediction_is_shortened_as_well():
    outputs = armillary.predict(multiply, [np.ones((4, 3))])

    with pytest.raises(TypeError, match="contracting dimensions") as caught:
        next(outputs)
    assert not find_own_frames(caught.value)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:2] == ["multiply"]


@pytest.mark.slow
def test_an_unfinished_prediction_ends_with_the_program_without_a_message():
    program = (
        "import armillary, numpy as np\n"
        "outputs = armillary.predict(lambda x: x, [np.ones((4, 3))] * 3)\n"
        "next(outputs)"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=patience(120)
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_message_of_the_library_stands_alone():
    with pytest.raises(ValueError, match="`steps` is 0") as caught:
        make_controller(1, multiply).train(0)
    assert not find_own_frames(caught.value)
    assert not hasattr(caught.value, "__notes__")


def test_an_error_inside_the_library_names_the_setting_that_shows_its_frames():
    def fail():
        raise KeyError("inside")

    with pytest.raises(KeyError) as caught:
        armillary.Controller(
            evaluator=type("Evaluator", (), {"evaluate": lambda *_: fail()})(),
            global_step=lambda: 0,
        ).evaluate()
    assert caught.value.__notes__ == [
        "Armillary has left its own frames out. Set JAX_TRACEBACK_FILTERING=off to see "
        "them."
    ]


@pytest.mark.parametrize(
    ("mistake", "note"),
    [
        (lambda trainer: trainer.loss.reset_states(), r"Write `metric.reset\(\)`"),
        (lambda trainer: trainer.loss.result(), r"Write `metric.compute\(\)`"),
        (lambda trainer: {trainer.loss.name: 0.0}, "Write a name of your own"),
        (lambda trainer: trainer.optimizer.iterations, "Write `optimizer.step`"),
        (
            lambda trainer: trainer.optimizer.apply_gradients([]),
            r"Write `optimizer.update\(model, gradients\)`",
        ),
        (
            lambda trainer: trainer.mean.reset_states(),
            r"`metric.reset_state\(\)` for a metric of Keras",
        ),
        (lambda trainer: trainer.sgd.minimize, r"`optimizer.apply_gradients\(zip"),
    ],
)
@pytest.mark.parametrize("hook", ["train_loop_begin", "train_step", "train_loop_end"])
def test_an_error_about_a_name_of_tensorflow_has_the_line_to_write(mistake, note, hook):
    class Old(armillary.StandardTrainer):
        def __init__(self):
            super().__init__([np.ones((4, 3), np.float32)] * 2)
            self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
            self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
            self.loss, self.mean = nnx.metrics.Average(), keras.metrics.Mean()
            self.sgd = keras.optimizers.SGD()

        def train_step(self, iterator):
            next(iterator)

    setattr(Old, hook, lambda self, *_: mistake(self) and None)
    controller = armillary.Controller(
        trainer=(trainer := Old()),
        global_step=armillary.create_global_step(),
        steps_per_loop=1,
    )
    for train in (controller.train, trainer.train):
        with pytest.raises(AttributeError) as caught:
            train(1)
        shown = [str(caught.value), *getattr(caught.value, "__notes__", ())]
        assert len(re.findall(note, "\n".join(shown))) == 1


@pytest.mark.parametrize(
    ("mistake", "note"),
    [
        (lambda t: t.optimizer.step(), r"Write `optimizer.update\(model, gradients\)`"),
        (lambda t: t.sgd.learning_rate(t.sgd.iterations), "Write `optimizer.learning_"),
    ],
)
@pytest.mark.parametrize("hook", ["train_step", "train_loop_end"])
def test_an_array_that_is_called_gets_a_note(mistake, note, hook):
    class Old(armillary.StandardTrainer):
        def __init__(self):
            super().__init__([np.ones((4, 3), np.float32)] * 2)
            self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
            self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
            self.sgd = keras.optimizers.SGD()

        def train_step(self, iterator):
            next(iterator)

    setattr(Old, hook, lambda self, *_: mistake(self))
    with pytest.raises(TypeError, match="is not callable") as caught:
        Old().train(1)
    assert len(re.findall(note, "\n".join(caught.value.__notes__))) == 1


def test_an_unknown_attribute_gets_no_such_note():
    def step(x):
        return nnx.metrics.Average().no_such_name

    with pytest.raises(AttributeError) as caught:
        make_controller(1, step).train(1)
    assert "write" not in "".join(caught.value.__notes__)


def test_a_tracer_gets_the_note_of_a_step():
    with pytest.raises(AttributeError) as caught:
        make_controller(1, lambda x: x.numpy()).train(1)
    notes = "".join(caught.value.__notes__)
    assert "To print it, write `jax.debug.print(" in notes
    assert "np.asarray" not in notes
