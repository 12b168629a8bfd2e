"""Checks, before steps run, that all processes have the same to run.

A process without data, or with batches of another shape, would leave the others waiting
in the middle of a program. So they compare what they have before each chunk.
"""

from collections.abc import Sequence

from armillary.cluster._peers import Peers
from armillary.data import Chunk, HostBatch, describe_shapes
from armillary.errors import PeerError


def check_same_start(
    peers: Peers, name: str, batches: Sequence[HostBatch | None]
) -> None:
    """Raises if some processes have a first batch of each dataset, and some have not.

    Raises:
        PeerError: If they differ.
    """
    found = [
        f"no batch of dataset {index}"
        for index, batch in enumerate(batches)
        if batch is None
    ]
    _check(peers, name, ", ".join(found) or "a batch of each dataset")


def check_same_chunk(peers: Peers, name: str, chunk: Chunk | None) -> None:
    """Raises if the processes have different chunks to run.

    Raises:
        PeerError: If they differ in the number of steps, or in shapes.
    """
    if chunk is None:
        text = "no more data"
    else:
        shapes = "; ".join(describe_shapes(types) for types in chunk.types)
        active = ", ".join(map(str, chunk.num_active))
        text = f"{chunk.num_steps} steps of {shapes}; replicas with data: {active}"
    _check(peers, name, text)


def _check(peers: Peers, name: str, text: str) -> None:
    texts = peers.gather(f"the data of {name}", text)
    if len(set(texts)) == 1:
        return
    shown = "\n".join(
        f"  process {index} of {peers.count}: {text}"
        for index, text in enumerate(texts)
    )
    raise PeerError(
        f"The processes have different data for `{name}`:\n{shown}\n"
        "A data set that is distributed over all processes must be the same on each, "
        "in the same order. Where each reads data of its own, use a function with an "
        "`input_context` (`make_distributed_dataset`)."
    )
