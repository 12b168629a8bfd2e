"""Ray, if it is installed."""

import importlib
import os
from typing import Any


def import_ray() -> Any:
    """Returns the package `ray`."""
    # Nothing is reported to its makers, unless the user asked for it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            "Ray is not installed. Parameter servers and `armillary launch --ray` run "
            'on it: install it with `pip install "armillary[ray]"`.'
        ) from error
