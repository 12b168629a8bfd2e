"""Tests that the processes of a job load and save safetensors in parts."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.examples.decoder_reference import (
    LLAMA,
    compute_logits,
    make_arrays,
    write_model,
)
from tests.multiprocess import weights
from tests.multiprocess.conftest import run_program

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(1).integers(0, 40, (2, 12))


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_each_process_reads_and_writes_its_own_part(
    tmp_path: Path, processes: int, devices: int
):
    arrays = make_arrays(LLAMA)
    folder = write_model(tmp_path / "model", LLAMA, arrays)
    changed = {name: value + 1 for name, value in arrays.items()}
    tuned = write_model(tmp_path / "tuned", LLAMA, changed)
    new = tmp_path / "new"
    outcome = run_program(
        Path(weights.__file__),
        tmp_path / "job",
        "weights",
        processes,
        devices,
        source=str(folder),
        new=str(new),
        tuned=str(tuned),
        tokens=TOKENS.tolist(),
    )
    assert outcome.codes == [0] * processes, outcome.log
    expected = compute_logits(LLAMA, arrays, TOKENS)
    for index, found in enumerate(outcome.results):
        np.testing.assert_allclose(found["logits"], expected, atol=2e-5)
        assert found["read"] == found["own"]
        # All matrices are divided, except the embedding and the head by one axis.
        assert found["own"] < 0.6 * found["whole"]
        assert found["files"] == outcome.results[0]["files"]
        last = f"process {processes - 1} of {processes}"
        assert (
            f"CheckpointError: `path` is {str(new)!r}, to which {last}"
            in (found["full"])
        )
        assert "No space left" in found["full"]
        is_last = index == processes - 1
        error = "FileNotFoundError: " if is_last else "PeerError: Another process"
        assert found["absent"].startswith(error)
        assert is_last or f"{last}: FileNotFoundError" in found["absent"]
        assert "Download the model first" in found["absent"]
        place = tuned if is_last else folder
        assert f"`path` is {str(place)!r}, whose tensors are not" in found["tuned"]
        assert f"process {processes - 1} of {processes} as in pro" in found["tuned"]
        assert found["is_kept"]

    names = outcome.results[0]["files"]
    assert len(names) > processes
    saved = {}
    for name in names:
        saved |= load_file(new / name)
    assert saved.keys() == arrays.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name)
    # The save that failed left everything as it was.
    index = json.loads((new / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == names
