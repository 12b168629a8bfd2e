"""Tells the user's code from that of libraries: by its module, or by its file."""

import functools
import os
import sys

_PACKAGES = frozenset(
    {
        "armillary",
        "datasets",
        "equinox",
        "etils",
        "flax",
        "grain",
        "jax",
        "jaxlib",
        "keras",
        "numpy",
        "optax",
        "orbax",
        "rich",
        "tensorboard",
        "tensorboardX",
        "tensorflow",
        "torch",
    }
)
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def is_library(module: str | None) -> bool:
    """Returns whether a module is one of Python's, of this package or what it uses."""
    name = (module or "").partition(".")[0]
    return name in _PACKAGES or name in sys.stdlib_module_names


@functools.lru_cache(maxsize=4096)
def is_library_file(file: str) -> bool:
    """Returns whether a file belongs to such a module, or code has no file."""
    if file.startswith(_STANDARD_LIBRARY):
        return "-packages" not in file
    modules = (sys.modules.get(name) for name in _PACKAGES)
    files = (getattr(module, "__file__", None) for module in modules)
    folders = (os.path.dirname(file) + os.sep for file in files if file)
    return file.startswith(("<", *folders))
