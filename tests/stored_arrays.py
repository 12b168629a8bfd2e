"""The arrays in a checkpoint, as Orbax describes them.

The sizes of its files do not tell which arrays it has: on a busy machine, the index of
the arrays is written several times.
"""

import json
import os
from pathlib import Path


def list_stored_arrays(checkpoint: str | os.PathLike[str]) -> set[str]:
    """Returns the paths of the arrays whose values are in a checkpoint."""
    file = Path(checkpoint) / "arrays" / "_METADATA"
    arrays = json.loads(file.read_text())["tree_metadata"].values()
    return {"/".join(key["key"] for key in each["key_metadata"]) for each in arrays}
