"""Reads the text of a compiled program: computations, instructions, sizes.

The text is what `jax.stages.Compiled.as_text` gives. Instructions of a scheduled module
stand in the order in which they run.
"""

import math
import re
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
