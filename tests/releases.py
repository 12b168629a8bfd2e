"""Which releases the tests run with: `make versions` takes old ones, too."""

import flax
import jax

JAX = jax.__version_info__
FLAX = tuple(map(int, flax.__version__.split(".")[:3]))
