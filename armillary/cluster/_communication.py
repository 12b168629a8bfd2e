"""How processes exchange values, as far as XLA lets a program choose."""

import enum
import math
from dataclasses import dataclass

from armillary._checks import check_not_negative_int, check_one_of, check_seconds
from armillary._jax_compat import XLA_LIMITS_PROGRAMS

GPU_PLATFORMS = ("cuda", "gpu", "rocm")
PLATFORMS = ("cpu", *GPU_PLATFORMS, "tpu")
_MISFITS = {
    ("cpu", "NCCL"): "NCCL exchanges values between GPUs only",
    ("gpu", "RING"): "NCCL, which it has, chooses by itself or by `NCCL_ALGO`",
    ("tpu", "RING"): "TPUs have a network of their own",
    ("tpu", "NCCL"): "TPUs have a network of their own",
}


class CommunicationImplementation(enum.StrEnum):
    """Which library carries the values, as in `tf.distribute`.

    `AUTO` leaves it to XLA: Gloo on CPUs, NCCL on GPUs, and their own network on TPUs.
    `RING` asks for a ring, which is what Gloo does, so it holds on CPUs only. `NCCL`
    holds on GPUs only.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Options for the exchange of values between processes.

    The names are those of `tf.distribute.experimental.CommunicationOptions`. There they
    are hints; here an option that XLA cannot follow is an error that says so. Making
    the options sets nothing: the strategy does that, when it joins the others.

    Args:
        bytes_per_pack: XLA joins small collective operations into packs of up to so
            many bytes. It does not cut larger ones. 0 leaves it to XLA. GPUs only.
        timeout_seconds: How long an operation may wait for the other processes, more
            than 0, in whole seconds or rounded up to them. None leaves it to XLA: 30
            minutes on CPUs and no limit on GPUs. On CPUs the operation then raises an
            error. On GPUs XLA can limit only the meeting of the processes and each run
            of a compiled program as a whole, computation included, and ends the
            process: allow for the longest loop. The latter needs JAX 0.9.2. Not on
            TPUs.
        implementation: A `CommunicationImplementation`, or its name.

    Raises:
        ValueError: If `bytes_per_pack` is not an integer of at least 0,
            `timeout_seconds` is not a number above 0, or `implementation` is not one of
            the three.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        check_not_negative_int("bytes_per_pack", self.bytes_per_pack)
        if self.timeout_seconds is not None:
            fix = (
                "XLA has no wait without end on CPUs. Use, for example, "
                "`timeout_seconds=120`, or None for XLA's own limit."
            )
            check_seconds("timeout_seconds", self.timeout_seconds, fix)
        check_one_of(
            "implementation",
            self.implementation,
            [str(choice) for choice in CommunicationImplementation],
        )
        implementation = CommunicationImplementation(self.implementation)
        # The dataclass is frozen, and the field must hold one type.
        object.__setattr__(self, "implementation", implementation)

    def xla_flags(self, platform: str) -> dict[str, str]:
        """Returns the flags by which XLA follows these options, and their values.

        XLA must know them before JAX's devices are used for the first time.

        Args:
            platform: What the processes compute on: `"cpu"`, `"gpu"`, `"cuda"`,
                `"rocm"` or `"tpu"`.

        Raises:
            ValueError: If `platform` is another one, or cannot follow an option.
        """
        check_one_of("platform", platform, PLATFORMS)
        kind = "gpu" if platform in GPU_PLATFORMS else platform
        if (reason := _MISFITS.get((kind, str(self.implementation)))) is not None:
            raise ValueError(
                f"`implementation` is '{self.implementation}', but the platform is "
                f"{kind!r}, and {reason}. Use `CommunicationImplementation.AUTO`."
            )
        if self.bytes_per_pack and kind != "gpu":
            raise ValueError(
                f"`bytes_per_pack` is {self.bytes_per_pack}, but XLA packs collective "
                f"operations by size on GPUs only, and the platform is {kind!r}. "
                "Leave `bytes_per_pack` out."
            )
        if self.timeout_seconds is not None and kind == "tpu":
            raise ValueError(
                f"`timeout_seconds` is {self.timeout_seconds!r}, but XLA cannot limit "
                "how long TPUs wait for each other. Leave `timeout_seconds` out."
            )
        flags: dict[str, str] = {}
        for operation in ("all_reduce", "all_gather", "reduce_scatter"):
            if self.bytes_per_pack:
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
