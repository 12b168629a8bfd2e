"""Compares values that must be equal in all processes.

If processes have different programs, constants or rows, results are wrong without any
error, or the processes wait forever.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from armillary._checks import list_lines
from armillary.cluster._peers import Peers
from armillary.data.sources._arrays import IndexedDataset
from armillary.distribute._global_arrays import (
    is_divided,
    is_key,
)
from armillary.errors import PeerError
from armillary.state._captured import find_constants, print_program
from armillary.state._holders import captured

_TOPICS = {
    "state": (
        "Arrays of the state differ between processes",
        "Begin with the same values: use the same random seed on all processes "
        "(`nnx.Rngs(0)`, `keras.utils.set_random_seed(0)`), and nothing that depends "
        "on the process.",
    ),
    "the values for `reduce` or `gather`": (
        "`strategy.reduce` or `strategy.gather` was given values that all replicas "
        "share, but they differ between processes",
        "Compute them from the same values in all processes. For a different value on "
        "each replica, use the results of `strategy.run` for batches.",
    ),
    "a dataset for all": (
        "A dataset that is distributed over all processes is not the same in each",
        "Give all processes the same data, `batch_size` and `shuffle_seed`. If each "
        "process reads data of its own, use a function with an `input_context` "
        "(`make_distributed_dataset`).",
    ),
}
"""For each topic of a comparison: the meaning of a difference, and the advice."""


def check_same(peers: Peers, topic: str, values: Mapping[str, Any]) -> None:
    """Raises if arrays, or texts, of a topic differ between processes."""
    own: dict[str, str] = {}
    for name, value in values.items():
        own[name] = value if isinstance(value, str) else _as_text(value)
    differing = _find_differing(peers, topic, own)
    if differing:
        problem, fix = _TOPICS[topic]
        raise PeerError(f"{problem}:\n{_list(differing)}\n{fix}")


def check_same_data(peers: Peers, dataset: IndexedDataset) -> None:
    """Raises if a dataset that all processes share differs between them."""
    options = {name: repr(value) for name, value in dataset.shared_options.items()}
    order = {name: str(value) for name, value in dataset.order_of_examples.items()}
    check_same(peers, "a dataset for all", options | order)


def _find_differing(peers: Peers, topic: str, own: dict[str, str]) -> dict[str, str]:
    """Returns the values that differ between processes, each with all its forms.

    Args:
        peers: The processes.
        topic: The topic, which must be the same in all processes.
        own: The values of this process, by name.
    """
    texts = peers.gather(topic, json.dumps(own))
    everyone = [json.loads(text) for text in texts]
    # A process may have values that another one lacks.
    names: dict[str, None] = {}
    for peer in everyone:
        names.update(dict.fromkeys(peer))

    differing: dict[str, str] = {}
    for name in names:
        found = [peer.get(name) for peer in everyone]
        if len(set(found)) == 1:
            continue
        shown: list[str] = []
        for index, text in enumerate(found):
            held = "no such array" if text is None else text
            shown.append(f"process {index} has {held}")
        differing[name] = ", ".join(shown)
    return differing


def _as_text(array: Any) -> str:
    """Returns dtype, shape and, if this process has the full array, a fingerprint."""
    if is_key(array):
        array = jax.random.key_data(array)
    if is_divided(array):
        return f"{array.dtype.name} {array.shape}"
    # `ascontiguousarray` makes an axis for a scalar, so the shape is not taken from it.
    values = np.ascontiguousarray(array)
    data = values.reshape(-1).view(np.uint8).data
    digest = hashlib.blake2b(data, digest_size=6).hexdigest()
    shape = tuple(np.shape(array))
    return f"{values.dtype.name} {shape} #{digest}"


def _list(differing: Mapping[str, str]) -> str:
    return list_lines(f"{name}: {text}" for name, text in differing.items())


def check_same_program(
    peers: Peers,
    name: str,
    program: core.ClosedJaxpr,
    fn: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Raises if programs, constants or arguments of `fn` differ between processes."""
    lines = print_program(program).splitlines()
    names = {id(value): f"`{key}`" for key, value in captured(fn)}
    values: dict[str, str] = {}
    for number, constant in enumerate(find_constants(program)):
        constant_name = names.get(id(constant), "a constant")
        values[f"{constant_name} ({number})"] = _as_text(constant)
    for key, value in (arguments or {}).items():
        values[f"`{key}`"] = _as_text(value)

    content = json.dumps([lines, *values.values()])
    digest = hashlib.sha256(content.encode()).hexdigest()
    digests = peers.gather(f"the program of {name}", digest)
    if len(set(digests)) == 1:
        return

    # Checksums first, because a program may have a hundred thousand lines.
    sums = {str(i): f"{zlib.crc32(line.encode()):x}" for i, line in enumerate(lines)}
    differing = _find_differing(peers, f"the lines of {name}", sums)
    if differing:
        first = int(next(iter(differing)))
        # Empty, if the program of this process has fewer lines.
        line = "".join(lines[first : first + 1]).strip()
        own_line = {f"line {first + 1}": line}
        shown = _find_differing(peers, f"where {name} differs", own_line)
        raise PeerError(
            f"`{name}` is traced to different programs in different processes, which "
            "would wait for each other forever:\n"
            f"{_list(shown)}\n"
            "Let nothing in the step depend on the process: `jax.process_index()`, the "
            "host's name, the time, or an argument that only some processes were given."
        )
    differing = _find_differing(peers, f"the constants of {name}", values)
    raise PeerError(
        f"`{name}` computes with different values in different processes, but all must "
        f"have the same:\n{_list(differing)}\n"
        "Values that a step captures, and arguments that all replicas share, must come "
        "from one seed and the same data in all processes. Put values that differ "
        "between replicas into the batches."
    )
