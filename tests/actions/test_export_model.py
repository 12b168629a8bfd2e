"""Tests that models are exported whole, unchanged, and run on JAX alone."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary._process import Process, get_process, set_process
from armillary.actions import ExportFileManager, ExportModel
from tests.distribute.contract import MAKERS
from tests.environment import forget_devices
from tests.patience import patience
from tests.problems import MLP, Classifier, make_digits, make_strategy

IMAGES = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
SPEC = jax.ShapeDtypeStruct((1, 4), jnp.float32)


class Net(nnx.Module):
    """Dropout and batch statistics: what differs between training and use."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, images):
        return self.head(self.dropout(self.norm(self.hidden(images))))


def load(path):
    return jax.export.deserialize(Path(path).read_bytes())


def make(tmp_path, model, args=(SPEC,), **options):
    return ExportModel(
        model, ExportFileManager(tmp_path / "run" / "export"), args=args, **options
    )


def read_all(model):
    return [
        np.array(leaf)
        for leaf in jax.tree.leaves(
            nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))
        )
    ]


def test_an_export_runs_without_the_code_that_trained_it(tmp_path):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    make(tmp_path, model, polymorphic_batch_size=True, platforms=("cpu",))()
    np.save(tmp_path / "images.npy", IMAGES)
    code = (
        "import sys, pathlib, jax, numpy as np\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "data = (folder / 'run' / 'export-0').read_bytes()\n"
        "result = jax.export.deserialize(data).call(np.load(folder / 'images.npy'))\n"
        "np.save(folder / 'result.npy', result)\n"
        "assert not {'armillary', 'flax'} & sys.modules.keys()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patience(120),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    result = np.load(tmp_path / "result.npy")
    np.testing.assert_allclose(result, model(IMAGES), rtol=1e-6)


def make_annotated():
    """Returns a model whose kernel a `ShardedStrategy` divides along two axes."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", "tensor"))
    return nnx.Linear(4, 2, kernel_init=init, rngs=nnx.Rngs(0))


def train_and_export(strategy, name, folder):
    """Trains a step, exports the model, and returns its outputs for `IMAGES`."""

    def step(state, images):
        def loss_fn(state):
            return jnp.mean(nnx.merge(graph, state)(images) ** 2)

        gradients = armillary.all_reduce("mean", jax.grad(loss_fn)(state))
        return jax.tree.map(lambda old, new: old - new, state, gradients), {}

    graph, state = nnx.split(strategy.make(make_annotated))
    images = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")
    source = armillary.data.from_arrays(images, batch_size=8)
    trainer = armillary.StepTrainer(step, state, source, strategy=strategy)
    before = np.array(trainer.state["kernel"][...])
    export = ExportModel(
        lambda images: nnx.merge(graph, trainer.state)(images),
        ExportFileManager(folder / name),
        args=(SPEC,),
        polymorphic_batch_size=True,
    )
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.global_step,
        steps_per_loop=1,
        train_actions=[export],
    )
    controller.train(1)
    kernel = np.array(trainer.state["kernel"][...])
    assert np.any(kernel != before)
    return IMAGES @ kernel + np.array(trainer.state["bias"][...])


LOAD_ALL = """
import pathlib
import sys

sys.modules.update(armillary=None, flax=None)  # An import of them is an error.
import jax
import numpy as np

folder = pathlib.Path(sys.argv[1])
images = np.load(folder / "images.npy")
for path in (folder / "exports").iterdir():
    program = jax.export.deserialize(path.read_bytes())
    assert program.nr_devices == 1
    outputs = [program.call(images[:size])[-1] for size in (1, 2, 3)]
    np.save(folder / "results" / path.name, outputs)
"""


@pytest.mark.slow
def test_an_export_of_each_strategy_runs_on_one_device_without_armillary(tmp_path):
    for name in ("exports", "results"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "images.npy", IMAGES)
    expected = {}
    for name, make_one in MAKERS.items():
        outputs = train_and_export(make_one(), name, tmp_path / "exports")
        expected[name] = outputs

    ended = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patience(120),
        cwd=tmp_path,
        env=forget_devices(),
    )
    assert ended.returncode == 0, ended.stderr
    for name, outputs in expected.items():
        result = np.load(tmp_path / "results" / f"{name}-0.npy")
        np.testing.assert_allclose(result, outputs, rtol=1e-5, err_msg=name)


def test_any_batch_size_if_it_is_asked_for(tmp_path):
    scale = {"w": jnp.arange(4.0)[None]}
    args = ({"x": SPEC, "y": np.zeros((1, 2))}, 2.0)
    export = make(
        tmp_path,
        lambda batch, factor: (batch["x"] * scale["w"] * factor, batch["y"]),
        args=args,
        polymorphic_batch_size=True,
    )
    export()
    (path,) = export.file_manager.managed_files
    for size in (1, 3):
        batch = {"x": IMAGES[:size], "y": np.ones((size, 2), "float32")}
        x, y = load(path).call(batch, 2.0)
        np.testing.assert_allclose(x, IMAGES[:size] * np.arange(4.0) * 2, rtol=1e-6)
        np.testing.assert_array_equal(y, batch["y"])
    fixed = make(tmp_path, lambda x: x * scale["w"])
    fixed()
    with pytest.raises(ValueError, match="shape"):
        load(fixed.file_manager.managed_files[-1]).call(IMAGES)


def test_values_that_the_function_sets_are_set_back_and_no_array_changes(tmp_path):
    model = Net()
    arrays, held = read_all(model), model.head.kernel.get_value()

    def predict(images):
        model.eval()
        model.last_shape = images.shape
        return model(images)

    export = make(tmp_path, predict, polymorphic_batch_size=True)
    export()
    assert not model.dropout.deterministic
    assert not model.norm.use_running_average
    assert not hasattr(model, "last_shape")
    assert model.head.kernel.get_value() is held
    jax.tree.map(np.testing.assert_array_equal, read_all(model), arrays)
    (path,) = export.file_manager.managed_files
    result = load(path).call(IMAGES)
    model.eval()
    np.testing.assert_allclose(result, model(IMAGES), rtol=1e-5)
    model.train()

    def fail(images):
        model.eval()
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        make(tmp_path, fail)()
    assert not model.dropout.deterministic


@pytest.mark.slow
def test_a_model_in_training_mode_is_an_error_that_names_what_it_changes(tmp_path):
    model = Net()
    export = make(tmp_path, model)
    arrays = read_all(model)
    with pytest.raises(ValueError, match=r"(?s)norm/mean.*model\.eval\(\)"):
        export()
    assert export.file_manager.managed_files == []
    jax.tree.map(np.testing.assert_array_equal, read_all(model), arrays)
    model(IMAGES)  # No tracer was left behind.


def test_an_open_batch_and_other_open_sizes_go_together(tmp_path):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    (length,) = jax.export.symbolic_shape("length")
    args = (
        {"mask": jax.ShapeDtypeStruct((1, length), "float32")},
        jax.ShapeDtypeStruct((1, length, 4), "float32"),
    )
    make(
        tmp_path,
        lambda batch, x: model(x) * batch["mask"][..., None],
        args=args,
        polymorphic_batch_size=True,
    )()
    program = load(tmp_path / "run" / "export-0")
    for shape in ((2, 7, 4), (3, 1, 4)):
        x = np.ones(shape, np.float32)
        mask = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape[:2])
        found = program.call({"mask": mask}, x)
        np.testing.assert_allclose(found, model(x) * mask[..., None], rtol=1e-6)


@pytest.mark.parametrize("polymorphic_batch_size", [False, True])
def test_a_model_with_remat_is_exported(polymorphic_batch_size, tmp_path):
    dense = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def predict(images):
        return nnx.remat(lambda dense, images: dense(images))(dense, images)

    export = make(tmp_path, predict, polymorphic_batch_size=polymorphic_batch_size)
    export()

    (path,) = export.file_manager.managed_files
    images = IMAGES if polymorphic_batch_size else IMAGES[:1]
    np.testing.assert_allclose(load(path).call(images), predict(images), rtol=1e-5)


@pytest.mark.slow
def test_mirrored_state_becomes_a_program_for_one_device(tmp_path):
    strategy = make_strategy(2)
    trainer = Classifier(strategy, MLP(nnx.Rngs(0)), optax.sgd(0.1))
    model, step = trainer.model, trainer.optimizer.step
    images = make_digits(3)["image"]

    def predict(images):
        model.eval()
        return model(images)

    manager = ExportFileManager(tmp_path / "export", 2, next_id_fn=step)
    seen = {}

    def note(output):
        model.eval()
        seen[int(step.get_value())] = np.array(model(images))
        model.train()

    controller = armillary.Controller(
        trainer=trainer,
        global_step=step,
        strategy=strategy,
        steps_per_loop=2,
        train_actions=[ExportModel(predict, manager, args=(images,)), note],
    )
    controller.train(steps=6)
    names = [Path(path).name for path in manager.managed_files]
    assert names == ["export-4", "export-6"]
    for path, number in zip(manager.managed_files, (4, 6), strict=True):
        exported = load(path)
        assert exported.nr_devices == 1
        np.testing.assert_allclose(exported.call(images), seen[number], rtol=1e-5)


@pytest.mark.parametrize("platforms", ["cuda", ("tpu", "cuda")])
def test_an_export_for_another_platform(platforms, tmp_path):
    export = make(tmp_path, lambda x: x + 1, platforms=platforms)
    export()
    named = load(export.file_manager.managed_files[0]).platforms
    assert set(named) == ({"cuda"} if platforms == "cuda" else {"tpu", "cuda"})


def test_a_program_for_several_devices_is_an_error(tmp_path):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    export = make(tmp_path, lambda x: jax.lax.with_sharding_constraint(x, sharding))
    with pytest.raises(ValueError, match="a program for 2 devices"):
        export()


def test_only_the_chief_writes(tmp_path):
    before = get_process()
    export = make(tmp_path, nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    try:
        set_process(Process(1, 2))
        export()
        assert not (tmp_path / "run").exists()
        set_process(Process(0, 2))
        export()
    finally:
        set_process(before)
    assert len(export.file_manager.managed_files) == 1


def test_a_crash_leaves_no_half_export(tmp_path, monkeypatch):
    manager = ExportFileManager(tmp_path / "export", 1)
    export = ExportModel(lambda x: x, manager, args=(SPEC,))
    export()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            export()
    assert [path.name for path in tmp_path.iterdir()] == ["export-0"]
    # The files of a killed process are not an export. The next export removes them.
    (tmp_path / ".export.incomplete").write_bytes(b"half")
    assert manager.managed_files == [str(tmp_path / "export-0")]
    export()
    assert [path.name for path in tmp_path.iterdir()] == ["export-1"]


def write(manager):
    path = Path(manager.next_name())
    path.write_text("")
    manager.clean_up()
    return path.name


def list_names(manager):
    return [Path(path).name for path in manager.managed_files]


def test_the_last_files_are_kept_and_others_are_left_alone(tmp_path):
    others = {"export", "export-x", "export-1.txt", "my-export-1"}
    for name in others:
        (tmp_path / name).write_text("")
    (tmp_path / "export-99").mkdir()
    manager = ExportFileManager(tmp_path / "export", max_to_keep=2)
    assert [write(manager) for _ in range(12)][-2:] == ["export-10", "export-11"]
    assert list_names(manager) == ["export-10", "export-11"]
    assert write(ExportFileManager(tmp_path / "export")) == "export-12"
    found = {path.name for path in tmp_path.iterdir()}
    assert others | {"export-99"} <= found


def test_a_run_that_went_back_keeps_what_it_writes(tmp_path):
    steps = iter([100, 200, 50, 200])
    manager = ExportFileManager(tmp_path / "export", 1, next_id_fn=lambda: next(steps))
    kept = []
    for _ in range(4):
        write(manager)
        kept.append(list_names(manager))
    assert kept == [["export-100"], ["export-200"], ["export-50"], ["export-200"]]
