"""Keeps compiled programs on the disk, for the next process that needs the same ones.

JAX has such a cache, and leaves out programs that compile in under a second unless told
otherwise. A training program begins with dozens of these.
"""

import os
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from armillary._checks import check_path
from armillary._logging import logger


def use_compilation_cache(directory: str | os.PathLike[str]) -> str:
    """Stores every program that JAX compiles, and loads it instead the next time.

    Call it first, before anything is compiled: programs compiled earlier in this
    process stay in use, and are not stored. A second process that runs the same code on
    the same kind and number of devices then reaches its first step without compiling.
    Results are those of the program that was stored, bit for bit.

    It is a setting of the whole process, for code outside Armillary too, and replaces
    a cache that was set before. Several processes may share a directory. JAX removes
    nothing from it, so remove the directory from time to time: what is missing is
    compiled again, as is, with a warning, what a killed process left half written.
    Programs that call back into Python, such as with `jax.debug.print`, are not stored.
    JAX's own switch `jax_enable_compilation_cache` still turns the cache off.

    What is in the directory is run as code: let only those write there who may run
    programs as this user, and keep it on the machine, because a program for a CPU may
    use instructions that another CPU lacks.

    Args:
        directory: Where to. It is made if it does not exist, with the rights that this
            user gives to new directories; it may be remote (`gs://bucket/cache`).

    Returns:
        The absolute path of the directory.

    Raises:
        TypeError: If `directory` is not a path.
        ValueError: If `directory` is empty, is a file, or cannot be made or written.
    """
    path = _make_directory(directory)
    jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX looks at its settings once, when it compiles the first program.
    compilation_cache.reset_cache()
    logger.info("Compiled programs are kept in %s.", path)
    return path


def _make_directory(directory: Any) -> str:
    text = check_path("directory", directory)
    if "://" in text:
        return text
    path = os.path.abspath(text)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`directory` is {text!r}, and {path!r} cannot be made: {error.strerror}. "
            "Compiled programs need a directory: use the name of one that exists, or "
            "that this user may make."
        ) from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(
            f"`directory` is {text!r}, and this user may not read and write {path!r}, "
            "but storing programs needs that. Use another directory, or change its "
            f"rights (`chmod u+rwx {path}`)."
        )
    return path
