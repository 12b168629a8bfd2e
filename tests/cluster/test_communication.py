import jax
import pytest

from armillary._jax_compat import XLA_LIMITS_PROGRAMS
from armillary.cluster import (
    CommunicationImplementation,
    CommunicationOptions,
    JaxSettings,
)

AUTO = CommunicationImplementation.AUTO
NCCL = CommunicationImplementation.NCCL
RING = CommunicationImplementation.RING
GPUS = ["cuda", "gpu", "rocm"]


@pytest.mark.parametrize("platform", ["cpu", *GPUS, "tpu"])
def test_the_defaults_set_nothing(platform):
    assert CommunicationOptions().jax_settings(platform) == JaxSettings()


def test_names_are_implementations():
    options = CommunicationOptions(implementation="RING")
    assert options.implementation is RING
    assert options == CommunicationOptions(0, None, RING)


def test_a_ring_on_cpus_is_gloo():
    settings = CommunicationOptions(implementation=RING).jax_settings("cpu")
    assert settings.config == {"jax_cpu_collectives_implementation": "gloo"}
    assert settings.xla_flags == {}


@pytest.mark.parametrize("platform", GPUS)
def test_nccl_is_what_gpus_use(platform):
    options = CommunicationOptions(implementation=NCCL)
    assert options.jax_settings(platform) == JaxSettings()


@pytest.mark.parametrize("platform", GPUS)
def test_packs_have_a_size_on_gpus(platform):
    settings = CommunicationOptions(bytes_per_pack=1024).jax_settings(platform)
    assert settings.xla_flags == {
        "xla_gpu_all_reduce_combine_threshold_bytes": "1024",
        "xla_gpu_all_gather_combine_threshold_bytes": "1024",
        "xla_gpu_reduce_scatter_combine_threshold_bytes": "1024",
    }


@pytest.mark.parametrize(("seconds", "text"), [(30, "30"), (0.2, "1"), (1.5, "2")])
def test_a_timeout_is_rounded_up_to_seconds(seconds, text):
    options = CommunicationOptions(timeout_seconds=seconds)
    cpu = options.jax_settings("cpu").xla_flags
    assert cpu == {"xla_cpu_collective_timeout_seconds": text}
    expected = {"xla_gpu_nccl_termination_timeout_seconds": text}
    if XLA_LIMITS_PROGRAMS:
        expected["xla_gpu_execution_terminate_timeout"] = f"{text}s"
    assert options.jax_settings("gpu").xla_flags == expected


def test_the_options_of_jax_exist():
    settings = CommunicationOptions(implementation=RING).jax_settings("cpu")
    assert settings.config.keys() <= jax.config.values.keys()


def test_xla_knows_the_flags():
    options = CommunicationOptions(bytes_per_pack=1024, timeout_seconds=30)
    flags = options.jax_settings("gpu").xla_flags
    flags |= CommunicationOptions(0, 30).jax_settings("cpu").xla_flags
    assert len(flags) == 5 + XLA_LIMITS_PROGRAMS
    # The options of one compilation have the names of the flags.
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    for name, value in flags.items():
        lowered.compile(compiler_options={name: value})
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"No such compile option"):
        lowered.compile(compiler_options={"xla_no_such_flag": "1"})


def test_flags_are_added_to_those_that_are_there():
    settings = JaxSettings(xla_flags={"xla_a": "1", "xla_b": "2"})
    assert settings.add_to_flags("") == "--xla_a=1 --xla_b=2"
    assert settings.add_to_flags("--xla_c  --xla_b=2") == "--xla_c --xla_b=2 --xla_a=1"
    assert JaxSettings().add_to_flags("--xla_c") == "--xla_c"


def test_a_flag_with_another_value_is_an_error():
    message = (
        r"`XLA_FLAGS` sets `--xla_a=2`, but the communication options need `--xla_a=1`"
    )
    with pytest.raises(ValueError, match=message):
        JaxSettings(xla_flags={"xla_a": "1"}).add_to_flags("--xla_a=2")


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
        CommunicationOptions(**options).jax_settings(platform)


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
        CommunicationOptions().jax_settings("metal")


def test_options_cannot_be_changed():
    options = CommunicationOptions(implementation=AUTO)
    with pytest.raises(AttributeError, match=r"cannot assign to field"):
        options.timeout_seconds = 5
