"""Finds the data that a compiled program sends, from the text of the program.

The instructions of a scheduled module are in the order in which they run.
"""

import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from armillary.plan._costs import COLLECTIVE_KINDS, Collective
from armillary.plan._groups import find_groups

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(body|calls|to_apply|true_computation|false_computation|branch_computations)="
    r"(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INTEGER = re.compile(r"\(-?\d+\)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_INDEX = re.compile(r"index=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_HOST_CALL = re.compile(r"callback|MoveToHost|MoveToDevice|SendToHost|RecvFromHost")
_HOST_SPACE = "S(5)"
# Between slices of TPUs, a collective is a transfer of the host.
_BETWEEN_SLICES = "xla_megascale"
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_SYNCHRONOUS = '"is_sync":true'  # The mark of XLA's GPU compiler on a start that waits.
_NO_TIME = ("after-all", "bitcast", "constant", "get-tuple-element", "parameter")
_FREE = frozenset((*_NO_TIME, "partition-id", "tuple"))


@dataclass
class Instruction:
    """One line of a program's text."""

    name: str  # Without the percent sign.
    shape: str  # The text of its result's type.
    opcode: str
    operands: tuple[str, ...]
    attributes: str  # The text after the operands.
    inside: str = ""  # The text of the operands, with its brackets.

    @cached_property
    def called(self) -> dict[str, list[str]]:
        """The computations that it runs, by their role (`body`, `calls`)."""
        called: dict[str, list[str]] = {}
        for role, one, many in _CALLED.findall(self.attributes):
            names = (one or many).split(",")
            called[role] = [name.strip().lstrip("%") for name in names]
        # `call` names its computation `to_apply`, and other instructions name it
        # `calls`. In a reduction, `to_apply` is only the addition.
        applied = called.pop("to_apply", None)
        if applied and self.opcode == "call":
            return {"calls": applied}
        return called

    @property
    def kind(self) -> str | None:
        """The collective that this instruction is, starts or ends; else `None`."""
        base = self.opcode.removesuffix("-start").removesuffix("-done")
        if base == "send" and self.is_between_slices:
            transfer = _TRANSFER.search(self.attributes)
            base = transfer[1].lower().replace("_", "-") if transfer else base
        return base if base in COLLECTIVE_KINDS else None

    @property
    def is_between_slices(self) -> bool:
        """True if the instruction sends data between slices of TPUs, or awaits it."""
        return _BETWEEN_SLICES in self.attributes

    @property
    def trip_count(self) -> int | None:
        """The number of runs of a loop's body, if the compiler has noted it."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def integer(self) -> int | None:
        """The value of a constant that is an integer."""
        is_integer = self.opcode == "constant" and _INTEGER.fullmatch(self.inside)
        return int(self.inside[1:-1]) if is_integer else None

    @property
    def label(self) -> str:
        """A short name: the target of a call, else the opcode."""
        target = _TARGET.search(self.attributes)
        return target[1] if target else self.opcode

    @property
    def reaches_host(self) -> bool:
        """True if the instruction calls the host or moves values to or from it."""
        if self.opcode == "custom-call":
            return bool(_HOST_CALL.search(self.label))
        if self.opcode in ("infeed", "outfeed"):
            return True
        if self.is_between_slices:
            return False
        is_copy = self.opcode in ("copy", "copy-start")
        is_to_host = is_copy and _HOST_SPACE in self.shape
        return is_to_host or "is_host_transfer=true" in self.attributes


def parse_module(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Returns the instructions of each computation, and the name of the first one."""
    computations: dict[str, list[Instruction]] = {}
    entry = None
    current = None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            is_entry, name = head.groups()
            current = computations.setdefault(name, [])
            if is_entry:
                entry = name
            continue
        found = _INSTRUCTION.match(line)
        if found and current is not None:
            name, rest = found.groups()
            current.append(_parse(name, rest))
    if entry is None:
        raise ValueError(
            "The text of the program has no ENTRY computation, so it is not an HLO "
            "module."
        )
    return computations, entry


def _parse(name: str, rest: str) -> Instruction:
    """Reads `shape opcode(operands), attributes`; the shape may be in brackets."""
    shape, rest = _split_balanced(rest) if rest[0] == "(" else rest.split(" ", 1)
    opcode, _, rest = rest.strip().partition("(")
    inside, attributes = _split_balanced("(" + rest)
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, shape, opcode, operands, attributes, inside)


def _split_balanced(text: str) -> tuple[str, str]:
    """Splits a text after the bracket that closes its first one."""
    depth = 0
    for i, character in enumerate(text):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""


def count_bytes(shape: str) -> int:
    """Returns the bytes of all arrays in the text of a type."""
    total = 0
    for dtype, dimensions in _ARRAY.findall(shape):
        count = math.prod(int(n) for n in dimensions.split(",") if n)
        total += -(-count * _count_bits(dtype) // 8)
    return total


def _count_bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0  # A token has no size.


class Traffic(NamedTuple):
    """The data that a program sends, and the operations that reach the host."""

    collectives: tuple[Collective, ...]
    host_transfers: tuple[str, ...]


def find_traffic(
    text: str, depth: int, num_devices: int, islands: Sequence[int] = ()
) -> Traffic:
    """Returns the traffic of a compiled loop; a step is inside `depth` loops.

    `islands` has the number of the group of each device, if some links are slow.
    """
    computations, entry = parse_module(text)
    walk = _ModuleWalk(computations, depth, num_devices, islands)
    walk.enter(entry, _Nesting(), Counter())
    return Traffic(tuple(walk.found), tuple(walk.host))


@dataclass(frozen=True)
class _Nesting:
    """The loops and conditions around an instruction.

    `depth` counts the loops, and `times` the runs per step.
    """

    depth: int = 0
    times: int = 1
    is_conditional: bool = False


_Rounds = Counter[str]
"""By kind, the number of collectives that an instruction must wait for, in sequence.

The union of two has the larger number of each kind.
"""


class _ModuleWalk:
    """Follows the text of a program from its entry into all that it calls."""

    def __init__(
        self,
        computations: dict[str, Any],
        depth: int,
        num_devices: int,
        islands: Sequence[int],
    ) -> None:
        self._computations = computations
        self._depth = depth
        self._num_devices = num_devices
        self._islands = islands
        self.found: list[Collective] = []
        self.host: list[str] = []

    def enter(self, name: str, nesting: _Nesting, base: _Rounds) -> _Rounds:
        """Walks one computation; returns the rounds that its end waits for."""
        instructions = self._computations.get(name, [])
        shapes = {instruction.name: instruction.shape for instruction in instructions}
        rounds: dict[str, _Rounds] = {}
        for index, instruction in enumerate(instructions):
            of_operands = [rounds[operand] for operand in instruction.operands]
            before = _union([base, *of_operands])
            is_end = instruction.opcode.endswith("-done")
            if instruction.kind is not None and not is_end:
                later = instructions[index + 1 :]
                number = before[instruction.kind] + 1
                if self._add(instruction, nesting, number, shapes, later):
                    before = before | Counter({instruction.kind: number})
            elif instruction.reaches_host and nesting.depth:
                self.host.append(instruction.label)

            trips = (
                self._count_trips(instruction, instructions)
                if instruction.called
                else 1
            )
            rounds[instruction.name] = self._enter_called(
                instruction, nesting, before, trips
            )
        return _union([base, *rounds.values()])

    def _enter_called(
        self, instruction: Instruction, nesting: _Nesting, base: _Rounds, trips: int
    ) -> _Rounds:
        last = base
        for role, names in instruction.called.items():
            inner = nesting
            if role == "body":
                # The loops around a step are not part of it.
                is_in_step = nesting.depth >= self._depth
                times = nesting.times * (trips if is_in_step else 1)
                inner = replace(nesting, depth=nesting.depth + 1, times=times)
            elif role != "calls":
                inner = replace(nesting, is_conditional=True)
            for name in names:
                last = last | self.enter(name, inner, base)
        return last

    def _count_trips(self, loop: Instruction, around: Sequence[Instruction]) -> int:
        """Returns the number of runs of a loop's body; 1 if it is not known.

        The compiler for TPUs notes no numbers, so the condition of the loop is read: it
        compares a counter, which each run increases by one, with a constant.
        """
        if loop.trip_count is not None:
            return loop.trip_count
        condition = _CONDITION.search(loop.attributes)
        if condition is None or len(loop.operands) != 1:
            return 1
        found = _find_limit(self._computations.get(condition[1], []))
        if found is None:
            return 1
        position, limit = found
        first = _find_first(loop.operands[0], position, around)
        return 1 if first is None else max(limit - first, 1)

    def _add(
        self,
        instruction: Instruction,
        nesting: _Nesting,
        number: int,
        shapes: dict[str, str],
        later: list[Instruction],
    ) -> bool:
        """Adds a collective; returns False if its groups have only one device."""
        kind = instruction.kind or ""
        groups = find_groups(instruction.attributes, self._num_devices)
        size = max(map(len, groups))
        if instruction.is_between_slices:
            size = len(set(self._islands))
        elif size == 1 and kind != "collective-permute":
            return False
        is_start = instruction.opcode.endswith("-start")
        num_bytes = sum(count_bytes(shapes[name]) for name in instruction.operands)
        if kind == "all-gather" and instruction.is_between_slices:
            num_bytes *= size
        elif kind == "all-gather":
            # The type of a start names its operands, too.
            num_of_operands = num_bytes if is_start else 0
            num_bytes = count_bytes(instruction.shape) - num_of_operands
        is_split = is_start or instruction.is_between_slices
        is_hidden = is_split and _SYNCHRONOUS not in instruction.attributes
        collective = Collective(
            kind,
            num_bytes,
            self._find_scope(nesting),
            times=nesting.times,
            is_conditional=nesting.is_conditional,
            group_size=size,
            is_asynchronous=is_hidden and _runs_beside(instruction.name, later),
            round=number,
            is_slow=instruction.is_between_slices or any(map(self._is_slow, groups)),
        )
        self.found.append(collective)
        return True

    def _is_slow(self, group: Sequence[int]) -> bool:
        """Returns whether a group of devices has slow links between its devices."""
        return len({self._islands[device] for device in group if self._islands}) > 1

    def _find_scope(self, nesting: _Nesting) -> str:
        """Returns the part of the program that repeats a collective."""
        if nesting.depth >= self._depth:
            return "step"
        is_in_loop = self._depth == 2 and nesting.depth == 1
        return "loop" if is_in_loop else "call"


def _find_limit(condition: Sequence[Instruction]) -> tuple[int, int] | None:
    """Returns the place of a loop's counter in its carry, and the limit of it."""
    test = condition[-1] if condition else None
    if test is None or test.opcode != "compare" or len(test.operands) != 2:
        return None
    by_name = {instruction.name: instruction for instruction in condition}
    counter, limit = (by_name.get(name) for name in test.operands)
    position = _INDEX.search(counter.attributes) if counter else None
    number = limit.integer if limit else None
    if position is None or number is None or "direction=LT" not in test.attributes:
        return None
    return int(position[1]), number


def _find_first(carry: str, position: int, around: Sequence[Instruction]) -> int | None:
    """Returns the first value of a loop's counter, if it is a constant."""
    by_name = {instruction.name: instruction for instruction in around}
    whole = by_name.get(carry)
    if whole is None or whole.opcode != "tuple" or position >= len(whole.operands):
        return None
    first = by_name.get(whole.operands[position])
    while first is not None and first.opcode.startswith(("bitcast", "copy")):
        first = by_name.get(first.operands[0])
    return None if first is None else first.integer


def _union(rounds: Iterable[_Rounds]) -> _Rounds:
    return functools.reduce(operator.or_, rounds)


def _runs_beside(start: str, later: list[Instruction]) -> bool:
    """Returns whether work is scheduled between an operation's start and its end."""
    has_work = False
    for instruction in later:
        if start in instruction.operands and instruction.opcode.endswith("-done"):
            return has_work
        is_part = instruction.opcode in _FREE or instruction.opcode.endswith(
            ("-start", "-done")
        )
        has_work = has_work or not is_part
    return False
