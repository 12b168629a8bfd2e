"""GPUs are shared without overlap, and only where JAX would use them."""

from importlib.metadata import EntryPoint

import pytest

from armillary.launch import _environment
from armillary.launch._environment import (
    DevicePlan,
    find_gpus,
    plan_devices,
    read_visible_gpus,
)


@pytest.fixture
def cuda_plugin(monkeypatch):
    plugin = EntryPoint("xla_cuda13", "jax_plugins.xla_cuda13", "jax_plugins")
    monkeypatch.setattr(_environment, "entry_points", lambda group: [plugin])


@pytest.mark.parametrize("count", [None, 1, 4])
def test_without_gpus_each_worker_has_virtual_cpus(count):
    plan = plan_devices([], num_workers=2, devices_per_worker=count)
    assert plan == DevicePlan(virtual_cpus=count)


@pytest.mark.parametrize(
    ("workers", "share", "expected"),
    [
        (2, 2, (("0", "1"), ("2", "3"))),
        (2, None, (("0", "1"), ("2", "3"))),
        (2, 1, (("0",), ("1",))),
        (3, None, (("0",), ("1",), ("2",))),
        (1, None, (("0", "1", "2", "3"),)),
    ],
)
def test_workers_get_gpus_of_their_own(workers, share, expected):
    gpus = ["0", "1", "2", "3"]
    plan = plan_devices(gpus, num_workers=workers, devices_per_worker=share)
    assert plan.gpus == expected
    assert plan.virtual_cpus is None


@pytest.mark.parametrize(("workers", "share"), [(2, 2), (4, None), (1, 4)])
def test_too_few_gpus_are_an_error(workers, share):
    with pytest.raises(
        ValueError,
        match=r"`--workers` is .* takes 4 GPUs, but this machine offers 3 \(0, 1, 5\)"
        ".*`JAX_PLATFORMS=cpu`",
    ):
        plan_devices(["0", "1", "5"], num_workers=workers, devices_per_worker=share)


def test_an_evaluator_takes_gpus_as_a_worker_does():
    plan = plan_devices(
        ["0", "1"], num_workers=1, devices_per_worker=None, has_evaluator=True
    )
    assert plan.gpus == (("0",), ("1",))
    with pytest.raises(
        ValueError, match=r"`--workers` is 1 with an `--evaluator` and .* takes 2 GPUs"
    ):
        plan_devices(["0"], num_workers=1, devices_per_worker=1, has_evaluator=True)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("0,2", ["0", "2"]),
        (" GPU-8a , GPU-7b ", ["GPU-8a", "GPU-7b"]),
        ("", []),
        ("-1", []),
        ("3,-1,4", ["3"]),
    ],
)
def test_visible_gpus_are_read_as_cuda_reads_them(value, names):
    assert read_visible_gpus(value) == names


@pytest.mark.usefixtures("cuda_plugin")
@pytest.mark.parametrize(
    ("platforms", "gpus"),
    [("", ["0", "1"]), ("cuda,cpu", ["0", "1"]), ("gpu", ["0", "1"]), ("cpu", [])],
)
def test_gpus_are_used_only_on_platforms_that_have_them(platforms, gpus):
    environment = {"JAX_PLATFORMS": platforms, "CUDA_VISIBLE_DEVICES": "0,1"}
    assert find_gpus(environment) == gpus


@pytest.mark.usefixtures("cuda_plugin")
def test_gpus_are_found_by_their_device_files(tmp_path, monkeypatch):
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(_environment, "Path", lambda path: tmp_path)
    assert find_gpus({}) == ["2", "10"]


def test_gpus_that_jax_cannot_use_are_ignored(monkeypatch):
    monkeypatch.setattr(_environment, "entry_points", lambda group: [])
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == []


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (DevicePlan(), "devices as the script finds them"),
        (DevicePlan(virtual_cpus=1), "1 virtual CPU device each"),
        (DevicePlan(gpus=(("0", "1"), ("2", "3"))), "2 GPUs each"),
    ],
)
def test_a_plan_is_described(plan, text):
    assert plan.describe() == text
