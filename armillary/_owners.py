"""The owner of a class, a function or a file: the user, a library, or Armillary."""

import enum
import functools
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Libraries that this package imports from any folder. A user's package cannot have such
# a name.
_IMPORTED = ("armillary", "etils", "flax", "jax", "jaxlib", "numpy", "optax", "orbax")
# Other libraries that this package works with. A user's package may have such a name.
_OPTIONAL = frozenset(
    {
        *("datasets", "equinox", "grain", "keras", "rich", "tensorboard"),
        *("tensorboardX", "tensorflow", "torch"),
    }
)
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_IN_SITE = re.compile(r"(.*?[/\\](?:site|dist)-packages)[/\\]([^/\\]+)")
# Modules whose functions make classes. Such a class names one of these modules.
_MAKERS = ("abc", "types")
# Programs that are typed or piped into Python have no file.
_TYPED = ("<stdin>", "<console>", "<ipython-input-", "<python-input-")
_HEAP_TYPE = 1 << 9  # in `type.__flags__`: set for every class that Python code makes.


def is_own_file(file: str) -> bool:
    """Returns whether a file is a part of this package."""
    return file.startswith(_PACKAGE)


class Owner(enum.IntEnum):
    """The owner of a class, a function or a module."""

    USER = 0
    PACKAGE = 1  # installed, but unknown to Armillary
    LIBRARY = 2  # Python itself, Armillary, or a library that it works with


def is_library_file(file: str) -> bool:
    """Returns whether a file belongs to a library, as `owner_of_file` decides."""
    return owner_of_file(file) is Owner.LIBRARY


@functools.lru_cache(maxsize=4096)
def owner_of_file(file: str) -> Owner:
    """Returns the owner of the code in a file.

    Code without a file is a library's, unless it was typed or piped into Python.
    """
    if file.startswith(_TYPED):
        return Owner.USER
    if file.startswith(("<", *_imported_folders())):
        return Owner.LIBRARY

    in_site = _IN_SITE.match(file)
    if in_site is None:
        is_python = file.startswith(_STANDARD_LIBRARY)
        return Owner.LIBRARY if is_python else Owner.USER

    site, entry = in_site.groups()
    name = entry.partition(".")[0]
    is_known = name in _OPTIONAL and _is_installed(site, name)
    return Owner.LIBRARY if is_known else Owner.PACKAGE


def _imported_folders() -> Iterator[str]:
    for name in _IMPORTED:
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            yield folder + os.sep


@functools.lru_cache(maxsize=256)
def _is_installed(site: str, name: str) -> bool:
    """Returns whether the library with this name was installed in a folder.

    Otherwise, the package with this name is part of a distribution of the user.
    """
    try:
        entries = os.listdir(site)
    except OSError:
        return False
    return any(
        entry.lower().startswith(name.lower()) and entry.endswith("-info")
        for entry in entries
    )


def owner_of_module(module: Any) -> Owner:
    """Returns the owner of a module, from its file, because names can be faked."""
    known = getattr(module, "__dict__", {})
    file = known.get("__file__")
    if isinstance(file, str):
        return owner_of_file(file)
    origin = getattr(known.get("__spec__"), "origin", None)
    if origin in ("built-in", "frozen"):
        return Owner.LIBRARY

    # A compiled library makes modules without a file inside its own.
    name = str(known.get("__name__", ""))
    above = name.rpartition(".")[0]
    return owner_of_module(sys.modules[above]) if above in sys.modules else Owner.USER


def owner_of_function(function: types.FunctionType) -> Owner:
    """Returns the owner of a Python function.

    A decorator of a library gives its own function the module name of the wrapped
    function, and code that is run by `exec` can have the name of any module. So a
    function belongs to a library only if both its named module and its globals do.
    """
    names = function.__globals__
    home = str(names.get("__name__"))
    module = sys.modules.get(home)
    if module is None or vars(module) is not names:
        return Owner.USER
    owner = owner_of_module(module)
    if function.__module__ == home:
        return owner
    return min(owner, owner_of_module(sys.modules.get(function.__module__)))


@functools.lru_cache(maxsize=4096)
def owner_of_class(kind: type) -> Owner:
    """Returns the owner of a class.

    A class may name a module that does not contain it: `type("Sweep", (Trainer,), {})`
    names the module of the metaclass, and `exec` without a `__name__` names `builtins`.
    """
    name = kind.__module__ if isinstance(kind.__module__, str) else ""
    while name and name not in sys.modules:
        name = name.rpartition(".")[0]
    module = sys.modules.get(name)
    owner = owner_of_module(module)
    if owner is Owner.USER or _find_class(module, kind.__qualname__) is kind:
        return owner

    is_made_in_c = not kind.__flags__ & _HEAP_TYPE
    has_room = kind.__dictoffset__ or "__slots__" in vars(kind)
    if is_made_in_c or not has_room:
        return owner

    functions = [
        member
        for member in vars(kind).values()
        if isinstance(member, types.FunctionType)
    ]
    if name in _MAKERS or not functions:
        return Owner.USER
    return min(map(owner_of_function, functions))


def _find_class(module: Any, path: str) -> Any:
    found = module
    for name in path.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found
