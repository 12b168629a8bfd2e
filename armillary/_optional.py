"""Packages that not every user has installed."""

import importlib
import os
from typing import Any


def import_optional(module: str, title: str, extra: str) -> Any:
    """Returns a module of a package that may be missing; `extra` installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{title} is not installed. Install the extra `{extra}` of Armillary: "
            f"`pip install '.[{extra}]'` in its checkout."
        ) from error


def import_ray() -> Any:
    """Returns the package `ray`."""
    # Ray sends no usage statistics, unless the user asked for it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    title = "Ray, on which parameter servers and `armillary launch --ray` run,"
    return import_optional("ray", title, "ray")
