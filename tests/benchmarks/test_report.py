import io
import json
from dataclasses import asdict

import pytest
from rich.console import Console

from benchmarks.machine import describe_machine, find_device, find_peak_tflops
from benchmarks.protocol import Options
from benchmarks.report import (
    add_measurement,
    find_utilization,
    list_reasons,
    make_table,
    write_document,
)


def make_entry(task: str = "mlp", **changes) -> dict:
    def record(steps_per_second: float, median: float) -> dict:
        ratio = {"median": median, "low": median - 0.1, "high": median + 0.1}
        return {"steps_per_second": steps_per_second, "ratio": ratio}

    return {
        "task": task,
        "mode": "loop 100",
        **asdict(Options(steps_per_loop=100)),
        "flops_per_step": 1e9,
        "reference": "reference-scan",
        "contestants": {
            "reference-scan": record(4000.0, 1.0),
            "reference-step": record(2000.0, 0.5),
            "armillary": record(3880.0, 0.97),
        },
        "skipped": {},
        "failed": {},
        **changes,
    }


def render(*cases: dict, peak_tflops: float | None = None) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(make_table(cases, peak_tflops))
    return console.file.getvalue()


def test_a_row_shows_the_reference_the_ratio_its_spread_and_the_speed():
    text = render(make_entry())
    assert "reference-scan" in text and "4,000" in text
    assert "0.97 (0.87 to 1.07)" in text and "3,880" in text
    assert "MFU" not in text


def test_a_contestant_that_is_missing_somewhere_keeps_its_column():
    peer = {"steps_per_second": 7.126, "ratio": {"median": 0.5, "low": 0.5, "high": 1}}
    first, second = make_entry(), make_entry("bert", failed={"armillary": "It broke."})
    first["contestants"]["keras"] = peer
    del second["contestants"]["armillary"]
    text = render(first, second)
    assert "7.13" in text and "failed" in text
    assert list_reasons([first, second]) == [
        "armillary FAILED bert (loop 100): It broke."
    ]


def test_a_case_without_reference_shows_speeds_alone():
    entry = make_entry(reference=None)
    entry["contestants"] = {"armillary": {"steps_per_second": 12.0}}
    text = render(entry)
    assert "none" in text and "12" in text


def test_utilization_is_model_flops_over_the_peak():
    entry = make_entry()
    # 1e9 operations, 3,880 times a second, on a device of 100e12.
    assert find_utilization(entry, "armillary", 100.0) == pytest.approx(0.0388)
    assert find_utilization(entry, "keras", 100.0) is None
    assert "3.9%" in render(entry, peak_tflops=100.0)


def test_peaks_are_known_by_device_kind():
    assert (
        find_peak_tflops("NVIDIA H200") == find_peak_tflops("NVIDIA H100 PCIe") == 989
    )
    assert find_peak_tflops("cpu") is None


def test_measurements_are_added_to_the_document(tmp_path):
    path = tmp_path / "bench.json"
    write_document(path, {"schema": 1, "cases": [make_entry()]})
    add_measurement(path, "import_time", {"seconds": 0.2})
    add_measurement(path, "memory", {"bytes": 1})
    document = json.loads(path.read_text())
    assert document["cases"] == [make_entry()]
    assert document["measurements"] == {
        "import_time": {"seconds": 0.2},
        "memory": {"bytes": 1},
    }
    add_measurement(tmp_path / "new.json", "memory", {"bytes": 1})
    assert json.loads((tmp_path / "new.json").read_text())["schema"] == 1
    assert not list(tmp_path.glob("*.partial"))


def test_the_machine_is_described():
    machine = describe_machine()
    assert machine["cpu"] and machine["cores"] >= 1 and machine["system"]


def test_without_a_device_nothing_can_be_measured(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    with pytest.raises(RuntimeError, match=r"(?s)JAX finds no device.*abacus"):
        find_device()


def test_the_device_is_found_in_another_process():
    device = find_device()
    assert device["platform"] == "cpu" and device["count"] >= 1
