"""How the program of a step is compiled: chosen by looking at it, never at a clock.

So a resumed run makes the same choice, and has the same results bit for bit.

Keeps compiled programs on the disk, for the next process that needs the same ones.

JAX has such a cache, and leaves out programs that compile in under a second unless told
otherwise. A training program begins with dozens of these.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import core

from armillary._checks import check_path
from armillary._jaxpr import walk_programs
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


YNNPACK_FOR_SUMS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"
}
"""Options for steps whose convolutions are fast in loops.

XLA hands products, convolutions and sums to YNNPACK, which is best at the last: the
gradient of a bias takes an eighth of the time. It runs convolutions on one core, and
their gradients at a third of the speed. The network `CnnTask` in `benchmarks/tasks.py`
made 41 steps/s with YNNPACK for all three, 62 without it and 82 with this, and 39, 36
and 50 on one core. Steps without convolutions gain less, and keep the default;
convolutions in groups that stay as JAX has them lose. Of other slowdowns by YNNPACK:
https://github.com/jax-ml/jax/issues/37465.
"""

_CONVOLUTION, _POOL_GRADIENT = "conv_general_dilated", "select_and_scatter_add"


def compile_step(
    fn: Callable[..., Any],
    program: core.ClosedJaxpr,
    platform: str,
    options: Mapping[str, Any] | None,
    *,
    split: Split | None = None,
    **how: Any,
) -> Callable[..., Any]:
    """Returns `jax.jit(fn, **how)` with what suits a step."""
    own = _choose_options(program, platform, is_partitioned=split is not None)
    chosen = {**own, **(options or {})}
    compiled = jax.jit(fn, compiler_options=chosen or None, **how)
    if split is not None:
        has_convolutions = any(_find(program, _CONVOLUTION))
        return partition(compiled, split) if has_convolutions else compiled
    names = _CONVOLUTION, _POOL_GRADIENT
    if platform == PLATFORM and any(_find(program, *names)) and has_rules():
        return Lowered(compiled, canonically)
    return compiled


def has_slow_loop(
    program: core.ClosedJaxpr, platform: str, *, is_partitioned: bool = False
) -> bool:
    """Returns whether a step is much slower inside a loop on the device.

    XLA's CPU compiler optimizes convolutions only in a program's outermost part
    (https://github.com/jax-ml/jax/issues/12868). The gradient of one inside a loop runs
    ten times slower, unless `_convolutions` has a form that needs no optimizing.
    """
    if platform != PLATFORM:
        return False
    convolutions = list(_find(program, _CONVOLUTION))
    if not convolutions:
        return False
    is_lowered = not is_partitioned and has_rules()
    return not all(_is_fast(equation, is_lowered) for equation in convolutions)


def _choose_options(
    program: core.ClosedJaxpr, platform: str, *, is_partitioned: bool
) -> dict[str, Any]:
    if platform != PLATFORM or not any(_find(program, _CONVOLUTION)):
        return {}
    if has_slow_loop(program, platform, is_partitioned=is_partitioned):
        return {}
    return {
        name: value
        for name, value in YNNPACK_FOR_SUMS.items()
        if _is_known(name, value)
    }


def partition(compiled: Callable[..., Any], split: Split) -> Lowered:
    """Returns a program, perhaps with convolutions, that XLA divides rightly."""
    if not has_rules():
        raise RuntimeError(
            f"JAX {jax.__version__} keeps its lowering rules in a way that is not "
            "known here, and convolutions would have wrong gradients under "
            "`ShardedStrategy`. Use a version of JAX that Armillary names in its "
            "dependencies, or `MirroredStrategy`."
        )
    return Lowered(compiled, functools.partial(partitioned, split))


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    """Returns whether this version of XLA has an option of its CPU compiler."""
    compiled = jax.jit(lambda: 0, compiler_options={name: value})
    with jax.default_device(jax.local_devices(backend=PLATFORM)[0]):
        try:
            compiled.lower().compile()
        except jax.errors.JaxRuntimeError:
            return False
    return True


def _find(program: core.ClosedJaxpr, *names: str) -> Iterator[core.JaxprEqn]:
    for jaxpr, _ in walk_programs(program):
        for equation in jaxpr.eqns:
            if equation.primitive.name in names:
                yield equation


def _is_fast(equation: core.JaxprEqn, is_lowered: bool) -> bool:
    """Returns whether a convolution is as fast in a loop as outside of it."""
    values = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    if is_lowered and choose_form(equation.params, *values) is not Form.UNCHANGED:
        return True
    return is_ordered(equation.params) and equation.params["batch_group_count"] == 1
