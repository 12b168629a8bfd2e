"""Compiles an exported program for devices that are not there.

It is a separate program, because the compilers for TPUs and GPUs make `import jax` slow
and write to the terminal. It writes the answer next to the request::

    python _compile_worker.py FOLDER  # request.json, program.bin -> answer.json, hlo
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Autotuning and Triton's products need a device for their measurements.
WITHOUT_DEVICE = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    platform = request["platform"]
    name = request["topology"]
    details = {}
    options = request["compiler_options"]
    os.environ["JAX_PLATFORMS"] = "cpu"
    if platform == "cuda":
        details = {"target_config": request["config"], "topology": name}
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import jax
    from jax.experimental import mesh_utils, topologies

    jax.devices("cpu")  # This loads the plugins for other platforms too.
    if platform == "cuda":
        options = {**find_known(WITHOUT_DEVICE), **options}
    topology = topologies.get_topology_desc(
        platform=platform, topology_name=name, **details
    )
    if len(topology.devices) != request["num_devices"]:
        raise ValueError(f"The topology has {len(topology.devices)} devices.")
    shape = tuple(request["mesh_shape"])
    # An axis of the mesh may be a part of an axis of the torus, such as 2 of 16.
    devices = mesh_utils.create_device_mesh(
        shape, list(topology.devices), allow_split_physical_axes=len(shape) > 1
    )
    mesh = jax.sharding.Mesh(devices, tuple(request["mesh_axes"]))
    began = time.perf_counter()
    program = (folder / "program.bin").read_bytes()
    compiled = compile_exported(program, mesh, platform, options)
    seconds = time.perf_counter() - began
    (folder / "hlo.txt").write_text(compiled.as_text())
    found = compiled.memory_analysis()
    memory = {
        "arguments": found.argument_size_in_bytes,
        "donated": found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "outputs": found.output_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
    }
    answer = {"seconds": seconds, "memory": memory}
    (folder / "answer.json").write_text(json.dumps(answer))


def find_known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that this release of XLA knows."""
    import jax

    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    known = {}
    for name, value in options.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            lowered.compile(compiler_options={name: value})
            known[name] = value
    return known


def compile_exported(
    program: bytes, mesh: Any, platform: str, options: Mapping[str, Any]
) -> Any:
    import jax
    from jax import export

    exported = export.deserialize(bytearray(program))
    types = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(
            exported.in_avals, exported.in_shardings_jax(mesh), strict=True
        )
    ]
    args, _ = exported.in_tree.unflatten(types)
    outputs = exported.out_tree.unflatten(exported.out_shardings_jax(mesh))
    fn = jax.jit(
        exported.call,
        donate_argnums=0,
        out_shardings=outputs,
        compiler_options=dict(options) or None,
    )
    lowered = fn.trace(*args).lower(lowering_platforms=(platform,))
    return lowered.compile()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
