"""What a JAX contestant settles before JAX builds its first array."""

import contextlib

import jax

from benchmarks.protocol import Options, UnsupportedError


def prepare(options: Options) -> None:
    """Makes the devices of a case, and sets how it lowers convolutions.

    Raises:
        UnsupportedError: If the machine or this version of Armillary lacks something.
    """
    if options.devices > 1:
        # Only the CPU makes devices up. A process that has its devices already refuses
        # to change their number; it may have enough.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", options.devices)
    if options.convolutions == "canonical":
        _use_canonical_convolutions()
    if len(jax.devices()) < options.devices:
        raise UnsupportedError(
            f"The case needs {options.devices} devices, and this machine has "
            f"{len(jax.devices())}. Use `--devices {len(jax.devices())}`."
        )


def peak_device_bytes() -> int | None:
    """Returns the most memory used on the first device, if it counts."""
    statistics = jax.devices()[0].memory_stats()
    return None if statistics is None else statistics.get("peak_bytes_in_use")


def _use_canonical_convolutions() -> None:
    try:
        from armillary import xla
    except ImportError as error:
        raise UnsupportedError(
            "This version of Armillary has no `armillary.xla`, so convolutions cannot "
            "be lowered canonically. Use `--convolutions stock`."
        ) from error
    if not xla.use_canonical_convolutions():
        raise UnsupportedError(
            "`armillary.xla.use_canonical_convolutions()` does not know this version "
            "of JAX. Use `--convolutions stock`."
        )
