"""`TPUStrategy` on CPU devices, and what it says where there is no TPU."""

import jax
import pytest

import armillary
from armillary.cluster import SimpleClusterResolver
from armillary.errors import ClusterError
from tests.mistakes import mistakes


class OnCPU(armillary.TPUStrategy):
    _kind = "cpu"


class OnNothing(armillary.TPUStrategy):
    _kind = "rocm"


def test_there_is_a_replica_for_each_device_and_the_resolver_is_kept():
    resolver = SimpleClusterResolver({})
    strategy = OnCPU(resolver)
    assert strategy.num_replicas_in_sync == jax.local_device_count() == 8
    assert strategy.cluster_resolver is resolver
    assert repr(strategy) == "OnCPU(8 x cpu, 1 process)"
    assert not hasattr(strategy, "no_such_name")


@pytest.mark.parametrize(
    ("platforms", "reason"),
    [
        ("cpu", r"JAX was told to use cpu alone \(`JAX_PLATFORMS`\)"),
        (None, "the package `libtpu` is not installed"),
    ],
)
def test_without_a_tpu_no_device_is_asked_and_no_process_joins(
    monkeypatch, platforms, reason
):
    def fail(*_, **__):
        pytest.fail("asked for devices, or joined a cluster")

    monkeypatch.setattr(jax, "local_devices", fail)
    monkeypatch.setattr(jax.distributed, "initialize", fail)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    resolver = SimpleClusterResolver({"worker": ["one:1", "two:1"]}, "worker", 0)
    try:
        with pytest.raises(ClusterError, match=reason) as caught:
            armillary.TPUStrategy(resolver)
    finally:
        jax.config.update("jax_platforms", before)
    assert "`armillary.MirroredStrategy()`" in str(caught.value)


@mistakes(
    {
        ClusterError: {
            "needs a TPU, but JAX found none .*rocm": OnNothing,
        },
        TypeError: {
            "`resolver` is 'local' of type str, but it must be a": (
                lambda: OnCPU("local")
            ),
            "`device_assignment` is 3, but `.*` has no such argument": (
                lambda: OnCPU(device_assignment=3)
            ),
        },
        AttributeError: {
            f"no attribute '{name}'. Use `jax.lax.with_sharding_constraint`": (
                lambda name=name: getattr(OnCPU(), name)
            )
            for name in (
                "experimental_assign_to_logical_device",
                "experimental_split_to_logical_devices",
                "experimental_replicate_to_logical_devices",
            )
        },
    }
)
def test_what_it_cannot_do_is_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
