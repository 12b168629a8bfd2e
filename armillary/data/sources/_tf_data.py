"""`tf.data.Dataset` as a source.

It has no positions: TensorFlow saves an iterator as files, with all that its buffers
hold, and that after each batch. Nothing here imports TensorFlow.
"""

import sys
from typing import Any

import jax

from armillary._checks import list_lines
from armillary.data.sources._iterable import IterableSource

_FIXES = {
    "RaggedTensorSpec": "ragged; pad it with `padded_batch` or `to_tensor`",
    "SparseTensorSpec": "sparse; use `tf.sparse.to_dense`",
    "string": "strings; decode or remove them",
}


def as_tf_data_source(source: Any) -> IterableSource | None:
    """Returns a source if `source` is a `tf.data.Dataset`, or None."""
    data = getattr(sys.modules.get("tensorflow"), "data", None)
    if data is None or not isinstance(source, data.Dataset):
        return None
    _check_elements(source.element_spec)
    # Its arrays share the memory of tensors, which nobody writes to.
    made = IterableSource(source.as_numpy_iterator, "tf.data.Dataset", copies=False)
    count = int(source.cardinality())
    made.is_endless = count == data.INFINITE_CARDINALITY
    made.num_batches = count if count >= 0 else None
    return made


def _check_elements(spec: Any) -> None:
    wrong = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        problem = _find_problem(leaf)
        if problem is not None:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            wrong.append(f"{name or '(root)'}: {problem}")
    if wrong:
        raise TypeError(
            "The `tf.data.Dataset` gives elements that are no batches of numbers:\n"
            f"{list_lines(wrong)}\nChange them in the data set, with `map` or `batch`."
        )


def _find_problem(spec: Any) -> str | None:
    kind = type(spec).__name__
    dtype = getattr(getattr(spec, "dtype", None), "name", "")
    if kind in _FIXES or dtype in _FIXES:
        return _FIXES.get(kind) or _FIXES[dtype]
    if kind == "NoneTensorSpec":
        return None  # JAX leaves it out, too.
    if kind != "TensorSpec":
        return f"{kind}; use tensors"
    if spec.shape.rank == 0:
        return "one value without a batch axis; use `dataset.batch(batch_size)`"
    return None
