"""Names the temporaries that a program holds when it needs the most memory.

XLA reports the time that each value lives, as numbers of instructions, and the memory
that it has::

    BufferLiveRange:
      all-gather{}:29-30

    allocation 13: size 6439216, preallocated-temp:
     value: <90 all-gather @0> (size=1048576,offset=5242880): f32[1,512,512]{1,0,2}

Several values may share memory: for example, a loop updates its state in place. So only
the two together show the peak.
"""

import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

_LIFE = re.compile(r"^\s+(\S+\{[\d,]*\}):(\d+)-(\d+)$")
_ALLOCATION = re.compile(r"^allocation (\d+): size \d+(.*)")
_VALUE = re.compile(
    r"^ value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @(\d+)> "
    r"\(size=(\d+),offset=(\d+)\): (.*)"
)
_NO_TEMPORARY = re.compile(r"\b(?:parameter \d|constant|thread-local)")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPERATION = re.compile(r'op_name="([^"]*)"')
_LAYOUT = re.compile(r"\{[^{}]*\}")
# The parts of a path that the loop of a trainer adds to the operations of a step.
_PREFIX = re.compile(r"^.*?jit\(step\)/|^(?:jit\(\w+\)/)*")


@dataclass(frozen=True)
class Tensor:
    """A temporary array that a program holds when it needs the most memory.

    Attributes:
        shape: Its type on one device, as XLA writes it, such as `f32[8,128]`.
        num_bytes: Its memory on one device.
        made_by: The operation that makes it, as a path in the program.
    """

    shape: str
    num_bytes: int
    made_by: str


class _Place(NamedTuple):
    """The memory of a value."""

    allocation: int
    offset: int


class _Value(NamedTuple):
    """A value of the program, alive from one instruction to another."""

    place: _Place
    tensor: Tensor
    has_operation: bool
    first: int
    last: int


def find_peak(report: str, text: str) -> tuple[Tensor, ...]:
    """Returns the temporaries at the peak, the largest first.

    Args:
        report: XLA's reports on memory; empty if there are none.
        text: The program.
    """
    values = list(_read_values(report, _read_operations(text)))
    time = _find_fullest(values)
    # Values such as the argument of a loop's body have no operation of their own, but
    # the operation that fills their memory has one.
    makers: dict[tuple[_Place, str], str] = {}
    for value in values:
        if value.has_operation:
            makers.setdefault((value.place, value.tensor.shape), value.tensor.made_by)

    found: dict[_Place, Tensor] = {}
    for value in values:
        tensor = value.tensor
        if not value.first <= time <= value.last:
            continue
        if not value.has_operation:
            made_by = makers.get((value.place, tensor.shape), tensor.made_by)
            tensor = replace(tensor, made_by=made_by)
        found.setdefault(value.place, tensor)
    return tuple(sorted(found.values(), key=lambda tensor: -tensor.num_bytes))


def _find_fullest(values: Iterable[_Value]) -> int:
    """Returns the time at which values need the most memory."""
    changes: dict[int, list[tuple[int, _Value]]] = collections.defaultdict(list)
    for value in values:
        changes[value.first].append((1, value))
        changes[value.last + 1].append((-1, value))

    users: collections.Counter[_Place] = collections.Counter()
    held = 0
    most = 0
    fullest = 0
    for time in sorted(changes):
        for change, value in changes[time]:
            was_used = users[value.place] > 0
            users[value.place] += change
            is_used = users[value.place] > 0
            held += (is_used - was_used) * value.tensor.num_bytes
        if held > most:
            most = held
            fullest = time
    return fullest


def _read_values(report: str, operations: Mapping[str, str]) -> Iterator[_Value]:
    """Yields the temporaries in the main memory, with the time that they live."""
    lines = report.splitlines()
    lives: dict[str, tuple[int, int]] = {}
    for found in filter(None, map(_LIFE.match, lines)):
        lives[found[1]] = int(found[2]), int(found[3])

    allocation = 0
    is_temporary = False
    for line in lines:
        head = _ALLOCATION.match(line)
        if head:
            allocation = int(head[1])
            is_temporary = _NO_TEMPORARY.search(head[2]) is None
            continue
        found = _VALUE.match(line) if is_temporary else None
        if found is None:
            continue

        name, index, space, num_bytes, offset, shape = found.groups()
        life = lives.get(f"{name}{index or '{}'}")
        # Other spaces are near the compute units of a TPU, or on the host.
        if space != "0" or life is None or shape.startswith("("):
            continue
        tensor = Tensor(
            _LAYOUT.sub("", shape), int(num_bytes), operations.get(name, name)
        )
        place = _Place(allocation, int(offset))
        yield _Value(place, tensor, name in operations, *life)


def _read_operations(text: str) -> dict[str, str]:
    """Returns the operation of the user's program that each instruction is from."""
    operations: dict[str, str] = {}
    for line in text.splitlines():
        instruction = _INSTRUCTION.match(line)
        operation = _OPERATION.search(line) if instruction else None
        if instruction and operation:
            operations[instruction[1]] = _PREFIX.sub("", operation[1])
    return operations
