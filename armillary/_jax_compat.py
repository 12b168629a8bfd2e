"""What differs between the releases of JAX that the library runs on."""

import functools
import logging
from typing import Any

import jax

from armillary._process import get_process

try:
    from jax.extend.core import get_opaque_trace_state as _get_opaque_trace_state
except ImportError:  # JAX 0.8 and 0.9
    from jax.core import get_opaque_trace_state as _get_opaque_trace_state

XLA_LIMITS_PROGRAMS = jax.__version_info__ >= (0, 9, 2)
"""Whether XLA knows `xla_gpu_execution_terminate_timeout`: unknown flags are fatal."""

NEWEST_TESTED = (0, 10, 2)
"""The newest release of JAX that the tests run with, as in `constraints.txt`."""


def get_trace_state() -> Any:
    """Returns a value that is equal while JAX traces the same function, or none."""
    return _get_opaque_trace_state(convention="flax")


def get_mapped_axes(equation: Any) -> Any:
    """Returns the axes of the mesh that a `shard_map` maps its function over."""
    parameters = equation.params
    before = parameters.get("manual_axes")  # JAX 0.8 to 0.10.1
    return parameters.get("newly_manual_axes", before)


@functools.cache
def warn_if_untested() -> None:
    """Says once that JAX is newer than what the tests run with."""
    if jax.__version_info__ <= NEWEST_TESTED or not get_process().is_chief:
        return
    tested = ".".join(map(str, NEWEST_TESTED))
    logging.getLogger("armillary").warning(
        f"JAX {jax.__version__} is newer than {tested}, the newest release that "
        "Armillary is tested with. If something fails, try "
        f'pip install "jax=={tested}".'
    )
