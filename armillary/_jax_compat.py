"""Differences between the releases of JAX on which Armillary runs."""

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from armillary._process import get_process

try:
    from jax.extend.core import get_opaque_trace_state as _get_opaque_trace_state
except ImportError:  # JAX 0.8 and 0.9
    from jax.core import get_opaque_trace_state as _get_opaque_trace_state

PROGRAMS_MOVE_MEMORY = jax.__version_info__ >= (0, 10, 2)
"""True if a program on any devices can move arrays to the memory of the host."""

XLA_LIMITS_PROGRAMS = jax.__version_info__ >= (0, 9, 2)
"""True if XLA has `xla_gpu_execution_terminate_timeout`; unknown flags are fatal."""

# Options of one compilation have the names of flags, but an unknown option is only an
# error, so this program can find unknown flags.
_FIND_UNKNOWN = """
import json, sys
import jax

lowered = jax.jit(lambda x: x + 1).lower(1.0)
unknown = []
for name, value in json.loads(sys.argv[1]).items():
    try:
        lowered.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        unknown.append(name)
print(json.dumps(unknown))
"""

NEWEST_TESTED = (0, 12, 0, 1)
"""The newest release of JAX that the tests run with, as in `constraints.txt`.

JAX 0.11 and later need Python 3.12. On Python 3.11 the tests run with JAX 0.10.2.
"""


def get_trace_state() -> Any:
    """Returns a value that is equal while JAX traces the same function, or none."""
    return _get_opaque_trace_state(convention="flax")


def get_mapped_axes(equation: Any) -> Any:
    """Returns the axes of the mesh that a `shard_map` maps its function over."""
    parameters = equation.params
    before = parameters.get("manual_axes")  # JAX 0.8 to 0.10.1
    return parameters.get("newly_manual_axes", before)


def read_number(atom: Any) -> str:
    """Returns the number that a literal of a program holds, or nothing for a variable.

    JAX 0.8 does not print the value itself as a number.
    """
    number = _value_of(atom)
    return "" if number is None else str(number)


def read_real(atom: Any) -> float | None:
    """Returns the real number that a literal of a program holds; `None` for others."""
    number = _value_of(atom)
    is_flag = isinstance(number, bool)
    is_real = isinstance(number, int | float) and not is_flag
    return float(number) if is_real else None


def _value_of(atom: Any) -> Any:
    value = getattr(atom, "val", None)
    is_number = value is not None and np.size(value) == 1
    return np.asarray(value).item() if is_number else None


def count_scan_operands(equation: Any) -> tuple[int, int]:
    """Returns the numbers of constants and of carry values among a `scan`'s operands.

    JAX 0.8 to 0.10 have parameters for both numbers, and JAX 0.11 has a tree instead.
    The shapes show both numbers in every release: the body receives constants and the
    carry unchanged, but only one element of each sequence.
    """
    inputs = equation.params["jaxpr"].jaxpr.invars
    outputs = equation.params["jaxpr"].jaxpr.outvars
    num_whole = _count_equal_shapes(equation.invars, inputs)
    num_carry = _count_equal_shapes(equation.outvars, outputs)
    return num_whole - num_carry, num_carry


def _count_equal_shapes(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Returns the number of atoms with the same shape outside and inside a program."""
    pairs = zip(outside, inside, strict=True)
    return sum(one.aval.shape == other.aval.shape for one, other in pairs)


def find_unknown_flags(flags: Mapping[str, str]) -> list[str]:
    """Returns the flags that the installed XLA does not know.

    XLA ends a process that has an unknown flag in `XLA_FLAGS`. A test checks that the
    tested releases know all flags of the library. For a newer JAX, another process
    tries the flags, because this one must not start its devices yet.
    """
    if not flags or not is_untested():
        return []
    environment = {name: os.environ[name] for name in os.environ if name != "XLA_FLAGS"}
    answer = subprocess.run(
        [sys.executable, "-c", _FIND_UNKNOWN, json.dumps(dict(flags))],
        env={**environment, "JAX_PLATFORMS": "cpu"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(answer.stdout)


def is_untested() -> bool:
    """Returns whether JAX is newer than every release that the tests run with."""
    return jax.__version_info__ > NEWEST_TESTED


@functools.cache
def warn_if_untested() -> None:
    """Warns once if JAX is newer than every tested release."""
    if not is_untested() or not get_process().is_chief:
        return
    tested = ".".join(map(str, NEWEST_TESTED))
    logging.getLogger("armillary").warning(
        f"JAX {jax.__version__} is newer than {tested}, the newest release that "
        "Armillary is tested with. If something fails, try "
        f'pip install "jax=={tested}".'
    )
