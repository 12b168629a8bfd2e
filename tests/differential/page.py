"""Writes docs/internals/compatibility.md: `python -m tests.differential.page`."""

import re
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tests.differential.harness import Case
from tests.differential.suite import CASES, SECTIONS, count_configurations

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "internals" / "compatibility.md"
HEAD = """\
# Compatibility table

<!-- Written by `make differential` from tests/differential. -->

This table lists the functions of Optax, Flax NNX and JAX that work inside a step, by
name.

Each construct is trained inside a step: without a strategy, and on 1, 2 and 4
replicas. Each training runs in one loop of three steps, in three loops of one step,
and in loops of two steps and one step. Afterwards, the state must equal, in float64,
the state that plain JAX or NNX computes on one device with the whole batch. All
replicas must hold the same copy of it.

The name of a case says how the step averages over the replicas. If the name says
nothing, the loss uses `compute_average_loss` and the step calls
`armillary.all_reduce("sum", gradients)`.

`make differential` runs every case. The default run of the tests takes a sample, on
two replicas. A test fails if one of these has no case: a public factory of Optax, a
layer or transformation of NNX, or a function of `jax`, `jax.nn`, `jax.random` or
`jax.ops`. For `jax.numpy` and `jax.scipy`, one function stands for each primitive.

{stamp}

| | |
| --- | --- |
| constructs | {cases} |
| trainings compared | {configurations} |
| as expected | {equal} |
| of these with a note | {noted} |
| refused with a clear error | {refused} |

Some notes say that each replica draws its own random numbers or uses its own
statistics. There, the expected state is computed by hand from what each replica does:
with its share of the batch, and with its own random key.
"""


EQUALS = """\
## Equal to one device

These constructs give the numbers of one device, up to rounding.
"""
STAMP = re.compile(
    r"^Measured in \w+ \d{4}, with JAX \S+, Flax \S+ and Optax \S+\.$", re.MULTILINE
)


def make_stamp() -> str:
    """Returns the sentence with the month and the releases of a run that ends now."""
    releases = {name: version(name) for name in ("jax", "flax", "optax")}
    month = date.today().strftime("%B %Y")
    return (
        f"Measured in {month}, with JAX {releases['jax']}, Flax {releases['flax']} and "
        f"Optax {releases['optax']}."
    )


def read_stamp() -> str:
    """Returns the sentence that the page has now, or an empty text."""
    found = STAMP.search(PAGE.read_text())
    return found[0] if found else ""


def render(stamp: str) -> str:
    """Returns the page; `stamp` says when its results were measured."""
    refused = [case for case in CASES if case.refusal]
    head = HEAD.format(
        stamp=stamp,
        cases=len(CASES),
        configurations=count_configurations(CASES),
        equal=len(CASES) - len(refused),
        noted=sum(bool(case.note) for case in CASES if not case.refusal),
        refused=len(refused),
    )
    exceptions = [_exceptions_of(*section) for section in SECTIONS.items()]
    equals = [_equals_of(*section) for section in SECTIONS.items()]
    return "\n".join(
        [head, "## Exceptions\n", *filter(None, exceptions), EQUALS, *equals]
    )


def _exceptions_of(title: str, cases: list[Case]) -> str:
    """Returns the table of the cases with a note or a refusal, which may be none."""
    rows = [_row(case) for case in cases if case.note or case.refusal]
    if not rows:
        return ""
    lines = [f"### {title}", "", "| construct | result |", "| --- | --- |", *rows]
    return "\n".join(lines) + "\n"


def _equals_of(title: str, cases: list[Case]) -> str:
    plain = [case for case in cases if not (case.note or case.refusal)]
    names = ", ".join(f"`{case.name}`" for case in plain)
    return f"**{title}** ({len(plain)}): {names or 'none'}.\n"


def _row(case: Case) -> str:
    if case.refusal is None:
        return f"| `{case.name}` | equal: {case.note} |"
    where = " and ".join(_place(count) for count in case.refusal.replicas)
    error = f"`{case.refusal.error.__name__}`"
    return f"| `{case.name}` | {error} {where}: {case.refusal.way_out} |"


def _place(num_replicas: int) -> str:
    return f"on {num_replicas}" if num_replicas else "without a strategy"


if __name__ == "__main__":
    PAGE.write_text(render(make_stamp()))
