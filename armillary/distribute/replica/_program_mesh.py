"""Unsets the mesh of a program (`jax.set_mesh`) where a strategy uses its own mesh.

JAX refuses a computation whose devices or axes are not in the mesh of the context.
Inside `run`, trainers and evaluators, a strategy decides both, so the program's mesh
must not be in effect there.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from armillary._jaxpr import is_in_trace

_NO_MESH = Mesh(np.empty((), object), ())


def without_program_mesh() -> AbstractContextManager[Any]:
    """Returns a context without the mesh of the program."""
    # Inside a trace, the mesh can no longer be changed.
    if is_in_trace():
        return nullcontext()
    mesh = jax.sharding.get_mesh()
    return nullcontext() if mesh.empty else jax.set_mesh(_NO_MESH)


def within_mesh(mesh: Mesh | AbstractMesh) -> AbstractContextManager[Any]:
    """Returns a context with a mesh, also in a trace.

    Inside, a `PartitionSpec` alone is enough for `jax.lax.with_sharding_constraint`.
    """
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    if is_in_trace():
        return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    return jax.set_mesh(mesh)
