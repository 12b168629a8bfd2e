"""Tests of `leave_out`: frozen arrays of which a checkpoint has only digests."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import armillary
from armillary.checkpoint import _digests
from armillary.checkpoint._arrays import read_arrays
from armillary.checkpoint._checksums import CHECKSUM_FILE, write_checksums
from armillary.checkpoint._content import MANIFEST
from armillary.checkpoint._digests import compute_digests
from armillary.checkpoint._folder import HEADER
from armillary.errors import CheckpointError, CheckpointMismatchError
from tests.command import run_command
from tests.stored_arrays import list_stored_arrays


def make_program(seed=0, head=0.0):
    """Returns an object with a frozen base and a trained head."""
    rng = np.random.default_rng(seed)
    base = {
        "kernel": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32),
        "bias": jnp.asarray(rng.normal(size=64), jnp.bfloat16),
    }
    return SimpleNamespace(base=base, head=jnp.full(4, head))


def make_checkpoint(program, leave_out="run/base"):
    return armillary.Checkpoint(run=program, leave_out=leave_out)


@pytest.fixture
def saved(tmp_path):
    """The path of a checkpoint whose base is left out."""
    return make_checkpoint(make_program(head=3.0)).write(tmp_path / "saved")


def digest_of(value):
    return compute_digests({"value": value})["value"]


def change_file(path: str, name: str, change: Callable[[dict], None]) -> None:
    """Changes a description of a checkpoint, and its checksum."""
    file = Path(path) / name
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    (Path(path) / CHECKSUM_FILE).unlink()
    write_checksums(epath.Path(path))


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "uint4", "int32", "float8_e4m3", "float16", "bfloat16"),
        *("float32", "complex64"),
    ],
)
def test_one_changed_element_changes_the_digest(dtype):
    values = jnp.arange(12).reshape(3, 4).astype(dtype)
    other = values.at[1, 2].set(jnp.asarray(0, dtype))
    assert digest_of(values) == digest_of(values + jnp.zeros_like(values))
    assert digest_of(values) != digest_of(other)
    assert len(digest_of(values)) == 16


def test_two_exchanged_elements_change_the_digest():
    values = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    assert digest_of(values) != digest_of(values.T)
    assert digest_of(values) != digest_of(values[::-1])


def test_a_digest_does_not_depend_on_the_devices():
    values = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    expected = digest_of(values)
    assert digest_of(jnp.asarray(values)) == expected
    for spec in (("a", "b"), (None, ("a", "b")), ()):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        assert digest_of(jax.device_put(values, sharding)) == expected
    host = NamedSharding(mesh, PartitionSpec("a"), memory_kind="pinned_host")
    assert digest_of(jax.device_put(values, host)) == expected


def test_arrays_in_host_memory_are_copied_to_the_devices_one_at_a_time(monkeypatch):
    events = []
    start = _digests._start
    wait = jax.block_until_ready
    monkeypatch.setattr(
        _digests, "_start", lambda leaf: [events.append("start"), start(leaf)][1]
    )
    monkeypatch.setattr(
        jax, "block_until_ready", lambda sums: [events.append("wait"), wait(sums)][1]
    )
    values = jnp.arange(12.0).reshape(3, 4)
    host = jax.device_put(values, values.sharding.with_memory_kind("pinned_host"))
    digests = compute_digests({"a": host, "b": host, "c": values, "d": values})
    assert set(digests.values()) == {digest_of(values)}
    assert events[:6] == ["start", "wait", "start", "wait", "start", "start"]


def test_a_digest_copies_and_gathers_no_array():
    mesh = Mesh(np.array(jax.devices()[:4]), "x")
    for spec in (PartitionSpec(), PartitionSpec(None, "x"), PartitionSpec("x")):
        sharding = NamedSharding(mesh, spec)
        array = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)
        memory = _digests._sum_up.lower(array).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 1000


def test_scalars_and_arrays_without_elements_have_digests():
    assert digest_of(jnp.float32(3)) != digest_of(jnp.float32(4))
    assert digest_of(jnp.zeros((0, 3))) == digest_of(jnp.zeros((2, 0)))


def test_random_keys_have_digests():
    assert digest_of(jax.random.key(1)) == digest_of(jax.random.key(1))
    assert digest_of(jax.random.key(1)) != digest_of(jax.random.key(2))


def test_a_checkpoint_has_no_values_of_what_is_left_out(saved, capsys):
    assert list_stored_arrays(saved) == {"run/head"}

    assert run_command(["checkpoint", "show", saved]) == 0
    printed = capsys.readouterr().out
    (head,) = [line for line in printed.splitlines() if "run/head" in line]
    (kernel,) = [line for line in printed.splitlines() if "run/base/kernel" in line]
    assert "left out, with digest" in printed
    assert digest_of(make_program().base["kernel"]) in kernel
    assert head.split("│")[4].strip() == ""


def test_an_equal_base_is_accepted_and_stays_the_same_array(saved):
    program = make_program()
    kernel = program.base["kernel"]
    report = make_checkpoint(program).read(saved)
    assert program.base["kernel"] is kernel
    np.testing.assert_array_equal(program.head, np.full(4, 3.0))
    assert set(report.restored) == {"run/base/bias", "run/base/kernel", "run/head"}
    assert not report.kept
    assert not report.unused


def test_a_program_that_leaves_nothing_out_needs_the_base_too(saved):
    program = make_program()
    armillary.Checkpoint(run=program).read(saved)
    np.testing.assert_array_equal(program.head, np.full(4, 3.0))
    with pytest.raises(CheckpointMismatchError, match="left out at the save"):
        armillary.Checkpoint(run=make_program(seed=1)).read(saved)


@pytest.mark.parametrize("leave_out", ["run/base", None])
def test_a_wrong_base_is_refused_by_name_and_nothing_changes(saved, leave_out):
    program = make_program()
    program.base["kernel"] = program.base["kernel"].at[5, 7].add(1)
    checkpoint = make_checkpoint(program, leave_out)

    with pytest.raises(CheckpointMismatchError) as error:
        checkpoint.read(saved)

    assert "run/base/kernel" in str(error.value)
    assert digest_of(program.base["kernel"]) in str(error.value)
    assert "run/base/bias" not in str(error.value)
    assert "Load the values that the saved run began with" in str(error.value)
    np.testing.assert_array_equal(program.head, np.zeros(4))


def test_a_release_without_digests_refuses_the_missing_arrays_by_name(saved):
    # It reads only the part `leaves` of the manifest.
    change_file(saved, MANIFEST, lambda manifest: manifest.pop("left_out"))
    program = make_program()
    kernel = program.base["kernel"]
    with pytest.raises(CheckpointMismatchError) as error:
        armillary.Checkpoint(run=program).read(saved)
    assert "+ run/base/kernel: float32 (64, 64)  only in the pro" in str(error.value)
    assert "`may_differ='run/base'`" in str(error.value)

    report = armillary.Checkpoint(run=program).read(saved, may_differ="run/base")
    assert program.base["kernel"] is kernel
    assert program.head[0] == 3
    assert set(report.kept) == {"run/base/bias", "run/base/kernel"}


def test_digests_among_the_other_arrays_are_read_too(saved):
    # As 0.4.0.dev0 had them for a time.
    def join(manifest: dict) -> None:
        manifest["leaves"] |= manifest.pop("left_out")

    change_file(saved, MANIFEST, join)
    make_checkpoint(make_program()).read(saved)
    with pytest.raises(CheckpointMismatchError, match="run/base/kernel"):
        make_checkpoint(make_program(seed=1)).read(saved)


def test_a_folder_of_another_format_is_not_read(saved):
    change_file(saved, HEADER, lambda header: header.update(version=9))
    program = make_program()
    with pytest.raises(CheckpointError, match="has the format 9, and this release re"):
        make_checkpoint(program).read(saved)
    assert program.head[0] == 0


def test_an_array_without_values_is_never_read_as_a_number(saved):
    sharding = jnp.zeros(1).sharding
    with pytest.raises(LookupError, match="it has no values of run/base/kernel"):
        read_arrays(epath.Path(saved), {"run/head": sharding, "run/base/kernel": None})


def test_parts_can_be_chosen_as_usual(saved):
    program = make_program(seed=1)
    checkpoint = make_checkpoint(program)
    checkpoint.read(saved, only="run/head")
    assert program.head[0] == 3

    program.head = jnp.zeros(4)
    report = checkpoint.read(saved, may_differ="run/base")
    assert program.head[0] == 3
    assert set(report.kept) == {"run/base/bias", "run/base/kernel"}
    assert "with digest" in report.differences[0]


def test_the_path_of_a_moved_object_is_in_the_message(saved):
    program = make_program()
    with pytest.raises(CheckpointMismatchError, match=r"run=\{'base': base\}"):
        armillary.Checkpoint(base=program.base).read(saved)
    checkpoint = armillary.Checkpoint(run={"base": program.base, "head": program.head})
    checkpoint.read(saved, only="run/base")


def test_an_array_that_a_trained_part_shares_is_refused_at_the_save(tmp_path):
    shared = nnx.Param(jnp.zeros(3))
    program = SimpleNamespace(
        teacher=[shared], student=[shared, nnx.Param(jnp.ones(2))]
    )
    checkpoint = armillary.Checkpoint(run=program, leave_out=program.teacher)
    checkpoint.write(tmp_path / "before")
    program.student[0][...] += 1
    with pytest.raises(
        CheckpointError, match=r"1 array .* changed(.|\n)*run/teacher/0"
    ):
        checkpoint.write(tmp_path / "after")
    assert not (tmp_path / "after").exists()


def test_an_array_with_two_places_is_saved_from_the_trained_one(tmp_path):
    program = make_program()
    program.head = program.base["kernel"]
    checkpoint = make_checkpoint(program)
    program.head = program.head + 1
    path = checkpoint.write(tmp_path / "saved")
    other = make_program()
    other.head = jnp.zeros((64, 64))
    make_checkpoint(other).read(path)
    np.testing.assert_array_equal(other.head, program.head)


def test_arrays_that_change_are_refused_and_equal_ones_are_not(tmp_path):
    program = make_program()
    checkpoint = make_checkpoint(program)
    kernel = program.base["kernel"]
    program.base["kernel"] = kernel + 1
    with pytest.raises(CheckpointError, match="run/base/kernel"):
        checkpoint.save(tmp_path / "ckpt")
    program.base["kernel"] = kernel.copy()
    checkpoint.save(tmp_path / "ckpt")


def test_a_numpy_array_that_changes_in_place_is_refused(tmp_path):
    frozen = nnx.Param(np.arange(3.0))
    checkpoint = armillary.Checkpoint(
        frozen=frozen, head=nnx.Param(jnp.zeros(1)), leave_out=frozen
    )
    frozen.get_value()[1] = 7
    with pytest.raises(CheckpointError, match="frozen"):
        checkpoint.write(tmp_path / "saved")


def test_a_digest_is_computed_once_for_each_array(tmp_path, monkeypatch):
    computed = []
    start = _digests._start

    def spy(leaf):
        computed.append(leaf.shape)
        return start(leaf)

    monkeypatch.setattr(_digests, "_start", spy)
    program = make_program()
    checkpoint = make_checkpoint(program)
    assert len(computed) == 2
    for number in range(3):
        program.head = program.head + 1
        checkpoint.write(tmp_path / f"ckpt_{number}")
    checkpoint.read(tmp_path / "ckpt_2")
    assert len(computed) == 2
    # A strategy places the arrays once.
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), PartitionSpec("x"))
    program.base["kernel"] = jax.device_put(program.base["kernel"], sharding)
    checkpoint.save(tmp_path / "ckpt")
    checkpoint.save(tmp_path / "ckpt")
    assert len(computed) == 3


def test_a_checkpoint_with_all_values_must_have_the_same_base(tmp_path):
    path = armillary.Checkpoint(run=make_program(head=3.0)).write(tmp_path / "whole")
    program = make_program()
    make_checkpoint(program).read(path)
    assert program.head[0] == 3

    program = make_program(seed=1)
    with pytest.raises(CheckpointMismatchError) as error:
        make_checkpoint(program).read(path)
    assert "2 arrays that `leave_out` names" in str(error.value)
    assert "run/base/kernel" in str(error.value)
    assert program.head[0] == 0


def test_a_manager_saves_restores_and_keeps_the_best(make_manager):
    program = make_program()
    step = nnx.Variable(jnp.asarray(1))
    options = {"keep_best": "accuracy", "higher_is_better": True, "max_to_keep": 1}
    checkpoint = armillary.Checkpoint(run=program, step=step, leave_out="run/base")
    manager = make_manager(checkpoint, step_counter=step, **options)
    for number, accuracy in ((1, 0.9), (2, 0.8), (3, 0.7)):
        step[...] = jnp.asarray(number)
        program.head = jnp.full(4, float(number))
        manager.save()
        manager.note_evaluation({"accuracy": accuracy})
    manager.sync()
    assert [Path(path).name for path in manager.checkpoints] == [
        "checkpoint_1",
        "checkpoint_3",
    ]
    manager.restore_best()
    assert program.head[0] == 1

    wrong = make_program(seed=1)
    checkpoint = armillary.Checkpoint(run=wrong, step=step, leave_out="run/base")
    with pytest.raises(CheckpointMismatchError, match="run/base/bias"):
        make_manager(checkpoint, step_counter=step).restore_or_initialize()


def test_a_snapshot_in_memory_leaves_the_base_out_too(tmp_path, make_manager):
    memory = tmp_path / "memory"
    memory.mkdir()

    def open_manager(program):
        return make_manager(
            make_checkpoint(program),
            step_counter=lambda: int(program.head[0]),
            memory_interval_seconds=60,
            memory_directory=memory,
        )

    manager = open_manager(make_program(head=3.0))
    manager.save_to_memory()
    manager.memory.sync()
    size = sum(file.stat().st_size for file in memory.rglob("*") if file.is_file())
    assert size < 64 * 64 * 4

    program = make_program()
    path = open_manager(program).restore_or_initialize()
    assert path.startswith(str(memory))
    assert program.head[0] == 3
    with pytest.raises(CheckpointMismatchError, match="run/base/kernel"):
        open_manager(make_program(seed=1)).restore_or_initialize()


def test_a_donated_array_is_named_before_anything_changes(saved, tmp_path):
    program = make_program()
    checkpoint = make_checkpoint(program)
    program.base["kernel"].delete()
    for call in (
        lambda: checkpoint.read(saved),
        lambda: armillary.Checkpoint(run=program).read(saved),
        lambda: make_checkpoint(program),
    ):
        with pytest.raises(CheckpointError, match=r"donated(.|\n)*  run/base/kernel\n"):
            call()
    assert program.head[0] == 0

    program.base["kernel"] = make_program().base["kernel"]
    checkpoint.read(saved)
    assert program.head[0] == 3


@pytest.mark.parametrize(
    ("leave_out", "words"),
    [
        ("run/base/*", ["'run/base/*'", "(without `*`)"]),
        ("run/bass", ["'run/bass'", "run/base/kernel"]),
        (SimpleNamespace(x=1), ["`SimpleNamespace`", "run/base/kernel"]),
        ([], ["is empty", "run/base/kernel"]),
        ("run", ["all 3 arrays", "nothing would be saved"]),
        (["run/base", ""], ["no path may be empty"]),
    ],
)
def test_a_wrong_leave_out_is_refused(leave_out, words):
    with pytest.raises(ValueError) as error:
        make_checkpoint(make_program(), leave_out)
    assert "`leave_out`" in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_pytree_and_an_array_can_be_left_out():
    program = make_program()
    kernel = program.base["kernel"]
    for leave_out, paths in (
        (program.base, {"run/base/bias", "run/base/kernel"}),
        (kernel, {"run/base/kernel"}),
        ([program.base["bias"], "run/head"], {"run/base/bias", "run/head"}),
    ):
        assert make_checkpoint(program, leave_out).left_out.paths == paths


def test_objects_and_paths_can_be_mixed():
    program = make_program()
    program.teacher = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    checkpoint = make_checkpoint(program, [program.teacher, "run/base/bias"])
    assert checkpoint.left_out.paths == {
        "run/base/bias",
        "run/teacher/bias",
        "run/teacher/kernel",
    }
