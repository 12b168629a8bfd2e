"""Tells Flax which axis of a mesh each name in a model's annotations stands for."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

_MODULES = ("flax.nnx", "flax.linen")


@contextmanager
def with_axis_names(rules: Mapping[str, Any]) -> Iterator[None]:
    """Sets the names for new variables of NNX, and for constraints of Linen."""
    pairs = tuple(rules.items())
    with ExitStack() as stack:
        if pairs:
            for name in _MODULES:
                module = sys.modules.get(name)
                if module is not None:
                    stack.enter_context(module.logical_axis_rules(pairs))
        yield
