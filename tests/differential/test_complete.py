"""Nothing public is left out: a new optimizer, layer or function must get a case."""

import importlib
import inspect
import re
from typing import Any

import jax
import jax.scipy.stats
import optax
import pytest
from flax import nnx

from tests.differential.page import PAGE, render
from tests.differential.suite import CASES

COVERED = {
    name
    for case in CASES
    for name in (*re.findall(r"[A-Za-z_][\w.]*", case.name), *case.covers)
}

ABOUT_TREES = (
    "works on pytrees outside a step, or is what other cases call all the time"
)
ABOUT_DEVICES = "is about devices, arrays of several devices or the process"
ABOUT_TYPES = "is a type or describes one"
SETTING = "is a setting of the process, and changes no step"
ON_MESHES = "spreads over devices by itself: `Strategy.run` does that"
INSPECTS = "looks at a model, and changes nothing"
DEPRECATED = "is deprecated in favor of `optax.tree`"
NNX_CORE = "is how NNX itself splits and merges models, in every case with a model"

REASONS: dict[str, str] = {
    **dict.fromkeys(
        [
            "optax.bias_correction",
            "optax.global_norm",
            "optax.init_empty_state",
            "optax.safe_increment",
            "optax.safe_int32_increment",
            "optax.tree_map_params",
            "optax.update_infinity_moment",
            "optax.update_moment",
            "optax.update_moment_per_elem_norm",
            "optax.MaskOrFn",
            "optax.OptState",
            "optax.Params",
            "optax.ScalarOrSchedule",
            "optax.Updates",
            "optax.Schedule",
        ],
        ABOUT_TREES,
    ),
    "optax.value_and_grad_from_state": (
        "reuses the loss of a line search, which sees the loss of one replica"
    ),
    "optax.projections.projection_vector": "is like the other projections",
    "optax.second_order.fisher_diag": "needs the whole batch at once",
    "optax.second_order.hessian_diag": "needs the whole batch at once",
    "optax.perturbations.Gumbel": ABOUT_TYPES,
    "optax.perturbations.Normal": ABOUT_TYPES,
    **dict.fromkeys(
        [
            "jax.Array",
            "jax.Device",
            "jax.NamedSharding",
            "jax.P",
            "jax.Ref",
            "jax.ShapeDtypeStruct",
            "jax.Shard",
            "jax.typeof",
            "jax.ds",
        ],
        ABOUT_TYPES,
    ),
    **dict.fromkeys(
        [
            "jax.block_until_ready",
            "jax.clear_caches",
            "jax.copy_to_host_async",
            "jax.default_backend",
            "jax.default_device",
            "jax.device_count",
            "jax.device_get",
            "jax.device_put",
            "jax.devices",
            "jax.effects_barrier",
            "jax.host_count",
            "jax.host_id",
            "jax.host_ids",
            "jax.live_arrays",
            "jax.local_device_count",
            "jax.local_devices",
            "jax.make_array_from_callback",
            "jax.make_array_from_process_local_data",
            "jax.make_array_from_single_device_arrays",
            "jax.make_mesh",
            "jax.process_count",
            "jax.process_index",
            "jax.process_indices",
            "jax.print_environment_info",
            "jax.array_garbage_collection_guard",
            "jax.thread_guard",
        ],
        ABOUT_DEVICES,
    ),
    **dict.fromkeys(
        [
            "jax.pmap",
            "jax.shard_map",
            "jax.smap",
            "jax.reshard",
            "jax.set_mesh",
            "nnx.shard_map",
            "nnx.pmap",
            "nnx.StateSharding",
            "nnx.transform_metadata",
        ],
        ON_MESHES,
    ),
    **dict.fromkeys(
        [
            "jax.allow_f16_reductions",
            "jax.auto_pcast",
            "jax.check_tracer_leaks",
            "jax.default_prng_impl",
            "jax.enable_checks",
            "jax.enable_custom_prng",
            "jax.enable_x64",
            "jax.ensure_compile_time_eval",
            "jax.explain_cache_misses",
            "jax.legacy_prng_key",
            "jax.jax2tf_associative_scan_reductions",
            "jax.log_compiles",
            "jax.make_user_context",
            "jax.no_execution",
            "jax.no_tracing",
            "jax.numpy_dtype_promotion",
            "jax.numpy_rank_promotion",
            "jax.remove_size_one_mesh_axis_from_type",
            "jax.softmax_custom_jvp",
            "jax.threefry_partitionable",
            "jax.transfer_guard",
            "jax.transfer_guard_device_to_device",
            "jax.transfer_guard_device_to_host",
            "jax.transfer_guard_host_to_device",
        ],
        SETTING,
    ),
    **dict.fromkeys(
        ["jax.empty_ref", "jax.free_ref", "jax.freeze", "jax.fwd_and_bwd"],
        "is a part of `jax.new_ref` or `jax.vjp`",
    ),
    "jax.nn.get_scaled_dot_general_config": SETTING,
    "jax.nn.scaled_matmul": "needs a GPU",
    "jax.random.key_dtype": ABOUT_TYPES,
    "jax.random.key_impl": ABOUT_TYPES,
    "jax.scipy.optimize.OptimizeResults": ABOUT_TYPES,
    **{
        f"jax.scipy.linalg.{name}": "makes a constant matrix of a given size"
        for name in [
            "dft",
            "hadamard",
            "helmert",
            "hilbert",
            "invhilbert",
            "invpascal",
            "pascal",
        ]
    },
    **dict.fromkeys(
        [
            "nnx.Module",
            "nnx.RNNCellBase",
            "nnx.Carry",
            "nnx.StateAxes",
            "nnx.metrics.Metric",
            "nnx.metrics.MetricState",
            "nnx.metrics.Pytree",
            "nnx.metrics.Variable",
        ],
        ABOUT_TYPES,
    ),
    "nnx.metrics.Statistics": "is what `Welford.compute` returns",
    "nnx.checkify": "is `jax.experimental.checkify` for models",
    "nnx.make_jaxpr": INSPECTS,
}
STATE_TYPE = re.compile(r"State$|^\w+Info$|^MuonDim|^GaLoreDim|^WrappedSchedule$")


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
    return [name for name in full if name not in COVERED and name not in REASONS]


def _factories(module: Any) -> list[str]:
    """Returns functions, and classes that are no mere state or type."""
    return [
        name
        for name in public(module)
        if not inspect.isclass(getattr(module, name))
        or hasattr(getattr(module, name), "gradient_transformation")
    ]


@pytest.mark.parametrize(
    "name",
    ["contrib", "losses", "projections", "second_order", "assignment", "perturbations"],
)
def test_every_factory_of_a_module_of_optax_has_a_case(name):
    own = [n for n in _factories(getattr(optax, name)) if not hasattr(optax, n)]
    assert not missing(f"optax.{name}", own)


def test_every_factory_of_optax_has_a_case():
    assert not missing("optax", _factories(optax))


def test_every_layer_of_nnx_has_a_case():
    layers = [
        name
        for name in public(nnx)
        if inspect.isclass(getattr(nnx, name))
        and issubclass(getattr(nnx, name), nnx.Module)
    ]
    assert not missing("nnx", layers)


def test_every_transformation_of_nnx_has_a_case():
    names = [
        name
        for name in public(nnx)
        if getattr(nnx, name).__module__.startswith("flax.nnx.transforms")
        or getattr(nnx, name).__module__ == "flax.linen.pooling"
    ]
    assert not missing("nnx", names)


def test_every_metric_of_nnx_has_a_case():
    names = [
        name
        for name in public(nnx.metrics)
        if inspect.isclass(getattr(nnx.metrics, name))
    ]
    assert not missing("nnx.metrics", names)


def test_every_transformation_of_jax_has_a_case():
    assert not missing("jax", public(jax))


@pytest.mark.parametrize(
    "name",
    [
        "jax.nn",
        "jax.random",
        "jax.ops",
        "jax.numpy.linalg",
        "jax.numpy.fft",
        "jax.scipy.special",
        "jax.scipy.linalg",
        "jax.scipy.signal",
        "jax.scipy.ndimage",
        "jax.scipy.stats",
        "jax.scipy.fft",
        "jax.scipy.optimize",
        "jax.scipy.sparse.linalg",
        "jax.scipy.interpolate",
        "jax.scipy.integrate",
        "jax.scipy.cluster.vq",
        "jax.scipy.spatial.transform",
    ],
)
def test_every_function_of_a_module_of_jax_has_a_case(name):
    prefix = name.replace("jax.numpy", "jnp")
    assert not missing(prefix, public(importlib.import_module(name)))


def test_every_distribution_of_jax_has_a_case_for_each_function():
    for distribution, module in vars(jax.scipy.stats).items():
        if inspect.ismodule(module):
            assert not missing(f"jax.scipy.stats.{distribution}", public(module))


def test_a_reason_is_given_only_where_there_is_no_case():
    assert not sorted(COVERED & REASONS.keys())


def test_the_page_lists_the_cases():
    assert PAGE.read_text() == render(), (
        "Run `make differential` to write the page anew."
    )
