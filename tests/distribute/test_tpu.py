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


@mistakes(
    {
        ClusterError: {
            "needs a TPU, but JAX found none .*rocm": OnNothing,
        },
        TypeError: {
            "`device_assignment` is 3, but `.*` has no such argument": (
                lambda: OnCPU(device_assignment=3)
            ),
        },
    }
)
def test_what_it_cannot_do_is_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
