"""Host memory that a CPU device can use as it is.

XLA's CPU client takes an array over without a copy if it begins where it wants arrays
to begin; other devices copy in any case.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

_ALIGNMENT_BYTES = 64


def empty_aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns a new array like `np.empty`, which must not be written to once placed."""
    dtype = np.dtype(dtype)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
