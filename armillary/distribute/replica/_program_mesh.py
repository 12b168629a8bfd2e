"""Leaves the mesh of a program (`jax.set_mesh`) where a strategy has its own.

JAX refuses a computation whose devices or axes are not in the mesh of the context.
Inside `run`, trainers and evaluators a strategy decides both, so the
program's mesh must not reach in there.
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
    # In a trace, the context of what is traced is decided already.
    if is_in_trace():
        return nullcontext()
    mesh = jax.sharding.get_mesh()
    return nullcontext() if mesh.empty or mesh == own else jax.set_mesh(_NO_MESH)
