"""Compares values between processes that must have the same ones.

Other rows, or another order of them, would train without any error: each process gives
its replicas their part of what it takes for the global batch. So would other state.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from armillary._checks import list_lines
from armillary.cluster._peers import Peers
from armillary.data.sources._indexed import IndexedDataset
from armillary.distribute._global_arrays import is_divided, is_key
from armillary.errors import PeerError

_OPTIONS = ("batch_size", "repeat", "drop_remainder")


def check_same_state(peers: Peers, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raises if values that must be equal on all processes are not."""
    own = dict(zip(paths, map(describe_value, leaves), strict=True))
    differing, num_names = find_differences(peers, "state", own)
    if not differing:
        return
    raise PeerError(
        f"{len(differing)} of {num_names} arrays of the state differ between "
        "processes, but each process must begin with the same values:\n"
        f"{_list(differing)}\n"
        "Use the same random seed on all processes (`nnx.Rngs(0)`), and take nothing "
        "into the state that depends on the process, such as the time."
    )


def check_same_arguments(peers: Peers, values: Mapping[str, Any]) -> None:
    """Raises if what a function of a strategy was given differs between processes."""
    own = {name: describe_value(value) for name, value in values.items()}
    differing, _ = find_differences(peers, "what `reduce` or `gather` is given", own)
    if differing:
        raise PeerError(
            "`strategy.reduce` or `strategy.gather` was given values that all replicas "
            "share, but they differ between processes, which would get different "
            f"results:\n{_list(differing)}\n"
            "Compute them from the same values in all processes. A value of each "
            "replica's own is what `strategy.run` returns for batches, or "
            "`strategy.distribute_values_from_function`."
        )


def check_same_data(peers: Peers, dataset: IndexedDataset) -> None:
    """Raises if a data set for all processes is not the same in each."""
    own = {name: repr(getattr(dataset, name)) for name in _OPTIONS}
    own |= {name: str(value) for name, value in dataset.order_of_examples.items()}
    differing, _ = find_differences(peers, "a data set for all", own)
    if differing:
        raise PeerError(
            "A data set that is distributed over all processes is not the same in "
            f"each:\n{_list(differing)}\n"
            "Give all of them the same data, `batch_size` and `shuffle_seed`. Where "
            "each reads data of its own, use a function with an `input_context` "
            "(`make_distributed_dataset`)."
        )


def find_differences(
    peers: Peers, topic: str, own: dict[str, str]
) -> tuple[dict[str, str], int]:
    """Returns what each process has for the names that differ, and how many are all."""
    everyone = [json.loads(text) for text in peers.gather(topic, json.dumps(own))]
    names = dict.fromkeys(name for each in everyone for name in each)
    differing = {
        name: ", ".join(
            f"process {index} has {each.get(name, 'no such array')}"
            for index, each in enumerate(everyone)
        )
        for name in names
        if len({each.get(name) for each in everyone}) > 1
    }
    return differing, len(names)


def describe_value(array: Any) -> str:
    """Returns type, shape and a fingerprint.

    An array of which each process has a part is equal by the way that it was made.
    """
    if is_key(array):
        array = jax.random.key_data(array)
    if is_divided(array):
        return f"{array.dtype.name} {array.shape}"
    values = np.ascontiguousarray(array)
    data = values.reshape(-1).view(np.uint8).data
    digest = hashlib.blake2b(data, digest_size=6).hexdigest()
    return f"{values.dtype.name} {tuple(np.shape(array))} #{digest}"


def _list(differing: Mapping[str, str]) -> str:
    return list_lines(f"{name}: {text}" for name, text in differing.items())
