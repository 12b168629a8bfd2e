"""Compares a traced program between processes, before it first runs.

Processes that run different programs wait for each other in different places, for ever.
Those that run one program with different constants in it compute different results.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.extend import core

from armillary._checks import list_lines
from armillary._jaxpr import programs_in, source_line, walk_programs
from armillary.cluster._peers import Peers
from armillary.distribute.program._same_values import describe_value, find_differences
from armillary.errors import PeerError
from armillary.state._functions import captured
from armillary.state._same import find_constants

_CONTEXT_LINES = 3


def check_same_program(
    peers: Peers,
    name: str,
    program: core.ClosedJaxpr,
    fn: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Raises if processes have traced `fn` to different programs, or other constants.

    `arguments` are the ones, by name, of the first call that must be equal too.
    """
    # Addresses of Python objects differ where nothing else does.
    lines = re.sub(r"0x[0-9a-f]+", "0x", str(program)).splitlines()
    held = [describe_value(constant) for constant in find_constants(program)]
    given = {key: describe_value(value) for key, value in (arguments or {}).items()}
    digest = hashlib.sha256(json.dumps([lines, held, given]).encode()).hexdigest()
    if len(set(peers.gather(f"the program of {name}", digest))) == 1:
        return
    _check_same_lines(peers, name, lines)
    values = {str(i): text for i, text in enumerate(held)} | given
    differing, _ = find_differences(peers, f"the constants of {name}", values)
    uses = list(_find_uses(program))
    known = {id(value): key for key, value in captured(fn)}
    shown = []
    for key, text in differing.items():
        title = f"`{key}`"
        if key.isdigit():
            constant, equation = uses[int(key)]
            held_by = known.get(id(constant))
            title = "a constant" if held_by is None else f"`{held_by}`"
            if equation is not None:
                title += f", used at {source_line(equation)}"
        shown.append(f"{title}: {text}")
    raise PeerError(
        f"`{name}` computes with other values in each process, where all must have the "
        f"same:\n{list_lines(shown)}\n"
        "What a step captures, and arguments that all replicas share, must come from "
        "one seed and the same data in all processes. What is to differ between "
        "replicas belongs into the batches, or comes from "
        "`strategy.distribute_values_from_function`."
    )


def _check_same_lines(peers: Peers, name: str, lines: list[str]) -> None:
    marks = json.dumps(
        [hashlib.sha256(line.encode()).hexdigest()[:8] for line in lines]
    )
    everyone = map(json.loads, peers.gather(f"the lines of {name}", marks))
    columns = enumerate(itertools.zip_longest(*everyone))
    start = next((i for i, column in columns if len(set(column)) > 1), None)
    if start is None:
        return
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


def _find_uses(program: core.ClosedJaxpr) -> Iterator[tuple[Any, Any]]:
    """Yields what `find_constants` does, and the equation that computes with it."""
    for jaxpr, constants in walk_programs(program):
        for variable, constant in zip(jaxpr.constvars, constants, strict=True):
            yield constant, _find_use(jaxpr, variable)
        for equation in jaxpr.eqns:
            for operand in equation.invars:
                if isinstance(operand, core.Literal):
                    yield operand.val, equation


def _find_use(jaxpr: Any, variable: Any) -> Any:
    for equation in jaxpr.eqns:
        for place, operand in enumerate(equation.invars):
            if operand is not variable:
                continue
            for inner in programs_in(equation):
                body = getattr(inner, "jaxpr", inner)
                if len(body.invars) == len(equation.invars):
                    return _find_use(body, body.invars[place])
            return equation
    return None
