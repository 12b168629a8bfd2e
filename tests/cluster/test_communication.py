"""What XLA is told of communication options, and what it cannot follow."""

import jax
import pytest

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
        assert CommunicationOptions(**options).xla_flags(platform) == flags


def test_names_are_implementations_and_options_cannot_be_changed():
    options = CommunicationOptions(implementation="RING")
    assert options.implementation is RING
    assert options == CommunicationOptions(0, None, RING)
    with pytest.raises(AttributeError, match=r"cannot assign to field"):
        options.timeout_seconds = 5


def test_xla_knows_the_flags():
    options = CommunicationOptions(bytes_per_pack=1024, timeout_seconds=30)
    flags = options.xla_flags("gpu") | CommunicationOptions(0, 30).xla_flags("cpu")
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
        ({"implementation": NCCL}, "cpu", r"is 'NCCL', but the platform is 'cpu', and"),
        ({"implementation": RING}, "gpu", r"is 'RING', .* NCCL, which it has, chooses"),
        ({"implementation": RING}, "tpu", r"is 'RING', .* have a network of their own"),
        (
            {"implementation": NCCL},
            "tpu",
            r"is 'NCCL', .*`CommunicationImplementation.",
        ),
        (
            {"bytes_per_pack": 1},
            "cpu",
            r"`bytes_per_pack` is 1, but XLA packs .* 'cpu'",
        ),
        (
            {"bytes_per_pack": 1},
            "tpu",
            r"`bytes_per_pack` is 1, but XLA packs .* 'tpu'",
        ),
        (
            {"timeout_seconds": 5},
            "tpu",
            r"`timeout_seconds` is 5, but XLA cannot limit",
        ),
    ],
)
def test_what_xla_cannot_do_is_an_error(options, platform, message):
    with pytest.raises(ValueError, match=message):
        CommunicationOptions(**options).xla_flags(platform)


@pytest.mark.parametrize("size", [-1, 1.5, "1", None, True])
def test_a_size_that_is_no_size_is_an_error(size):
    with pytest.raises(ValueError, match=r"`bytes_per_pack` is .* integer that is not"):
        CommunicationOptions(bytes_per_pack=size)


@pytest.mark.parametrize(
    "seconds", [0, -1, float("inf"), float("nan"), "5", True, [1.0]]
)
def test_a_timeout_that_is_no_time_is_an_error(seconds):
    message = (
        r"`timeout_seconds` is .*, but it must be a positive number of seconds\. XLA"
    )
    with pytest.raises(ValueError, match=message):
        CommunicationOptions(timeout_seconds=seconds)


@pytest.mark.parametrize("implementation", ["MPI", "ring", None, 0])
def test_another_implementation_is_an_error(implementation):
    message = r"`implementation` is .*, but it must be one of 'AUTO', 'RING', 'NCCL'"
    with pytest.raises(ValueError, match=message):
        CommunicationOptions(implementation=implementation)


def test_another_platform_is_an_error():
    with pytest.raises(ValueError, match=r"`platform` is 'metal', but it must be one"):
        CommunicationOptions().xla_flags("metal")
