"""Tests of the benchmark of first steps, saves and restores."""

import pytest

from benchmarks.lifecycle import find_difference, list_problems, make_rows, measure


def make_records(loss: float = 0.5, resumed: float = 0.25) -> dict:
    process = {"first_step_seconds": 2.0, "peak_bytes": 3e8, "losses": [1.0, 0.5]}
    cold = {
        **process,
        "losses": [1.0, loss],
        "save_seconds": 0.5,
        "saved_bytes": 2e6,
        "losses_after": [0.25],
    }
    warm = {**process, "restore_seconds": 0.75, "losses_after": [resumed]}
    return {
        "reference-scan": {"cold": process, "warm": process},
        "tunix": {"cold": cold, "warm": warm},
    }


def test_a_row_has_times_memory_and_the_agreement_of_losses():
    by_hand, peer = make_rows({"mlp": make_records()})

    assert by_hand[:4] == ["mlp", "reference-scan", "2.00 s", "2.00 s"]
    assert peer[4:] == [
        *("300 MB", "0.50 s", "0.75 s", "2.0 MB", "equal bits", "equal bits")
    ]
    [_, peer] = make_rows({"mlp": make_records(loss=0.50002)})
    assert peer[8] == "within 4e-05"


def test_a_contestant_that_trains_something_else_is_a_problem():
    assert list_problems({"mlp": make_records(loss=0.50002)}) == []
    assert find_difference([1.0, 0.6], [1.0, 0.5]) == pytest.approx(0.2)

    [line] = list_problems({"mlp": make_records(loss=0.6)})
    assert line.startswith("tunix on mlp: the losses of the first steps differ by 2.0e")
    [line] = list_problems({"mlp": make_records(resumed=float("nan"))})
    assert "tunix on mlp: the losses after the restore differ by nan" in line
    failed = make_records() | {"levanter": {"problem": "It needs Python 3.12."}}
    assert list_problems({"mlp": failed}) == ["levanter on mlp: It needs Python 3.12."]


@pytest.mark.slow
def test_armillary_resumes_with_equal_bits_in_a_second_process(monkeypatch):
    # The suite's own cache would serve the first start.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    found = {"gpt": measure("gpt", "small", ["armillary"])}

    assert list_problems(found) == []
    ours = found["gpt"]["armillary"]
    assert len(ours["cold"]["losses"]) == 10
    assert ours["cold"]["losses_after"] == ours["warm"]["losses_after"]
    assert ours["cold"]["losses_after"] != ours["cold"]["losses"][:3]
    for process in ours.values():
        assert process["first_step_seconds"] > 0
        assert process["peak_bytes"] > 50e6
        assert process["versions"].keys() >= {"python", "armillary", "jax", "flax"}
