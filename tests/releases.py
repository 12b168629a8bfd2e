"""Facts about the releases of the libraries that the tests run with."""

import flax
import jax

JAX = jax.__version_info__
FLAX = tuple(map(int, flax.__version__.split(".")[:3]))
