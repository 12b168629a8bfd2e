"""Outputs of loops and evaluations, fetched from devices and formatted for the log.

Every log line starts with the loop and the global step, in the form of Orbit's::

    train | step:    100 | steps/sec:   52.1 | output: {'loss': 0.41237}
     eval | step:    100 | eval time:    1.3 sec | output: {'accuracy': 0.91406}
"""

import pprint
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from armillary._checks import check_encodable
from armillary._logging import logger
from armillary._shorten import shorten

_NUM_DIGITS = 5
_WIDTH = 80


def log_line(loop: str, step: int, *parts: str) -> None:
    """Logs one line about a loop, `"train"` or `"eval"`, at a global step."""
    logger.info("%s", " | ".join((f"{loop:>5}", f"step: {step: 6d}", *parts)))


def fetch_output(output: Any, source: str) -> dict[str, Any]:
    """Returns the output of a loop as plain dictionaries of NumPy values."""
    if output is None:
        return {}
    if not isinstance(output, Mapping):
        raise TypeError(
            f"`{source}` returned {shorten(output)} of type {type(output).__name__}, "
            "but it must return a dictionary of scalars or `None`. Return the value "
            'under a name, such as `{"loss": loss}`.'
        )
    seen: dict[str, tuple[Any, ...]] = {}
    for path, value in _walk(output):
        name = "/".join(map(str, path))
        what = f"`{source}` returned a value under the name"
        check_encodable(what, name, "use another name")
        other = seen.setdefault(name, path)
        if other != path:
            raise ValueError(
                f"`{source}` returned two values that are both called {name!r}: at "
                f"{_show(other)} and at {_show(path)}. Rename one of them."
            )
        for leaf in jax.tree.leaves(value):
            if isinstance(leaf, jax.Array):
                # All copies start before the first one is waited for.
                leaf.copy_to_host_async()
    return _fetch(output, source)


def _walk(
    output: Mapping[Any, Any], parents: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields each value of nested mappings with the keys that lead to it."""
    for name, value in output.items():
        path = (*parents, name)
        if isinstance(value, Mapping):
            yield from _walk(value, path)
        else:
            yield path, value


def _show(path: tuple[Any, ...]) -> str:
    return "`output" + "".join(f"[{name!r}]" for name in path) + "`"


def _fetch(output: Mapping[str, Any], source: str) -> dict[str, Any]:
    fetched: dict[str, Any] = {}
    for name, value in output.items():
        if isinstance(value, Mapping):
            fetched[name] = _fetch(value, source)
        elif callable(value) or hasattr(value, "compute"):
            raise TypeError(
                f"`{source}` returned an object of type {type(value).__name__} as "
                f"{name!r}, but it must return scalars. Compute the value, such as "
                f'`{{"{name}": self.{name}.compute()}}`.'
            )
        else:
            fetched[name] = jax.tree.map(_fetch_leaf, value)
    return fetched


def _fetch_leaf(leaf: Any) -> Any:
    # Indexing with `()` turns an array without axes into a NumPy scalar.
    return np.asarray(leaf)[()] if isinstance(leaf, jax.Array | np.ndarray) else leaf


def format_output(output: Mapping[str, Any]) -> str:
    """Returns `output` on one line, or indented on several if it does not fit."""
    rounded = _rounded(output)
    text = repr(rounded)
    if len(text) <= _WIDTH and "\n" not in text:
        return text  # The same text as from `pprint`, which takes ten times as long.
    lines = pprint.pformat(rounded, width=_WIDTH, sort_dicts=False).splitlines()
    return "".join(f"\n    {line}" for line in lines)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    dtype = getattr(value, "dtype", object)
    is_float = isinstance(value, float) or jnp.issubdtype(dtype, jnp.floating)
    if is_float:
        is_scalar = np.ndim(value) == 0
        return ShortFloat(value) if is_scalar else value
    return value.item() if isinstance(value, np.generic) else value


class ShortFloat(float):
    """A float that prints with few digits."""

    def __repr__(self) -> str:
        text = f"{float(self):.{_NUM_DIGITS}g}"
        return f"{text}.0" if text.lstrip("-").isdigit() else text
