"""Chooses compiler options for the program of a step, and keeps compiled programs.

Options are chosen from the operations of a step, never from measured times. So a
resumed run makes the same choice, and has the same results bit for bit.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import core

from armillary._checks import check_path
from armillary._jaxpr import walk_equations
from armillary._logging import logger
from armillary.xla._convolutions import Form, choose_form, is_ordered
from armillary.xla._lowerings import (
    PLATFORM,
    Lowered,
    Split,
    canonically,
    has_rules,
    partitioned,
)

YNNPACK_FOR_SUMS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"
}
"""Options for steps whose convolutions are fast in loops.

XLA hands products, convolutions and sums to YNNPACK, which is best at the last: the
gradient of a bias takes an eighth of the time. It runs convolutions on one core, and
their gradients at a third of the speed. The network `CnnTask` in `benchmarks/tasks.py`
made 41 steps/s with YNNPACK for all three, 62 without it and 82 with these options. On
one core it made 39, 36 and 50 steps/s. Steps without convolutions gain less, and keep
the default. Grouped convolutions in JAX's own form get slower. Other slowdowns by
YNNPACK:
https://github.com/jax-ml/jax/issues/37465.
"""

_CONVOLUTION = "conv_general_dilated"
_POOL_GRADIENT = "select_and_scatter_add"


def use_compilation_cache(directory: str | os.PathLike[str]) -> str:
    """Stores every program that JAX compiles, and loads the program the next time.

    Call it first, before anything is compiled: programs compiled earlier in this
    process stay in use, and are not stored. A second process that runs the same code on
    the same kind and number of devices then reaches its first step without compiling.
    Its results equal the results of the stored program, bit for bit.

    It is a setting of the whole process, for code outside Armillary too, and replaces
    a cache that was set before. Several processes may share a directory. JAX removes
    nothing from it, so remove the directory from time to time. Missing programs are
    compiled again. If a killed process has left an incomplete file, JAX warns and
    compiles that program again too.
    Programs that call back into Python, such as with `jax.debug.print`, are not stored.
    JAX's own switch `jax_enable_compilation_cache` still turns the cache off.

    The files in the directory are run as code. So only users who may run programs as
    this user should be able to write there. Keep the directory on the machine, because
    a program for a CPU may use instructions that another CPU lacks.

    Args:
        directory: The directory of the programs. It is made if it does not exist, with
            the rights that this user gives to new directories. It may be remote
            (`gs://bucket/cache`).

    Returns:
        The absolute path of the directory.

    Raises:
        OSError: If `directory` is a file, or cannot be made.
        TypeError: If `directory` is not a path.
        ValueError: If `directory` is empty.
    """
    path = check_path("directory", directory)
    is_remote = "://" in path
    if not is_remote:
        os.makedirs(path, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", path)
    # By default, JAX leaves out programs that compile quickly or are small.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX looks at its settings once, when it compiles the first program.
    compilation_cache.reset_cache()
    logger.info("Compiled programs are kept in %s.", path)
    return path


def compile_step(
    fn: Callable[..., Any],
    program: core.ClosedJaxpr,
    platform: str,
    options: Mapping[str, Any] | None,
    *,
    split: Split | None = None,
    **jit_options: Any,
) -> Callable[..., Any]:
    """Returns `jax.jit(fn, **jit_options)` with options and rules for a step."""
    has_convolutions = any(_find_equations(program, _CONVOLUTION))
    chosen = dict(options or {})
    if platform == PLATFORM and has_convolutions:
        is_slow = has_slow_loop(program, platform, is_partitioned=split is not None)
        if not is_slow and _knows(**YNNPACK_FOR_SUMS):
            # The user's options come last, and so they win.
            chosen = YNNPACK_FOR_SUMS | chosen
    compiled = jax.jit(fn, compiler_options=chosen or None, **jit_options)

    if split is not None:
        # Only convolutions need rules to be divided correctly.
        return partition(compiled, split) if has_convolutions else compiled
    has_pools = any(_find_equations(program, _POOL_GRADIENT))
    may_gain = platform == PLATFORM and (has_convolutions or has_pools)
    if may_gain and has_rules():
        return Lowered(compiled, canonically)
    return compiled


def partition(compiled: Callable[..., Any], split: Split) -> Lowered:
    """Returns a program whose convolutions, if any, XLA divides correctly."""
    if not has_rules():
        raise RuntimeError(
            f"JAX {jax.__version__} keeps its lowering rules in a way that Armillary "
            "does not support, and convolutions would have wrong gradients under "
            "`ShardedStrategy`. Use a version of JAX that Armillary names in its "
            "dependencies, or `MirroredStrategy`."
        )
    return Lowered(compiled, functools.partial(partitioned, split))


def has_slow_loop(
    program: core.ClosedJaxpr, platform: str, *, is_partitioned: bool = False
) -> bool:
    """Returns whether a step is much slower inside a loop on the device.

    XLA's CPU compiler optimizes convolutions only in a program's outermost part. A form
    of `_convolutions` does not need that.
    """
    if platform != PLATFORM:
        return False
    convolutions = list(_find_equations(program, _CONVOLUTION))
    if not convolutions:
        return False

    are_lowered = not is_partitioned and has_rules()
    for equation in convolutions:
        has_batch_groups = equation.params["batch_group_count"] != 1
        is_fast_anywhere = is_ordered(equation.params) and not has_batch_groups
        if is_fast_anywhere:
            continue
        values = [variable.aval for variable in (*equation.invars, *equation.outvars)]
        is_unchanged = choose_form(equation.params, *values) is Form.UNCHANGED
        if is_unchanged or not are_lowered:
            return True
    return False


@functools.cache
def _knows(**options: str) -> bool:
    """Returns whether this version of XLA has the options of its CPU compiler."""
    compiled = jax.jit(lambda: 0, compiler_options=options)
    with jax.default_device(jax.local_devices(backend=PLATFORM)[0]):
        try:
            compiled.lower().compile()
        except jax.errors.JaxRuntimeError:
            return False
    return True


def _find_equations(program: core.ClosedJaxpr, name: str) -> Iterator[core.JaxprEqn]:
    for equation in walk_equations(program):
        if equation.primitive.name == name:
            yield equation
