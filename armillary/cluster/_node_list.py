"""The short forms in which Slurm writes lists of nodes and of counts."""

import itertools
import re

from armillary.errors import ClusterError

MAX_NODES = 65_536
"""Slurm's own limit on the nodes of a cluster; more in one list is a typing error."""

TOO_MANY = f"it names more than {MAX_NODES} nodes"

# A name with any number of bracketed ranges, up to a comma outside the brackets.
ITEM = re.compile(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+")
GROUP = re.compile(r"\[([0-9,-]+)\]")
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_nodes(name: str, text: str) -> list[str]:
    """Returns the nodes of a list such as `node[001-003,7],other`, in order.

    Args:
        name: The variable that holds the list.
        text: The list. Bounds with leading zeros are padded to the same width; a name
            may have several bracketed parts, of which the last one runs fastest.

    Raises:
        ClusterError: If the list is malformed.
    """
    nodes: list[str] = []
    for item in _split(name, text):
        # Texts and brackets take turns, beginning and ending with a text.
        parts = GROUP.split(item)
        choices = [
            _expand_ranges(name, text, part) if index % 2 else [part]
            for index, part in enumerate(parts)
        ]
        # The product is bounded before it is made: a typing error must not fill memory.
        combinations = itertools.product(*choices)
        room = MAX_NODES - len(nodes) + 1
        nodes += ["".join(parts) for parts in itertools.islice(combinations, room)]
        if len(nodes) > MAX_NODES:
            raise ClusterError(_say(name, text, TOO_MANY))
    return nodes


def expand_counts(name: str, text: str) -> list[int]:
    """Returns the numbers of a list such as `2(x3),1`: here 2, 2, 2 and 1.

    Raises:
        ClusterError: If the list is malformed.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = COUNT.fullmatch(item.strip())
        if match is None:
            raise ClusterError(
                f"`{name}` is {text!r}, but {item!r} in it is not a number of tasks. "
                "Slurm writes it as `2(x3),1` for three nodes of two tasks and one of "
                "one task; start the program with `srun`."
            )
        repeats = int(match[2] or 1)
        if len(counts) + repeats > MAX_NODES:
            raise ClusterError(
                f"`{name}` is {text!r}, but that is more than {MAX_NODES} nodes. Start "
                "the program with `srun`, which sets it."
            )
        counts += [int(match[1])] * repeats
    return counts


def _split(name: str, text: str) -> list[str]:
    """Returns the items between the commas that are outside brackets.

    Raises:
        ClusterError: If there is something else.
    """
    items: list[str] = []
    position = 0
    while True:
        match = ITEM.match(text, position)
        if match is None:
            problem = f"no node name can be read at column {position + 1}"
            raise ClusterError(_say(name, text, problem))
        items.append(match[0])
        position = match.end()
        if position == len(text):
            return items
        if text[position] != ",":
            problem = f"there should be a comma at column {position + 1}"
            raise ClusterError(_say(name, text, problem))
        position += 1


def _expand_ranges(name: str, text: str, ranges: str) -> list[str]:
    """Returns the numbers in a pair of brackets, padded as the first bound is.

    Raises:
        ClusterError: If they are malformed or too many.
    """
    numbers: list[str] = []
    for item in ranges.split(","):
        match = RANGE.fullmatch(item)
        if match is None:
            problem = f"{item!r} is neither a number nor a range"
            raise ClusterError(_say(name, text, problem))
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            problem = f"the range {item!r} runs backwards"
            raise ClusterError(_say(name, text, problem))
        if len(numbers) + int(last) - int(first) >= MAX_NODES:
            raise ClusterError(_say(name, text, TOO_MANY))
        width = len(first)
        numbers += [
            str(number).zfill(width) for number in range(int(first), int(last) + 1)
        ]
    return numbers


def _say(name: str, text: str, problem: str) -> str:
    return (
        f"`{name}` is {text!r}, but it must be a list of nodes, and {problem}. Slurm "
        "writes it as `node[001-003,7],other`; start the program with `srun`."
    )
