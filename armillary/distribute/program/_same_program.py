"""Compares a traced program between processes, before it first runs.

Processes that run different programs wait for each other in different places, for ever.
"""

import hashlib
import itertools
import json
import re
from typing import Any

from armillary.cluster._peers import Peers
from armillary.errors import PeerError

_CONTEXT_LINES = 3


def check_same_program(peers: Peers, name: str, program: Any) -> None:
    """Raises if the processes have traced different programs."""
    # Addresses of Python objects differ where nothing else does.
    lines = re.sub(r"0x[0-9a-f]+", "0x", str(program)).splitlines()
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(peers.gather(f"the program of {name}", digest))) == 1:
        return
    marks = json.dumps(
        [hashlib.sha256(line.encode()).hexdigest()[:8] for line in lines]
    )
    everyone = map(json.loads, peers.gather(f"the lines of {name}", marks))
    columns = itertools.zip_longest(*everyone)
    start = next(i for i, column in enumerate(columns) if len(set(column)) > 1)
    shown = "\n".join(lines[start : start + _CONTEXT_LINES]) or "(it ends before)"
    texts = peers.gather(f"where {name} differs", shown)
    parts = "\n".join(
        f"process {index} of {peers.count}, from line {start + 1}:\n{text}"
        for index, text in enumerate(texts)
    )
    raise PeerError(
        f"`{name}` is traced to different programs in different processes, which would "
        f"wait for each other for ever:\n{parts}\n"
        "Let nothing in the step depend on the process: `jax.process_index()`, the "
        "host's name, the time, or an argument that only some processes were given."
    )
