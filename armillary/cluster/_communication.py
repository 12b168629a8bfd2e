"""Options for the exchange of values between processes, as flags of XLA."""

import enum
import math
import os
from dataclasses import dataclass

import jax

from armillary._checks import check_not_negative_int, check_one_of, check_seconds
from armillary._jax_compat import XLA_LIMITS_PROGRAMS, find_unknown_flags
from armillary.errors import ClusterError

GPU_PLATFORMS = ("cuda", "gpu", "rocm")
PLATFORMS = ("cpu", *GPU_PLATFORMS, "tpu")


class CommunicationImplementation(enum.StrEnum):
    """The library that carries values between processes, as in `tf.distribute`.

    `AUTO` leaves the choice to XLA: Gloo on CPUs, NCCL on GPUs, and their own network
    on TPUs. `RING` asks for a ring, as Gloo makes one, and is for CPUs only. `NCCL` is
    for GPUs only.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Options for the exchange of values between processes.

    The names are the same as in `tf.distribute.experimental.CommunicationOptions`.
    There, the options are hints. Here, an option that XLA cannot follow is an error.
    The strategy that receives the options sets XLA's flags when it joins the others.

    Args:
        bytes_per_pack: The size of the packs into which XLA joins small collective
            operations. XLA does not cut larger ones. 0 leaves it to XLA. GPUs only.
        timeout_seconds: The longest wait for the other processes, in an operation or
            in the start before the first controller. It is more than 0, and is rounded
            up to whole seconds. None is 5 minutes for the start, and leaves the rest to
            XLA: 30 minutes on CPUs and no limit on GPUs. On GPUs, XLA limits the
            meeting of the processes and (from JAX 0.9.2) each run of a compiled
            program, computation included. Then it ends the process, so allow for the
            longest loop. Not on TPUs.
        implementation: A `CommunicationImplementation`, or its name.

    Raises:
        ValueError: If an option is not a value of its kind.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        check_not_negative_int("bytes_per_pack", self.bytes_per_pack)
        if self.timeout_seconds is not None:
            fix = (
                "Use, for example, `timeout_seconds=120`, or None for XLA's own limit."
            )
            check_seconds("timeout_seconds", self.timeout_seconds, fix)
        choices = [str(choice) for choice in CommunicationImplementation]
        check_one_of("implementation", self.implementation, choices)
        implementation = CommunicationImplementation(self.implementation)
        # The dataclass is frozen, and the field must hold one type.
        object.__setattr__(self, "implementation", implementation)

    def _find_flags(self, platform: str) -> dict[str, str]:
        """Returns the flags by which XLA follows these options, and their values."""
        kind = "gpu" if platform in GPU_PLATFORMS else platform
        self._check_platform(kind)
        flags: dict[str, str] = {}
        if self.bytes_per_pack:
            for operation in ("all_reduce", "all_gather", "reduce_scatter"):
                name = f"xla_gpu_{operation}_combine_threshold_bytes"
                flags[name] = str(self.bytes_per_pack)
        if self.timeout_seconds is not None:
            seconds = str(math.ceil(self.timeout_seconds))
            if kind == "cpu":
                return {"xla_cpu_collective_timeout_seconds": seconds}
            # The first flag does not end a process that waits inside NCCL
            # (https://github.com/jax-ml/jax/issues/38503); the second one does.
            flags["xla_gpu_nccl_termination_timeout_seconds"] = seconds
            if XLA_LIMITS_PROGRAMS:
                flags["xla_gpu_execution_terminate_timeout"] = f"{seconds}s"
        return flags

    def _check_platform(self, kind: str) -> None:
        """Raises if XLA does not follow one of the options on a kind of device."""
        kinds = {"RING": ["cpu"], "NCCL": ["gpu"]}.get(self.implementation, [kind])
        for name, value, followed_on in (
            ("implementation", str(self.implementation), kinds),
            ("bytes_per_pack", self.bytes_per_pack or None, ["gpu"]),
            ("timeout_seconds", self.timeout_seconds, ["cpu", "gpu"]),
        ):
            if value is not None and kind not in followed_on:
                raise ValueError(
                    f"`{name}` is {value!r}, which XLA follows only on "
                    f"{' and '.join(followed_on)}, but the platform is {kind!r}. "
                    f"Leave `{name}` out."
                )


def apply_options(options: CommunicationOptions) -> None:
    """Sets the flags that XLA must know before JAX starts its devices."""
    if options == CommunicationOptions():
        return
    platforms, platform = _find_platform()
    if platform not in PLATFORMS:
        raise ClusterError(
            f"`jax_platforms` is {platforms!r}, but the platform decides which of the "
            "`communication_options` XLA can follow. Set the variable "
            "`JAX_PLATFORMS`, for example to `cuda`, or leave the options out."
        )
    values = options._find_flags(platform)
    unknown = find_unknown_flags(values)
    if unknown:
        raise ClusterError(
            f"`communication_options` is {options}. These options need the flag "
            f"`{unknown[0]}`, which the XLA of JAX {jax.__version__} does not know. "
            "Leave the options out, or install a release of JAX that Armillary is "
            "tested with (docs/reference/versions.md)."
        )
    flags = [f"--{name}={value}" for name, value in values.items()]
    # XLA takes the last one of two values.
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])


def _find_platform() -> tuple[str | None, str]:
    """Returns the setting of JAX's platforms, and the first of them."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    first, _, _ = str(platforms or "").partition(",")
    return platforms, first


def apply_alone(options: CommunicationOptions) -> None:
    """Checks options in a job of one process, and sets the flags that XLA still reads.

    Raises:
        ClusterError: If XLA must know an option before it starts its devices, and they
            have been used.
        ValueError: If the platform cannot follow an option.
    """
    from jax._src import xla_bridge  # noqa: TID251

    if options == CommunicationOptions():
        return
    _, platform = _find_platform()
    if platform in PLATFORMS and not xla_bridge.backends_are_initialized():
        apply_options(options)
        return
    # A limit on waiting needs no flag here, because there is nobody to wait for.
    options._find_flags(jax.default_backend())
    if options.bytes_per_pack:
        raise ClusterError(
            f"`bytes_per_pack` is {options.bytes_per_pack}, which XLA must know before "
            "it starts its devices. Make the strategy before every array and every "
            "`jax.devices()`, and set the variable `JAX_PLATFORMS`, for example to "
            "`cuda`."
        )
