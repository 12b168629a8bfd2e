"""Tests of how communication options become flags of XLA, or an error."""

import jax
import pytest

from armillary import MultiWorkerMirroredStrategy
from armillary._jax_compat import XLA_LIMITS_PROGRAMS
from armillary.cluster import CommunicationImplementation, CommunicationOptions

AUTO = CommunicationImplementation.AUTO
NCCL = CommunicationImplementation.NCCL
RING = CommunicationImplementation.RING
PACKS = {
    f"xla_gpu_{operation}_combine_threshold_bytes": "1024"
    for operation in ("all_reduce", "all_gather", "reduce_scatter")
}


def limit(seconds):
    flags = {"xla_gpu_nccl_termination_timeout_seconds": seconds}
    if XLA_LIMITS_PROGRAMS:
        flags["xla_gpu_execution_terminate_timeout"] = f"{seconds}s"
    return flags


@pytest.mark.parametrize(
    ("options", "platforms", "flags"),
    [
        ({}, ["cpu", "cuda", "gpu", "rocm", "tpu"], {}),
        ({"implementation": "RING"}, ["cpu"], {}),
        ({"implementation": NCCL}, ["cuda", "gpu", "rocm"], {}),
        ({"bytes_per_pack": 1024}, ["cuda", "gpu", "rocm"], PACKS),
        *[
            ({"timeout_seconds": seconds}, platforms, flags)
            for seconds, text in ((30, "30"), (0.2, "1"), (1.5, "2"))
            for platforms, flags in (
                (["cpu"], {"xla_cpu_collective_timeout_seconds": text}),
                (["gpu"], limit(text)),
            )
        ],
    ],
)
def test_options_are_flags_of_xla(options, platforms, flags):
    for platform in platforms:
        assert CommunicationOptions(**options)._find_flags(platform) == flags


def test_names_are_implementations_and_options_cannot_be_changed():
    options = CommunicationOptions(implementation="RING")
    assert options.implementation is RING
    assert options == CommunicationOptions(0, None, RING)
    with pytest.raises(AttributeError, match=r"cannot assign to field"):
        options.timeout_seconds = 5


def test_xla_knows_the_flags():
    options = CommunicationOptions(bytes_per_pack=1024, timeout_seconds=30)
    flags = options._find_flags("gpu") | CommunicationOptions(0, 30)._find_flags("cpu")
    assert len(flags) == 5 + XLA_LIMITS_PROGRAMS
    # The options of one compilation have the names of the flags.
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    for name, value in flags.items():
        lowered.compile(compiler_options={name: value})
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"No such compile option"):
        lowered.compile(compiler_options={"xla_no_such_flag": "1"})


@pytest.mark.parametrize(
    ("options", "platform", "message"),
    [
        ({"implementation": NCCL}, "cpu", "is 'NCCL', which XLA follows only on gpu"),
        ({"implementation": RING}, "gpu", "is 'RING', which XLA follows only on cpu"),
        ({"bytes_per_pack": 1}, "tpu", "is 1, which .* only on gpu, .* 'tpu'. Leave"),
        ({"timeout_seconds": 5}, "tpu", "is 5, which XLA follows only on cpu and gpu"),
    ],
)
def test_options_that_xla_cannot_follow_are_errors(options, platform, message):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` {message}"):
        CommunicationOptions(**options)._find_flags(platform)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        *[
            ({"bytes_per_pack": size}, "integer that is not")
            for size in (-1, 1.5, True)
        ],
        *[
            ({"timeout_seconds": seconds}, "a positive number of seconds")
            for seconds in (0, float("inf"), "5")
        ],
        *[
            ({"implementation": name}, "one of 'AUTO', 'RING', 'NCCL'")
            for name in ("ring", None)
        ],
    ],
)
def test_a_value_that_is_no_option_is_an_error(options, rule):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` is .*{rule}"):
        CommunicationOptions(**options)


def test_an_implementation_in_the_place_of_a_resolver_is_an_error_with_its_place():
    fix = r'`communication_options=.*CommunicationOptions\(implementation="RING"\)`'
    with pytest.raises(TypeError, match=fix):
        MultiWorkerMirroredStrategy(RING)
