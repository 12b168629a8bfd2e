"""Compares values between processes that must have the same ones.

Other rows, or another order of them, would train without any error: each process gives
its replicas their part of what it takes for the global batch. So would other state.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from armillary._checks import list_lines
from armillary.cluster._peers import Peers
from armillary.data.sources._batch import check_batch
from armillary.data.sources._indexed import IndexedDataset
from armillary.distribute._global_arrays import is_key
from armillary.errors import PeerError

_MOST_ROWS = 64
_OPTIONS = (
    "num_examples",
    "batch_size",
    "shuffle_seed",
    "repeat",
    "drop_remainder",
)


def check_same_state(peers: Peers, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raises if values that must be equal on all processes are not."""
    own = dict(zip(paths, map(_describe, leaves), strict=True))
    lines, num_names = _find_differences(peers, "state", own)
    if not lines:
        return
    raise PeerError(
        f"{len(lines)} of {num_names} arrays of the state differ between processes, "
        f"but each process must begin with the same values:\n{list_lines(lines)}\n"
        "Use the same random seed on all processes (`nnx.Rngs(0)`), and take nothing "
        "into the state that depends on the process, such as the time."
    )


def check_same_data(peers: Peers, dataset: IndexedDataset) -> None:
    """Raises if a data set for all processes is not the same in each.

    Some rows are compared, evenly spaced.
    """
    own = {name: repr(getattr(dataset, name)) for name in _OPTIONS}
    num_rows = min(_MOST_ROWS, dataset.num_examples)
    rows = np.linspace(0, dataset.num_examples - 1, num_rows).astype(np.int64)
    batch, _ = check_batch(dataset.read_rows(rows), lambda: "A batch of the data set")
    for path, array in jax.tree_util.tree_leaves_with_path(batch):
        shape = (dataset.num_examples, *array.shape[1:])
        own[f"array {jax.tree_util.keystr(path)}"] = _describe(array, shape)
    lines, _ = _find_differences(peers, "a data set for all", own)
    if lines:
        raise PeerError(
            "A data set that is distributed over all processes is not the same in "
            f"each:\n{list_lines(lines)}\n"
            "Give all of them the same data, `batch_size` and `shuffle_seed`. Where "
            "each reads data of its own, use a function with an `input_context` "
            "(`make_distributed_dataset`)."
        )


def _find_differences(
    peers: Peers, topic: str, own: dict[str, str]
) -> tuple[list[str], int]:
    """Returns a line for each name that differs, and the number of all names."""
    everyone = [json.loads(text) for text in peers.gather(topic, json.dumps(own))]
    names = list(dict.fromkeys(name for each in everyone for name in each))
    lines = [
        f"{name}: "
        + ", ".join(
            f"process {index} has {each.get(name, 'no such array')}"
            for index, each in enumerate(everyone)
        )
        for name in names
        if len({each.get(name) for each in everyone}) > 1
    ]
    return lines, len(names)


def _describe(array: Any, shape: tuple[int, ...] | None = None) -> str:
    """Returns type, shape and a fingerprint; `shape` is that of all, not of some."""
    if is_key(array):
        array = jax.random.key_data(array)
    values = np.ascontiguousarray(array)
    digest = hashlib.blake2b(values.tobytes(), digest_size=6).hexdigest()
    return f"{values.dtype.name} {shape or tuple(np.shape(array))} #{digest}"
