"""A list of every strategy, for tests of rules that hold under all of them."""

import jax
import pytest

from armillary import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ShardedStrategy,
    TPUStrategy,
)
from armillary.distribute import CentralStorageStrategy, DefaultStrategy


class TPUOnCPU(TPUStrategy):
    """Takes CPU devices for TPU cores."""

    _kind = "cpu"


MAKERS = {
    "default": DefaultStrategy,
    "one device": lambda: OneDeviceStrategy("cpu:1"),
    "mirrored 1": lambda: MirroredStrategy(jax.devices()[:1]),
    "mirrored 2": lambda: MirroredStrategy(jax.devices()[:2]),
    "mirrored 4": lambda: MirroredStrategy(jax.devices()[:4]),
    "mirrored 8": lambda: MirroredStrategy(),
    "multi worker": lambda: MultiWorkerMirroredStrategy(),
    "tpu": lambda: TPUOnCPU(),
    "sharded": lambda: ShardedStrategy({"data": 2, "fsdp": 2, "tensor": 2}),
    "central": lambda: CentralStorageStrategy(jax.devices()[1:5]),
}
"""By name; a new strategy is one more entry."""


@pytest.fixture(params=MAKERS)
def strategy(request):
    return MAKERS[request.param]()
