"""Settings of a JAX contestant, made before JAX builds its first array."""

import contextlib

import jax

from benchmarks.protocol import Options, UnsupportedError


def prepare(options: Options) -> None:
    """Makes the devices of a case, and sets how it lowers convolutions.

    Raises:
        UnsupportedError: If the machine lacks devices, or the rules for convolutions do
            not know this version of JAX.
    """
    if options.devices > 1:
        # Only the CPU makes devices up. A process that has its devices already refuses
        # to change their number; it may have enough.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", options.devices)
    if options.convolutions == "canonical":
        from armillary.xla import _lowerings

        if not _lowerings.has_rules():
            raise UnsupportedError(
                "Armillary does not know the lowering rules of this version of JAX. "
                "Use `--convolutions stock`."
            )
        # The rules hold in this thread, as long as the process lives.
        _lowerings.canonically().__enter__()
    if len(jax.devices()) < options.devices:
        raise UnsupportedError(
            f"The case needs {options.devices} devices, and this machine has "
            f"{len(jax.devices())}. Use `--devices {len(jax.devices())}`."
        )
