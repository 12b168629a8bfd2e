"""Tests of loops whose begin and end are part of the compiled program."""

import logging
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import armillary
from armillary.data import from_arrays
from armillary.errors import StateStructureError
from armillary.report._run_files import SPEEDS
from armillary.trainer._hook_code import find_effect
from armillary.trainer._loop import Loop
from tests.problems import assert_identical, make_strategy, read_state

NUM_EXAMPLES, BATCH = 60, 4
SCALE = 2.0


def make_data(**options):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_EXAMPLES, 3)).astype(np.float32)
    arrays = {"x": x, "y": x.sum(axis=1)}
    return from_arrays(arrays, batch_size=BATCH, shuffle_seed=0, **options)


class Regression(armillary.StandardTrainer):
    """A linear model, whose hooks reset and compute metrics."""

    def __init__(self, num_replicas=1, data=None, remainder=None, **options):
        strategy = make_strategy(num_replicas)
        with strategy.scope():
            data = make_data(repeat=True) if data is None else data
            input_options = armillary.data.InputOptions(remainder=remainder)
            data = strategy.distribute_dataset(data, input_options)
            super().__init__(data, armillary.StandardTrainerOptions(**options))
            self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
            self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)
            self.loss = nnx.metrics.Average("loss")
        self.strategy, self.factor = strategy, 1.0
        self.num_loops = jnp.zeros((), jnp.int32)

    def train_loop_begin(self):
        self.loss.reset()
        self.num_loops = self.num_loops + 1

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(model):
                losses = (model(batch["x"])[:, 0] - batch["y"]) ** 2
                return armillary.compute_average_loss(losses), losses

            gradients, losses = nnx.grad(loss_fn, has_aux=True)(self.model)
            gradients = armillary.all_reduce("sum", gradients)
            self.optimizer.update(self.model, gradients)
            self.loss.update(loss=losses)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self):
        return {
            "loss": self.factor * self.loss.compute(),
            "nested": {"z": self.num_loops, "count": self.loss.count[...]},
        }


class Outputs:
    """The values that a controller reports about its loops."""

    def __init__(self):
        self.steps, self.outputs = [], []

    def write_summaries(self, output, step):
        self.steps.append(step)
        values = {k: v for k, v in output.items() if k not in SPEEDS}
        self.outputs.append(jax.tree.map(float, values))

    def flush(self):
        pass


@pytest.fixture
def calls(monkeypatch):
    """The number of loops that each call of `run_loops` has run."""
    found, run_loops = [], Loop.run_loops

    def counted(self, num_steps, num_loops):
        found.append(num_loops)
        return run_loops(self, num_steps, num_loops)

    monkeypatch.setattr(Loop, "run_loops", counted)
    return found


def train(trainer, steps_per_loop, steps, **options):
    written = Outputs()
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=trainer.strategy,
        steps_per_loop=steps_per_loop,
        summary_manager=written,
        **options,
    )
    controller.train(steps)
    return written


def assert_equal_runs(first, second):
    assert_identical(read_state(first[0]), read_state(second[0]))
    assert first[1].steps == second[1].steps
    assert first[1].outputs == second[1].outputs


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)
@given(
    num_replicas=st.sampled_from([1, 4]),
    steps_per_loop=st.integers(1, 12),
    steps_per_chunk=st.integers(1, 20),
    steps=st.integers(1, 40),
)
def test_loops_in_one_program_equal_loops_with_python_between(
    num_replicas, steps_per_loop, steps_per_chunk, steps
):
    runs = []
    for compile_hooks in (False, True):
        options = {"compile_hooks": compile_hooks, "steps_per_chunk": steps_per_chunk}
        trainer = Regression(num_replicas, make_data(), **options)
        end = steps if steps <= 15 else -1  # The data ends there.
        runs.append((trainer, train(trainer, steps_per_loop, end)))

    assert_equal_runs(*runs)
    assert runs[1][1].steps[-1] == min(steps, NUM_EXAMPLES // BATCH)


@pytest.mark.slow
def test_uneven_batches_of_a_loop_are_one_loop():
    runs = []
    for compile_hooks in (False, None):
        arrays = {"x": np.ones((22, 3), np.float32), "y": np.arange(22.0)}
        data = from_arrays(arrays, batch_size=BATCH)
        trainer = Regression(4, data, "exact", compile_hooks=compile_hooks)
        runs.append((trainer, train(trainer, 4, -1)))

    assert_equal_runs(*runs)
    assert runs[1][1].steps == [4, 6]


@pytest.mark.slow
def test_a_plain_value_that_an_end_reads_is_watched_and_may_break_it():
    trainer = Regression()
    assert trainer.train(5)["loss"] > 0
    trainer.factor = 0.0
    assert trainer.train(5)["loss"] == 0

    trainer.factor = "twice"
    with pytest.raises(TypeError) as caught:
        trainer.train(5)
    assert caught.traceback[-1].name != "_find_state"  # It was Python again.
    assert trainer.optimizer.step[...] == 15

    trainer.factor = 1.0
    assert trainer.train(5)["nested"]["count"] == 5 * BATCH


@pytest.mark.slow
def test_loops_end_where_something_is_due(tmp_path, calls):
    saved = []
    for compile_hooks in (False, None):
        trainer = Regression(compile_hooks=compile_hooks)
        manager = armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer),
            tmp_path / str(compile_hooks),
            checkpoint_interval=6,
            max_to_keep=None,
        )
        train(trainer, 2, 21, checkpoint_manager=manager)
        saved.append([path.rsplit("_", 1)[1] for path in manager.checkpoints])

    assert saved[0] == saved[1]
    assert max(calls) == 3


def test_actions_see_the_state_of_their_loop(calls):
    seen, trainer = [], Regression()
    action = lambda output: seen.append(int(trainer.optimizer.step[...]))  # noqa: E731
    train(trainer, 5, 20, train_actions=[action])

    assert seen == [5, 10, 15, 20]
    assert calls == [1, 1, 1, 1]


class Printing(Regression):
    def train_loop_end(self):
        sys.stdout.write("end")
        return super().train_loop_end()


@pytest.mark.parametrize(("compile_hooks", "count"), [(None, 4), (True, 1)])
def test_a_hook_with_an_effect_runs_once_if_declared_so(
    compile_hooks, count, capsys, calls
):
    train(Printing(compile_hooks=compile_hooks), 5, 20)

    assert capsys.readouterr().out.count("end") == count
    assert sum(calls) == (4 if compile_hooks else 0)


class Counting(Regression):
    num_begun = 0

    def train_loop_begin(self):
        self.num_begun += 1


class Fetching(Regression):
    def train_loop_end(self):
        return {"loss": float(self.loss.compute())}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (
            Counting,
            StateStructureError,
            r"`train_loop_begin` changes plain values(.|\n)*num_begun",
        ),
        (
            Fetching,
            jax.errors.ConcretizationTypeError,
            "`compile_hooks=True` makes `train_loop_begin` and `train_loop_end` part of"
            " the compiled program. Leave it out if they need Python.",
        ),
    ],
)
def test_a_hook_that_needs_python_is_an_error_if_declared_free_of_it(
    kind, error, message
):
    with pytest.raises(error) as caught:
        kind(compile_hooks=True).train(2)

    notes = getattr(caught.value, "__notes__", [])
    assert re.search(message, "\n".join([str(caught.value), *notes]))


@pytest.mark.parametrize("kind", [Counting, Fetching])
def test_a_hook_that_needs_python_has_it(kind, calls):
    trainer = kind()
    trainer.train(2)
    trainer.train(2)

    assert not calls
    assert kind is not Counting or trainer.num_begun == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"on_non_finite": "raise"},
        {"check_replicas_every": 5},
        {"compile_loop": False},
        {"compile_hooks": False},
    ],
    ids=str,
)
def test_hooks_stay_in_python_where_an_option_needs_it(options, calls):
    trainer = Regression(**options)
    trainer.train(2)

    assert trainer.num_loops == 1
    assert not calls


class Own(nnx.Metric):
    def __init__(self):
        self.count = nnx.metrics.MetricState(jnp.zeros(()))

    def reset(self):
        sys.stdout.write("reset")

    def compute(self):
        return 0.0


class Property(Regression):
    @property
    def shown(self):
        return 1.0


PURE = [
    '"""Does nothing."""\npass',
    "self.loss.reset()\nself.loss.total[...] = jnp.zeros(())",
    "loss = self.loss.compute()\nreturn {'loss': loss, 'twice': 2 * loss}",
    "self.num_loops = jnp.zeros_like(self.num_loops)\nself.num_loops += 1",
    "return {'step': self.optimizer.step[...], **self.loss.compute()}",
    "return {'factor': -self.factor, 'list': [1, 2], 'none': None}",
    "self.mean = jnp.ones(())\nself.mean = jnp.zeros_like(self.mean)",
]
NOT_PURE = [
    "self.num_begun = 1",
    "self.loss.extra = 1",
    # A program may round what is carried on otherwise.
    "self.mean = 0.9 * self.mean",
    "self.mean += self.mean",
    "mean = 0.9 * self.mean\nself.mean = mean",
    "self.mean = jnp.sum(self.mean)",
    "self.loss.total[...] = self.loss.total[...] * 0.9",
    "self.model.train()",
    "self.own.reset()",
    "return {'shown': self.shown}",
    "return {'loss': float(self.loss.compute())}",
    "return {'random': np.random.rand()}",
    "return {'rate': SCALE}",
    "return {'line': unknown.lineno}",
    "jnp = time\nreturn jnp.zeros()",
    "jnp.save('x', self.num_loops)",
    "for x in [1]: pass",
    "if self.factor: self.loss.reset()",
    "return {'x': [print(i) for i in range(2)]}",
    "return {f'{print(1)}': 1}",
    "return (yield)",
    "self.model.kernel[0] = 1",
    "self = 1",
    "return {'n': (n := print(1))}",
    "self.loss.reset(*[print(1)])",
]


def read(tmp_path, body):
    path = tmp_path / "hooks.py"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    path.write_text(f"def train_loop_end(self):\n{lines}\n")
    names = {"jnp": jnp, "np": np, "time": time, "SCALE": SCALE, "logging": logging}
    exec(compile(path.read_text(), str(path), "exec"), names)
    kind = type("Written", (Property,), {"train_loop_end": names["train_loop_end"]})
    trainer = kind()
    trainer.own, trainer.mean = Own(), jnp.zeros(())
    return find_effect(trainer, "train_loop_end")


@pytest.mark.parametrize("body", PURE)
def test_code_that_computes_needs_no_python(tmp_path, body):
    assert read(tmp_path, body) is None


@pytest.mark.parametrize("body", NOT_PURE)
def test_code_that_may_do_more_needs_python(tmp_path, body):
    assert read(tmp_path, body) is not None


def test_a_hook_that_is_no_plain_method_needs_python():
    trainer = Regression()
    trainer.train_loop_end = dict
    assert "not a plain method" in str(find_effect(trainer, "train_loop_end"))

    names = {}
    exec("def train_loop_end(self): return {}", names)
    kind = type("Written", (Regression,), dict(train_loop_end=names["train_loop_end"]))
    assert find_effect(kind(), "train_loop_end") == "its code cannot be read"


def test_the_text_of_a_file_that_was_edited_is_not_what_runs(tmp_path):
    path = tmp_path / "hooks.py"
    text = "def train_loop_end(self):\n    print('a loop has ended')\n"
    names = {}
    exec(compile(text, str(path), "exec"), names)
    path.write_text("def train_loop_end(self):\n    return {}\n")
    kind = type("Written", (Property,), {"train_loop_end": names["train_loop_end"]})

    assert "file has changed" in str(find_effect(kind(), "train_loop_end"))


def test_a_trainer_that_is_written_by_hand_starts_loops_of_its_own():
    class Pending(armillary.trainer.PendingLoops):
        may_overlap = True

        def __init__(self, counts):
            self.num_steps, self.counts = sum(counts), counts

        def fetch(self) -> list[armillary.typing.Output]:
            return [{"steps": count} for count in self.counts]

    class Trainer(armillary.AbstractTrainer):
        def __init__(self):
            self.step, self.lengths = 0, []

        def train(self, num_steps):
            raise AssertionError("the controller calls `start`")

        def prepare(self, steps_per_loop):
            self.lengths.append(steps_per_loop)

        def start(self, num_steps, num_loops):
            self.step += num_steps * num_loops
            return Pending([num_steps] * num_loops)

    trainer, written = Trainer(), Outputs()
    armillary.Controller(
        trainer=trainer,
        global_step=lambda: trainer.step,
        steps_per_loop=3,
        summary_manager=written,
    ).train(40)

    assert written.steps == [*range(3, 40, 3), 40]
    assert [output["steps"] for output in written.outputs] == [3] * 13 + [1]
    assert trainer.lengths == [3]
