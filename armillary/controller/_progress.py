"""What a person sees of a run: outputs fetched from the device, and log lines.

Every line starts with the loop and the global step, in the form Orbit's users know::

    train | step:    100 | steps/sec:   52.1 | output: {'loss': 0.41237}
     eval | step:    100 | eval time:    1.3 sec | output: {'accuracy': 0.91406}
"""

import pprint
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from armillary._logging import logger

_NUM_DIGITS = 5
_WIDTH = 80


def log_line(loop: str, step: int, *parts: str) -> None:
    """Logs one line about a loop, `"train"` or `"eval"`, at a global step."""
    logger.info("%s", " | ".join((f"{loop:>5}", f"step: {step: 6d}", *parts)))


def fetch_output(output: Any, source: str) -> dict[str, Any]:
    """Returns what a loop returned as plain dictionaries of NumPy values."""
    if output is None:
        return {}
    if not isinstance(output, Mapping):
        raise TypeError(
            f"`{source}` returned {output!r} of type {type(output).__name__}, but it "
            "must return a dictionary of scalars or `None`. Return the value under a "
            'name, such as `{"loss": loss}`.'
        )
    _check_computed(output, source)
    for leaf in jax.tree.leaves(output):
        if isinstance(leaf, jax.Array):
            # All copies start before the first one is waited for.
            leaf.copy_to_host_async()
    return _as_numpy(output)


def _check_computed(output: Mapping[str, Any], source: str) -> None:
    for name, value in output.items():
        if isinstance(value, Mapping):
            _check_computed(value, source)
        elif callable(value) or callable(getattr(value, "compute", None)):
            raise TypeError(
                f"`{source}` returned an object of type {type(value).__name__} as "
                f"{name!r}, but it must return scalars. Call what computes it, such as "
                f'`{{"{name}": self.{name}.compute()}}`.'
            )


def format_scalar(number: float) -> str:
    """Returns a number with few digits."""
    return repr(_Float(number))


def format_output(output: Mapping[str, Any]) -> str:
    """Returns `output` on one line, or indented on several if it does not fit."""
    rounded = _rounded(output)
    text = repr(rounded)
    if len(text) <= _WIDTH and "\n" not in text:
        return text  # As `pprint` would, which takes ten times as long.
    lines = pprint.pformat(rounded, width=_WIDTH, sort_dicts=False).splitlines()
    return "".join(f"\n    {line}" for line in lines)


def _as_numpy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_numpy(item) for name, item in value.items()}
    return jax.tree.map(_fetch_leaf, value)


def _fetch_leaf(leaf: Any) -> Any:
    # Indexing with `()` turns an array without axes into a NumPy scalar.
    return np.asarray(leaf)[()] if isinstance(leaf, jax.Array | np.ndarray) else leaf


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    dtype = getattr(value, "dtype", object)
    if isinstance(value, float) or jnp.issubdtype(dtype, jnp.floating):
        return _Float(value) if np.ndim(value) == 0 else value
    return value.item() if isinstance(value, np.generic) else value


class _Float(float):
    """A float that prints with few digits."""

    def __repr__(self) -> str:
        text = f"{float(self):.{_NUM_DIGITS}g}"
        return f"{text}.0" if text.lstrip("-").isdigit() else text
