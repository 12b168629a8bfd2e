"""Strategies under which a GPT must compute the numbers of one device."""

import jax

import armillary
from tests.examples.loading import load_example

RULES = load_example("gpt").LOGICAL_RULES
SEVERAL = {
    "mirrored": lambda: armillary.MirroredStrategy(jax.devices()[:4]),
    "fsdp": lambda: armillary.ShardedStrategy(
        devices=jax.devices()[:4], logical_rules=RULES
    ),
    "fsdp and tensor": lambda: armillary.ShardedStrategy(
        {"fsdp": 2, "tensor": 2}, devices=jax.devices()[:4], logical_rules=RULES
    ),
}
STRATEGIES = {"one device": lambda: armillary.OneDeviceStrategy("cpu:0"), **SEVERAL}
"""By name: the strategy of one device, and strategies of four."""
