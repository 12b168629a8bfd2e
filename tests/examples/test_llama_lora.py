"""Tests that a Llama is fine-tuned, resumed after a kill, and saved."""

import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.environment import forget_devices
from tests.examples.decoder_reference import LLAMA, make_arrays, write_model
from tests.examples.loading import EXAMPLES, load_example
from tests.examples.running import read_steps, run_example, run_well
from tests.patience import wait_until

pytestmark = pytest.mark.slow


def make_arguments(folder: Path) -> list[str]:
    return ["--run-dir", str(folder), "--steps", "60"]


def run_and_kill(folder: Path) -> None:
    """Runs the program, and kills it once it has a checkpoint after its first loop."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "llama_lora.py"), *make_arguments(folder)],
        env={**forget_devices(), "PYTHONPATH": str(EXAMPLES.parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until((folder / "checkpoints" / "checkpoint_20").exists, seconds=200)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_model_in_bfloat16_is_trained_on_its_own_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_model(tmp_path / "llama", LLAMA, make_arrays(LLAMA))
    half = load_file(folder / "model.safetensors")
    half = {name: value.astype(ml_dtypes.bfloat16) for name, value in half.items()}
    save_file(half, folder / "model.safetensors")
    words = {f"w{number}": number for number in range(40)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    text = tmp_path / "text"
    numbers = np.random.default_rng(0).integers(0, 40, 10 * 65 + 3)
    text.write_text(" ".join(f"w{number}" for number in numbers))

    example = load_example("llama_lora")
    tokens = example.read_tokens(text, folder / "tokenizer.json")
    np.testing.assert_array_equal(tokens, numbers[:-3].reshape(10, 65))

    options = ("--model", folder, "--text", text, "--run-dir", tmp_path / "run")
    run_well("llama_lora.py", *options, "--steps", 20)
    merged = load_file(tmp_path / "run" / "merged" / "model.safetensors")
    assert {value.dtype for value in merged.values()} == {np.dtype("bfloat16")}
    changed = {name for name in half if not np.array_equal(half[name], merged[name])}
    assert changed == {name for name in half if "_proj.weight" in name}


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    options = ("--model", tmp_path / "lama", "--run-dir", tmp_path / "run")
    result = run_example("llama_lora.py", *options)
    assert result.returncode != 0
    assert "lama/config.json" in result.stderr
    assert not (tmp_path / "lama").exists()


def test_a_kill_changes_nothing_and_only_adapted_weights_change(tmp_path):
    run_well("llama_lora.py", *make_arguments(tmp_path / "whole"))

    run_and_kill(tmp_path / "killed")
    result = run_well("llama_lora.py", *make_arguments(tmp_path / "killed"))

    assert min(read_steps(result.stderr)) > 20
    whole, killed = (
        (tmp_path / name / "merged" / "model.safetensors").read_bytes()
        for name in ("whole", "killed")
    )
    assert killed == whole

    base = load_file(tmp_path / "whole" / "tiny" / "model.safetensors")
    merged = load_file(tmp_path / "whole" / "merged" / "model.safetensors")
    assert merged.keys() == base.keys()
    changed = {name for name in base if not np.array_equal(base[name], merged[name])}
    assert changed == {name for name in base if "_proj" in name}
    # The base is not in the checkpoints.
    checkpoint = tmp_path / "whole" / "checkpoints" / "checkpoint_60"
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    assert size < sum(array.nbytes for array in base.values())
