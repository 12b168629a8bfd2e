"""Compiles an exported program for devices that are not there.

It is a separate program, because the compilers for TPUs and GPUs make `import jax` slow
and write to the terminal. It writes the answer next to the request::

    python _compile_worker.py FOLDER  # request.json, program.bin -> answer.json, hlo

It also writes XLA's reports on memory, as `peak.txt`.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Autotuning and Triton's products need a device for their measurements.
WITHOUT_DEVICE = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    platform = request["platform"]
    options = request["compiler_options"]
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA reads its flags when it begins, and writes its reports into this folder.
    dump = folder / "dump"
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
    if platform == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import jax

    # XLA writes no reports about a program that JAX finds in its cache.
    jax.config.update("jax_enable_compilation_cache", False)
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", request["num_devices"])
    jax.devices("cpu")  # This loads the plugins for other platforms too.
    if platform == "cuda":
        options = {**find_known(WITHOUT_DEVICE), **options}
    found = find_devices(request)
    if len(found) != request["num_devices"]:
        raise ValueError(f"The topology has {len(found)} devices.")
    devices, islands = arrange(found, request)
    mesh = jax.sharding.Mesh(devices, tuple(request["mesh_axes"]))
    began = time.perf_counter()
    program = (folder / "program.bin").read_bytes()
    compiled = compile_exported(program, mesh, platform, options)
    seconds = time.perf_counter() - began
    (folder / "hlo.txt").write_text(compiled.as_text())
    (folder / "peak.txt").write_text(read_report(dump))
    analysis = compiled.memory_analysis()
    memory = {
        "arguments": analysis.argument_size_in_bytes,
        "donated": analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "code": analysis.generated_code_size_in_bytes,
    }
    answer = {"seconds": seconds, "memory": memory, "islands": islands}
    (folder / "answer.json").write_text(json.dumps(answer))


def find_devices(request: Mapping[str, Any]) -> list[Any]:
    """Returns the described devices; for CPUs, virtual devices of this process."""
    import jax
    from jax.experimental import topologies

    platform = request["platform"]
    name = request["topology"]
    details = {}
    if platform == "cpu":
        return jax.devices("cpu")
    if platform == "cuda":
        details = {"target_config": request["config"], "topology": name}
    if request["num_slices"] > 1:
        details["num_slices"] = request["num_slices"]
    topology = topologies.get_topology_desc(
        platform=platform, topology_name=name, **details
    )
    return list(topology.devices)


def arrange(
    devices: Sequence[Any], request: Mapping[str, Any]
) -> tuple[Any, list[int]]:
    """Returns devices in the shape of the mesh, and the group of each of them.

    The groups have slow links between them: slices of TPUs, or else hosts. If the
    devices are one group, the list is empty.
    """
    from jax.experimental import mesh_utils

    shape = tuple(request["mesh_shape"])
    across = tuple(request["across"])
    if request["platform"] == "cpu":
        return arrange_stand_ins(devices, shape, across, request["num_groups"])

    has_slices = request["num_slices"] > 1
    attribute = "slice_index" if has_slices else "process_index"
    if math.prod(across) > 1:
        inside = [size // count for size, count in zip(shape, across, strict=True)]
        arranged = mesh_utils.create_hybrid_device_mesh(
            inside,
            across,
            devices,
            process_is_granule=not has_slices,
            allow_split_physical_axes=True,
        )
    else:
        # An axis of the mesh may be a part of an axis of the torus, such as 2 of 16.
        arranged = mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=len(shape) > 1
        )
    is_told = has_slices or math.prod(across) > 1
    if request["platform"] == "tpu" and not is_told:
        return arranged, []  # All chips of a slice have fast links.
    return arranged, [getattr(device, attribute) for device in arranged.flat]


def arrange_stand_ins(
    devices: Sequence[Any],
    shape: tuple[int, ...],
    across: tuple[int, ...],
    num_groups: int | None,
) -> tuple[Any, list[int]]:
    """Returns virtual devices as `arrange` does; consecutive ones form a group."""
    import numpy as np

    count = max(num_groups or 1, math.prod(across))
    numbers = np.arange(len(devices))
    if math.prod(across) > 1:
        inside = [size // part for size, part in zip(shape, across, strict=True)]
        # Each axis consists of its groups, and of the devices inside of each.
        num_axes = len(shape)
        order: list[int] = []
        for axis in range(num_axes):
            order += [axis, num_axes + axis]
        numbers = numbers.reshape(*across, *inside).transpose(order)

    arranged = np.asarray(devices)[numbers].reshape(shape)
    islands = numbers.flatten() // (len(devices) // count)
    return arranged, islands.tolist() if count > 1 else []


def read_report(dump: Path) -> str:
    """Returns XLA's reports on the memory of the largest program that it compiled."""
    ending = "buffer-assignment.txt"
    reports = sorted(dump.glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    if not reports:
        return ""
    of_memory = reports[-1]
    # Earlier releases of XLA write the times of values into the same file.
    name = of_memory.name.removesuffix(ending)
    of_values = of_memory.with_name(f"{name}live-range.txt")
    texts = [
        path.read_text(errors="replace")
        for path in (of_memory, of_values)
        if path.exists()
    ]
    return "\n".join(texts)


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
