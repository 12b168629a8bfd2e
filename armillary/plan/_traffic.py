"""Finds what devices send each other in a compiled program, and when.

Each collective gets a *round*: one more than the rounds of those of its kind that it
has to wait for. Collectives of one round need nothing of each other, so a compiler may
combine them into one operation. TPU's and NVIDIA's compilers do, the CPU's does not;
the number of rounds is the same for all.
"""

import functools
import operator
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from armillary.plan._hlo import Instruction, Module, count_bytes

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
FREE = frozenset(
    (
        "after-all",
        "bitcast",
        "constant",
        "get-tuple-element",
        "parameter",
        "partition-id",
        "tuple",
    )
)
"""Operations that take no time."""

_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_HOST_CALL = re.compile(r"callback|MoveToHost|MoveToDevice|SendToHost|RecvFromHost")
_HOST_OPCODES = frozenset(("infeed", "outfeed"))
_HOST_SPACE = "S(5)"
_SYNCHRONOUS = '"is_sync":true'  # How XLA's GPU compiler marks a start that waits.


@dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
        kind: Such as `all-reduce`.
        num_bytes: Bytes of its operand on each device; of its result for all-gather.
        scope: How often it runs: once for each `step`, `loop` or `call` of the program.
        times: How often in that, as inner loops repeat it.
        is_conditional: Whether it runs only if a condition on the device holds.
        group_size: How many devices take part in one of its groups.
        is_asynchronous: Whether it starts at one place of the schedule and is waited
            for at another.
        overlaps: What runs between these, by name, with how many of each.
        round: See above; 1 for one that waits for no other of its kind.
    """

    kind: str
    num_bytes: int
    scope: str
    times: int = 1
    is_conditional: bool = False
    group_size: int = 0
    is_asynchronous: bool = False
    overlaps: tuple[tuple[str, int], ...] = ()
    round: int = 1

    @property
    def is_of_step(self) -> bool:
        """Whether it runs in every step."""
        return self.scope == "step" and not self.is_conditional


@dataclass(frozen=True)
class Traffic:
    """What a program sends.

    Attributes:
        collectives: Between devices.
        host_transfers: Names of operations inside loops that reach the host.
    """

    collectives: tuple[Collective, ...]
    host_transfers: tuple[str, ...]

    def of_step(self) -> list[Collective]:
        """Returns the collectives that run in every step."""
        return [each for each in self.collectives if each.is_of_step]


def find_traffic(module: Module, depth: int, num_devices: int) -> Traffic:
    """Returns what a compiled loop sends.

    Args:
        module: The program.
        depth: How many of its loops are around a step.
        num_devices: How many devices run it.
    """
    walk = _Walk(module, depth, num_devices)
    walk.enter(module.entry, _Place(0, 1, False), Counter())
    return Traffic(tuple(walk.found), tuple(walk.host))


def count_rounds(collectives: Iterable[Collective], kind: str) -> int:
    """Returns how many collectives of a kind must follow each other."""
    return max((each.round for each in collectives if each.kind == kind), default=0)


@dataclass(frozen=True)
class _Place:
    """Where the walk is: in how many loops, how often, and under which condition."""

    depth: int
    times: int
    is_conditional: bool


_Rounds = Counter[str]
"""For each kind, how many collectives of it something waits for, one after the other.

The union of two has the larger number of each.
"""


class _Walk:
    def __init__(self, module: Module, depth: int, num_devices: int) -> None:
        self._module, self._depth = module, depth
        self._num_devices = num_devices
        self.found: list[Collective] = []
        self.host: list[str] = []

    def enter(self, name: str, place: _Place, base: _Rounds) -> _Rounds:
        """Walks one computation; returns what its end waits for."""
        instructions = self._module.computations.get(name, [])
        shapes = {each.name: each.shape for each in instructions}
        rounds: dict[str, _Rounds] = {}
        for index, each in enumerate(instructions):
            before = _union([base, *(rounds[o] for o in each.operands)])
            kind = _kind_of(each)
            if kind is not None and not each.opcode.endswith("-done"):
                later = instructions[index + 1 :]
                number = before[kind] + 1
                if self._add(each, kind, place, number, shapes, later):
                    before = before | Counter({kind: number})
            elif _reaches_host(each) and place.depth:
                self.host.append(each.label)
            rounds[each.name] = self._enter_called(each, place, before)
        return _union([base, *rounds.values()])

    def _enter_called(self, each: Instruction, place: _Place, base: _Rounds) -> _Rounds:
        last = base
        for role, names in each.called.items():
            inner = place
            if role == "body":
                is_inner = place.depth >= self._depth
                times = (each.trip_count or 1) if is_inner else 1
                inner = _Place(
                    place.depth + 1, place.times * times, place.is_conditional
                )
            elif role != "calls":
                inner = _Place(place.depth, place.times, True)
            for name in names:
                last = last | self.enter(name, inner, base)
        return last

    def _add(
        self,
        each: Instruction,
        kind: str,
        place: _Place,
        number: int,
        shapes: dict[str, str],
        later: list[Instruction],
    ) -> bool:
        """Notes a collective; returns whether a device has anybody to talk to."""
        size = _count_group(each.attributes) or self._num_devices
        if size == 1 and kind != "collective-permute":
            return False
        operand = sum(count_bytes(shapes[name]) for name in each.operands)
        is_start = each.opcode.endswith("-start")
        if kind == "all-gather":
            operand = count_bytes(each.shape) - (operand if is_start else 0)
        is_hidden = is_start and _SYNCHRONOUS not in each.attributes
        between = _between(each.name, later) if is_hidden else []
        scope = min(place.depth, self._depth) - self._depth
        self.found.append(
            Collective(
                kind,
                operand,
                {0: "step", -1: "loop" if self._depth == 2 else "call"}.get(
                    scope, "call"
                ),
                place.times,
                place.is_conditional,
                size,
                bool(between),
                tuple(Counter(other.label for other in between).items()),
                number,
            )
        )
        return True


def _union(rounds: Iterable[_Rounds]) -> _Rounds:
    return functools.reduce(operator.or_, rounds)


def _kind_of(each: Instruction) -> str | None:
    base = each.opcode.removesuffix("-start").removesuffix("-done")
    return base if base in KINDS else None


def _reaches_host(each: Instruction) -> bool:
    if each.opcode in _HOST_OPCODES or "is_host_transfer=true" in each.attributes:
        return True
    if each.opcode == "custom-call":
        return bool(_HOST_CALL.search(each.label))
    return each.opcode in ("copy", "copy-start") and _HOST_SPACE in each.shape


def _between(start: str, later: list[Instruction]) -> list[Instruction]:
    """Returns what is scheduled between an operation's start and its end."""
    between = []
    for each in later:
        if start in each.operands and each.opcode.endswith("-done"):
            return between
        if each.opcode not in FREE and not each.opcode.endswith(("-start", "-done")):
            between.append(each)
    return []


def _count_group(attributes: str) -> int:
    if found := _COUNTED_GROUPS.search(attributes):
        return int(found[1])
    found = _LISTED_GROUPS.search(attributes)
    return len(found[1].split(",")) if found and found[1] else 0
