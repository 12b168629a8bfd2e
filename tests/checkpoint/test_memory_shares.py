"""Tests of the shares of a snapshot: their parts, and the machines that keep them."""

import socket

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.checkpoint.memory import _run_folder, _share
from armillary.checkpoint.memory._offer import find_keepers


@pytest.mark.parametrize("dtype", [">f4", "<f4", ">i8", "int4", "float8_e4m3fn"])
def test_parts_of_any_dtype_are_read_as_they_were(tmp_path, dtype):
    array = np.array([[1, 2, 3], [0, -1, -2]]).astype(jnp.dtype(dtype))
    box = _share.Box((0, 0), (2, 3))
    file = tmp_path / "share_0.bin"

    sizes: list[int] = []
    (part,) = _share.write_parts(file, {("x", box): array.T.copy().T}, sizes.append)
    found = _share.read_array(file.read_bytes(), part)

    assert sizes == [array.nbytes]
    np.testing.assert_array_equal(found.astype(float), array.astype(float))
    assert found.dtype == array.dtype.newbyteorder("=")


def test_machines_of_equal_names_are_different(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    names: set[str] = set()
    for text in ("a", "b"):
        file = tmp_path / text
        file.write_text(f"{text}\n")
        monkeypatch.setattr(_run_folder, "_BOOT_FILE", file)
        names.add(_run_folder.find_machine())

    assert names == {"a", "b"}
    monkeypatch.setattr(_run_folder, "_BOOT_FILE", tmp_path / "missing")
    assert _run_folder.find_machine() == "localhost"


@given(st.lists(st.sampled_from("ABCD"), min_size=1, max_size=12))
def test_copies_are_on_another_machine_if_there_is_one_for_each(machines):
    keepers = find_keepers(machines)

    assert sorted(keepers) == list(range(len(machines)))
    if len(machines) > 1:
        assert all(keeper != index for index, keeper in enumerate(keepers))
    if max(map(machines.count, machines)) <= len(machines) / 2:
        for index, keeper in enumerate(keepers):
            assert machines[keeper] != machines[index]
