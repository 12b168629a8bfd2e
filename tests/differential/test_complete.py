"""Nothing public is left out: a new optimizer, layer or function must get a case."""

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest
from flax import nnx

from tests.differential.page import PAGE, STAMP, make_stamp, read_stamp, render
from tests.differential.suite import CASES

COVERED = {
    name
    for case in CASES
    for name in (*re.findall(r"[A-Za-z_][\w.]*", case.name), *case.covers)
}

# Names without a case, by the reason and the module.
WITHOUT_A_CASE: dict[str, dict[str, str]] = {
    "works on pytrees outside a step, or is what other cases call all the time": {
        "optax": """
            bias_correction global_norm init_empty_state safe_increment
            safe_int32_increment tree_map_params update_infinity_moment update_moment
            update_moment_per_elem_norm MaskOrFn OptState Params ScalarOrSchedule
            Updates Schedule
        """,
    },
    "is like the other projections": {"optax.projections": "projection_vector"},
    "is a type or describes one": {
        "optax.perturbations": "Gumbel Normal",
        "jax": """
            Array CompilerEffortLevel Device NamedSharding P Ref ShapeDtypeStruct Shard
            typeof ds
        """,
        "jax.random": "Key key_dtype key_impl",
        "nnx": "Module RNNCellBase Carry StateAxes",
        "nnx.metrics": "Metric MetricState Pytree Variable",
    },
    "is about devices, arrays of several devices or the process": {
        "jax": """
            block_until_ready clear_caches copy_to_host_async default_backend
            default_device device_count device_get device_put devices effects_barrier
            host_count host_id host_ids live_arrays local_device_count local_devices
            make_array_from_callback make_array_from_process_local_data
            make_array_from_single_device_arrays make_mesh process_count process_index
            process_indices print_environment_info array_garbage_collection_guard
            thread_guard get_abstract_mesh get_mesh use_abstract_mesh
        """,
    },
    "spreads over devices by itself: `Strategy.run` does that": {
        "jax": "pmap shard_map smap reshard set_mesh",
        "nnx": "shard_map pmap StateSharding transform_metadata",
    },
    "is a setting of the process, and changes no step": {
        "jax": """
            allow_f16_reductions auto_pcast check_tracer_leaks default_prng_impl
            enable_checks enable_custom_prng enable_x64 ensure_compile_time_eval
            explain_cache_misses legacy_prng_key jax2tf_associative_scan_reductions
            log_compiles make_user_context no_execution no_tracing
            numpy_dtype_promotion numpy_rank_promotion
            remove_size_one_mesh_axis_from_type softmax_custom_jvp
            threefry_partitionable transfer_guard transfer_guard_device_to_device
            transfer_guard_device_to_host transfer_guard_host_to_device
        """,
        "jax.nn": "get_scaled_dot_general_config",
    },
    "is a part of `jax.new_ref` or `jax.vjp`": {
        "jax": "empty_ref free_ref freeze fwd_and_bwd",
    },
    "needs a GPU": {"jax.nn": "scaled_matmul"},
    "is what `Welford.compute` returns": {"nnx.metrics": "Statistics"},
    "is `jax.experimental.checkify` for models": {"nnx": "checkify"},
    "looks at a model, and changes nothing": {"nnx": "make_jaxpr"},
}
EXCUSED = {
    f"{module}.{name}"
    for modules in WITHOUT_A_CASE.values()
    for module, names in modules.items()
    for name in names.split()
}
MODULES_OF_JAX = ("jax.nn", "jax.random", "jax.ops")


def public(module: Any) -> list[str]:
    """Returns the names of the functions and classes of a module."""
    return [
        name
        for name, value in vars(module).items()
        if name[0] != "_" and callable(value) and not inspect.ismodule(value)
    ]


def missing(prefix: str, names: list[str]) -> list[str]:
    """Returns the names that have neither a case nor a reason."""
    full = [f"{prefix}.{name}" for name in names]
    return [name for name in full if name not in COVERED and name not in EXCUSED]


def _factories(module: Any) -> list[str]:
    """Returns functions, and classes that are no mere state or type."""
    return [
        name
        for name in public(module)
        if not inspect.isclass(getattr(module, name))
        or hasattr(getattr(module, name), "gradient_transformation")
    ]


def _own_factories(module: Any) -> list[str]:
    return [name for name in _factories(module) if not hasattr(optax, name)]


def _classes(module: Any, kind: type = object) -> list[str]:
    named = [(name, getattr(module, name)) for name in public(module)]
    return [n for n, each in named if inspect.isclass(each) and issubclass(each, kind)]


def _transformations() -> list[str]:
    homes = [(name, getattr(nnx, name).__module__) for name in public(nnx)]
    of_flax = ("flax.nnx.transforms", "flax.linen.pooling")
    return [name for name, home in homes if home.startswith(of_flax)]


OWN_OF_OPTAX = "contrib losses projections second_order assignment perturbations"
NEEDED: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "factories of Optax": ("optax", lambda: _factories(optax)),
    "layers of NNX": ("nnx", lambda: _classes(nnx, nnx.Module)),
    "transformations of NNX": ("nnx", _transformations),
    "metrics of NNX": ("nnx.metrics", lambda: _classes(nnx.metrics)),
    "transformations of JAX": ("jax", lambda: public(jax)),
    **{
        f"factories of Optax's {name}": (
            f"optax.{name}",
            lambda name=name: _own_factories(getattr(optax, name)),
        )
        for name in OWN_OF_OPTAX.split()
    },
}


@pytest.mark.parametrize("what", NEEDED)
def test_everything_public_has_a_case(what):
    prefix, find = NEEDED[what]
    assert not missing(prefix, find())


@pytest.mark.parametrize("name", MODULES_OF_JAX)
def test_every_function_of_a_module_of_jax_has_a_case(name):
    assert not missing(name, public(importlib.import_module(name)))


def test_a_reason_is_given_only_where_there_is_no_case():
    assert not sorted(COVERED & EXCUSED)


def test_the_page_lists_the_cases():
    assert PAGE.read_text() == render(read_stamp()), (
        "Run `make differential` to write the page again."
    )


def test_the_page_says_when_and_with_which_releases_it_was_measured():
    assert read_stamp()
    assert STAMP.fullmatch(make_stamp())
