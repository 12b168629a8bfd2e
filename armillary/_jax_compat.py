"""What differs between the releases of JAX that the library runs on.

Everything else uses JAX as all of these releases have it.
"""

from typing import Any

import jax

try:
    from jax.extend.core import get_opaque_trace_state as _get_opaque_trace_state
except ImportError:  # JAX 0.8 and 0.9
    from jax.core import get_opaque_trace_state as _get_opaque_trace_state

XLA_LIMITS_PROGRAMS = jax.__version_info__ >= (0, 9, 2)
"""Whether XLA knows `xla_gpu_execution_terminate_timeout`: unknown flags are fatal."""


def get_trace_state() -> Any:
    """Returns a value that is equal while JAX traces the same function, or none."""
    return _get_opaque_trace_state(convention="flax")


def get_mapped_axes(equation: Any) -> Any:
    """Returns the axes of the mesh that a `shard_map` maps its function over."""
    parameters = equation.params
    before = parameters.get("manual_axes")  # JAX 0.8 to 0.10.1
    return parameters.get("newly_manual_axes", before)
