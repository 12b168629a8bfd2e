"""Finds what devices send each other in a compiled program, and when.

Each collective gets a *round*: one more than the rounds of those of its kind that it
has to wait for. Collectives of one round need nothing of each other, so a compiler may
combine them into one operation. TPU's and NVIDIA's compilers do, the CPU's does not;
the number of rounds is the same for all.

Reads the text of a compiled program: computations, instructions, sizes.

The text is what `jax.stages.Compiled.as_text` gives. Instructions of a scheduled module
stand in the order in which they run.
"""

import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"(body|calls|to_apply|true_computation|false_computation|branch_computations)="
    r"(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        name: Its name, without the percent sign.
        shape: The text of its result's type.
        opcode: What it does, such as `fusion`.
        operands: Names of the instructions that it takes results of.
        attributes: The text behind the operands.
        is_root: Whether it is the result of its computation.
        number: Which parameter it is, if it is one.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    number: int | None = None

    @cached_property
    def called(self) -> dict[str, list[str]]:
        """The computations that it runs, by what they are to it (`body`, `calls`)."""
        called = {
            key: [part.strip().lstrip("%") for part in (one or many).split(",")]
            for key, one, many in _CALLED.findall(self.attributes)
        }
        # To `call` it is what `calls` is to others; else the addition of a sum.
        applied = called.pop("to_apply", None)
        return {"calls": applied} if applied and self.opcode == "call" else called

    @property
    def trip_count(self) -> int | None:
        """How often the body of a loop runs, if the compiler knows."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def label(self) -> str:
        """What it is, in short: a target for calls, else the name or the opcode."""
        target = _TARGET.search(self.attributes)
        if target:
            return target[1]
        return self.name.split(".")[0] if self.opcode == "fusion" else self.opcode


@dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
        computations: The instructions of each computation, by its name.
        entry: The name of the computation that runs first.
    """

    computations: dict[str, list[Instruction]]
    entry: str


def parse_module(text: str) -> Module:
    """Returns the program that a text holds."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(_parse(found[2], found[3], bool(found[1])))
    if entry is None:
        raise ValueError(
            "The text of the program has no ENTRY computation, so it is no HLO module."
        )
    return Module(computations, entry)


def count_bytes(shape: str, *, skip_space: str | None = None) -> int:
    """Returns the bytes of a type, a tuple's the sum of its parts."""
    total = 0
    for dtype, dimensions, layout in _ARRAY.findall(shape):
        if skip_space is not None and skip_space in layout:
            continue
        count = math.prod(int(n) for n in dimensions.split(",") if n)
        total += -(-count * _count_bits(dtype) // 8)
    return total


def _count_bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0  # A token has none.


def _parse(name: str, rest: str, is_root: bool) -> Instruction:
    shape, rest = _split_balanced(rest) if rest[0] == "(" else rest.split(" ", 1)
    opcode, _, rest = rest.strip().partition("(")
    inside, attributes = _split_balanced("(" + rest)
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    number = int(inside[1:-1]) if opcode == "parameter" else None
    return Instruction(name, shape, opcode, operands, attributes, is_root, number)


def _split_balanced(text: str) -> tuple[str, str]:
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""


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
