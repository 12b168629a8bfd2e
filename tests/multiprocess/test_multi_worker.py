"""Tests that several real processes give the numbers of one process."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import armillary
from tests.multiprocess import program
from tests.multiprocess.conftest import Outcome, run_job
from tests.problems import make_strategy


def run_several(
    folder: Path, processes: int, devices: int, **parts: dict[str, Any]
) -> tuple[dict[str, list[Any]], str]:
    """Returns for each scenario the results of all processes, and their output."""
    outcome = run_job(
        folder, "several", processes=processes, devices=devices, parts=parts
    )
    assert outcome.codes == [0] * processes, outcome.log
    for result, output in zip(outcome.results, outcome.errors, strict=True):
        assert result["may open all files"]
        # Not at the first operation, where it gives up after half a minute.
        connected, _, _ = output.partition("has joined")
        assert f"is connected to {processes * devices - 1} peer ranks" in connected
    results = {name: [result[name] for result in outcome.results] for name in parts}
    return results, "".join(outcome.errors)


def test_two_processes_do_what_one_does(tmp_path: Path):
    lengths = [30, 13]
    results, output = run_several(
        tmp_path,
        processes=2,
        devices=1,
        train={},
        uneven={"lengths": lengths},
        values={},
        stop={},
        mismatches={},
        exports={"run_dir": str(tmp_path / "exports")},
    )
    expected = program.train(make_strategy(2))
    check_computed(results["train"], expected)
    # A sum of two numbers does not depend on their order.
    assert results["train"][0] == expected
    # 4 rows each, 3 times; then 4 times process 0 alone; then 2 and 1 rows left.
    check_uneven(results["uneven"], lengths, num_eval_steps=9)
    check_values(*results["values"])
    assert results["stop"] == [{"step": 6}] * 2
    assert "stopped at step 6: enough (requested in process 1 of 2)" in output
    check_mismatches(results["mismatches"])
    check_exports(*results["exports"])
    # Exporting has not disturbed training.
    assert results["exports"][0]["losses"] == results["train"][0]["losses"][:6]


@pytest.mark.slow
def test_two_processes_with_two_devices_each_do_what_one_does(keras, tmp_path: Path):
    del keras
    parts = {"train": {}, "odd": {}, "fit_keras": {}}
    results, _ = run_several(tmp_path, processes=2, devices=2, **parts)
    check_computed(results["train"], program.train(make_strategy(4)))
    check_odd(results["odd"], program.odd(make_strategy(4)))
    first, second = results["fit_keras"]
    expected = program.fit_keras(armillary.OneDeviceStrategy(jax.devices()[0]))
    assert first == second
    for name, values in expected["history"].items():
        np.testing.assert_allclose(first["history"][name], values, rtol=1e-4)
    assert first["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-4)
    predicted = np.array(first["predicted"])
    np.testing.assert_allclose(predicted, expected["predicted"], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_devices_of_each_process_are_a_group(tmp_path: Path):
    results, _ = run_several(tmp_path, processes=2, devices=2, grouped={})
    inside = "((0, 1), (2, 3))"
    across = "((0, 2), (1, 3))"
    total = [4 * i + 6 for i in range(5)]
    for found in results["grouped"]:
        assert found == {"total": total, "groups": [inside, across, across, inside]}


@pytest.mark.slow
def test_processes_with_different_weights_get_an_error_with_the_fix(keras, tmp_path):
    del keras
    options = {"processes": 2, "devices": 1, "seeds": [0, 1]}
    outcome = run_job(tmp_path, "fit_keras", **options)
    assert 0 not in outcome.codes
    for error in outcome.errors:
        assert "PeerError: `model.fit` was called on processes that differ" in error


@pytest.mark.slow
def test_four_processes_do_what_two_do(tmp_path: Path):
    lengths = [30, 13, 17, 12]
    results, output = run_several(
        tmp_path,
        processes=4,
        devices=1,
        train={},
        uneven={"lengths": lengths},
        stop={},
        mismatches={},
    )
    check_computed(results["train"], program.train(make_strategy(4)))
    # 4 rows each, 3 times; of processes 0 and 2, then of process 0 alone 3 times; then
    # 2 rows of process 0, and 1 row of processes 1 and 2.
    check_uneven(results["uneven"], lengths, num_eval_steps=9)
    assert results["stop"] == [{"step": 6}] * 4
    assert "stopped at step 6: enough (requested in process 3 of 4)" in output
    check_mismatches(results["mismatches"])


def check_computed(results: list[Any], expected: Any) -> None:
    for result in results:
        # Every example counts once, though 37 do not divide among the replicas.
        assert [counted["count"] for counted in result["counted"]] == [37.0, 37.0]
        assert [counted["sum"] for counted in result["counted"]] == [666.0, 666.0]
        assert result["counted"] == expected["counted"]
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-6)
        assert result["sums"].keys() == expected["sums"].keys()
        assert result == results[0]


def check_values(first: Any, second: Any) -> None:
    """Checks a loop of the user's own, which sees all replicas or its own."""
    x = np.arange(16.0)
    batches = [2 * x[:8], 3 * x[8:]]
    for result in (first, second):
        assert result["sums"] == [batch.sum() for batch in batches]
        assert result["gathered"] == [batch.tolist() for batch in batches]
        assert result["weight"] == 3.0
        assert result["resident"] == [x[:8].sum(), x[8:].sum()]
        assert result["eager"] == x.sum()
        # Each process has all outputs, in order: 16, 16 and 5 (4, and 1) rows.
        rows = np.split(3 * np.arange(37.0), [16, 32])
        assert result["predicted"] == [batch.tolist() for batch in rows]
        assert result["resolver"] == "TFConfigClusterResolver"
        assert result["repr"] == "MultiWorkerMirroredStrategy(2 x cpu, 2 processes)"
    assert first["local"] == [[batch[:4].tolist()] for batch in batches]
    assert second["local"] == [[batch[4:].tolist()] for batch in batches]
    assert (first["own"], second["own"]) == ([0.0], [2.0])


@pytest.mark.slow
def test_a_run_continues_with_other_numbers_of_processes(tmp_path: Path):
    run_dir = tmp_path / "run"
    parts = [(2, 0, 6), (1, 6, 10), (4, 10, 21)]
    outcomes = [
        run_job(
            tmp_path,
            "resume",
            processes=processes,
            devices=1,
            run_dir=str(run_dir),
            steps=steps,
        )
        for processes, _, steps in parts
    ]
    expected = program.resume(make_strategy(4), str(tmp_path / "alone"), 21)
    for outcome, (_, start, steps) in zip(outcomes, parts, strict=True):
        assert set(outcome.codes) == {0}, outcome.errors
        for result in outcome.results:
            assert result["start"] == start
            assert result == outcome.results[0]
            np.testing.assert_allclose(
                result["losses"], expected["losses"][:steps], rtol=1e-5
            )
            # The same global batches: nothing is repeated, and nothing left out.
            assert result["seen"] == expected["seen"][:steps]
    ids = [example for batch in expected["seen"] for example in batch]
    for epoch in range(4):
        assert sorted(ids[72 * epoch : 72 * (epoch + 1)]) == list(range(72))
    assert outcomes[-1].results[0]["best"] == expected["best"]
    check_that_only_the_chief_spoke(outcomes[0])
    # One file of each job: summaries have one writer.
    assert len(list((run_dir / "summary").glob("events*"))) == len(parts)


def check_that_only_the_chief_spoke(outcome: Outcome) -> None:
    chief, *others = outcome.errors
    assert "train | step:      6" in chief
    for line in ("train |", "saving"):
        assert not any(line in other for other in others)


def check_uneven(results: list[Any], lengths: list[int], num_eval_steps: int) -> None:
    numbers = [100.0 * i + np.arange(n) for i, n in enumerate(lengths)]
    for result in results:
        assert result == results[0]
        for counted in result["counted"]:
            assert counted["count"] == sum(lengths)
            assert counted["sum"] == sum(values.sum() for values in numbers)
            assert counted["n"] == num_eval_steps
        assert (result["steps"], result["exhausted"]) == (3, True)
        assert result["sum"] == sum(values[:12].sum() for values in numbers)
        assert (result["resumed"], result["batches"]) == (2, 3)
        assert result["pipelines"] == len(lengths)
        assert "holds the positions of 3 input pipelines" in result["refused"]
        assert f"the program has {len(lengths)}" in result["refused"]


def check_exports(first: Any, second: Any) -> None:
    """Checks that one process writes exports, and that all restore a part."""
    assert first.pop("written")[:4] == ["export-2", "export-4", "export-6", "other-0"]
    assert second.pop("written") == []
    # If one process cannot write, the others get the error at their next exchange.
    assert first.pop("error").startswith(("NotADirectoryError", "FileExistsError"))
    assert second.pop("error").startswith("PeerError")
    assert first == second
    assert first["names"] == ["export-4", "export-6"]
    np.testing.assert_array_equal(first["restored"], first["trained"])
    restored, kept = first["report"]
    assert {"trainer/model/first/kernel", "trainer/model/norm/mean"} <= set(restored)
    assert all(path.startswith("trainer/model/") for path in restored)
    assert "trainer/optimizer/step" in kept


def check_odd(results: list[Any], expected: Any) -> None:
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-6)
        # One of them is a sum of what cancels.
        np.testing.assert_allclose(result["sums"], expected["sums"], 1e-5, 1e-7)
        assert result["gathered"] == expected["gathered"]
        assert result["resident"] == [sum(range(29)), 3]
        assert result["totals"] == [
            sum(range(10)),
            sum(range(10, 20)),
            sum(range(20, 29)),
        ]
        assert '`remainder` is "exact", but each process reads' in result["refused"]
    # 2 replicas, one in each process; then the last batch on 1, in both.
    first, second = (result["local"] for result in results)
    for batch, (mine, other) in enumerate(zip(first[:2], second[:2], strict=True)):
        assert [mine[0] + other[0]] == [expected["gathered"][batch]]
    assert first[2] == second[2] == [expected["gathered"][2]]


def check_mismatches(results: list[Any]) -> None:
    count = len(results)
    for result in results:
        assert result["seed"].startswith("PeerError: ")
        assert "model/first/kernel: process 0 has float32 (64, 8) #" in result["seed"]
        assert "use the same random seed" in result["seed"]
        assert "`train_step` is traced to different programs" in result["program"]
        assert f", process {count - 1} has " in result["program"]
        values = rf"process 0 has float32 \(2,\) #.*, process {count - 1} has float32"
        assert "`<lambda>` computes with different values in" in result["run"]
        assert re.search(rf"  `own`.*: {values}", result["run"]), result["run"]
        assert re.search(r"`args\[0\]`.*: process 0 has float32", result["argument"])
        assert "  value['own']: process 0 has float32 (2,) #" in result["gathered"]
        assert "  value: process 0 has float64 () #" in result["reduced"]
        assert "different data for `train_step`" in result["data"]
        assert "different data for `train_step`" in result["shuffled"]
        assert "shuffle(1000, seed=0)" in result["shuffled"]
        shape = f"x: float32 ({count}, {8 // count})"
        assert f"process 0: 8 steps of {shape}" in result["data"]
        assert f"process {count - 1}: 7 steps of {shape}" in result["data"]
        place = "epoch {0}; {{'epoch': {0}, 'index': 8, 'num_examples': 64}}"
        assert f"; {place.format(0)}\n  process 1" in result["peeked"]
        assert f"; {place.format(1)}\nA dataset that is" in result["peeked"]
        assert "this process has joined its job with" in result["again"]
        assert result["equal"] == ""


@pytest.mark.slow
def test_a_job_of_one_process_is_like_a_mirrored_strategy(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = armillary.MultiWorkerMirroredStrategy()
    assert strategy.peers.is_alone
    assert strategy.num_replicas_in_sync == 8
    assert program.values(strategy)["sums"] == [56.0, 276.0]
