"""Unsets the mesh of a program (`jax.set_mesh`) where a strategy uses its own mesh.

JAX refuses a computation whose devices or axes are not in the mesh of the context.
Inside `run`, trainers and evaluators, a strategy decides both, so the program's mesh
must not be in effect there.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from armillary._jaxpr import is_in_trace

_NO_MESH = Mesh(np.empty((), object), ())


def without_program_mesh(own: Any = None) -> AbstractContextManager[Any]:
    """Returns a context without the mesh of the program, unless it is `own`."""
    # Inside a trace, the mesh can no longer be changed.
    if is_in_trace():
        return nullcontext()
    mesh = jax.sharding.get_mesh()
    return nullcontext() if mesh.empty or mesh == own else jax.set_mesh(_NO_MESH)


@contextmanager
def keeping_program_mesh(own: Any) -> Iterator[None]:
    """Restores the mesh of the program at the end, unless it is `own`.

    A strategy that is no longer in effect takes its mesh away. If the program has set
    another mesh in the meantime, it stays.
    """
    mesh = jax.sharding.get_mesh()
    yield
    if mesh != own and mesh != jax.sharding.get_mesh():
        jax.set_mesh(mesh)


@contextmanager
def within_mesh(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Returns a context with a mesh, also in a trace.

    Inside, a `PartitionSpec` alone is enough for `jax.lax.with_sharding_constraint`.
    """
    if is_in_trace():
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    elif isinstance(mesh, Mesh):
        with jax.set_mesh(mesh):
            yield
    else:
        # In a plan, code outside of traces runs on the devices that are present.
        with without_program_mesh():
            yield
