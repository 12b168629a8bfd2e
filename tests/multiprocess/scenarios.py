"""The common part of programs that a test runs in several processes."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def run_scenario(functions: Mapping[str, Any]) -> None:
    """Calls the function that the command line names, and writes its result.

    `conftest.Job` passes the name of the function, a file for the result, and the
    options of the function.
    """
    _, name, result, options = sys.argv
    found = functions[name](**json.loads(options))
    Path(result).write_text(json.dumps(found))


def catch(fn: Callable[[], Any]) -> str:
    """Returns the error of a call, or an empty text."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
