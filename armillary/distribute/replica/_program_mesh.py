"""Unsets the mesh of a program (`jax.set_mesh`) where a strategy uses its own mesh.

JAX refuses a computation whose devices or axes are not in the mesh of the context.
Inside `run`, trainers and evaluators, a strategy decides both, so the program's mesh
must not be in effect there.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from armillary._jaxpr import is_in_trace

_NO_MESH = Mesh(np.empty((), object), ())


def without_program_mesh(own: Any = None) -> AbstractContextManager[Any]:
    """Returns a context without the mesh of the program, unless it is `own`."""
    # Inside a trace, the mesh can no longer be changed.
    if is_in_trace():
        return nullcontext()
    mesh = jax.sharding.get_mesh()
    return nullcontext() if mesh.empty or mesh == own else jax.set_mesh(_NO_MESH)
