"""Watches the device programs that Armillary's loops start.

It stands in for a method of a private class, which is the one place where a program's
arguments and the moment of its start can be seen. The tests of the suite pin it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from unittest import mock

import jax

from armillary.trainer._program import Program

Call: TypeAlias = Callable[..., Any]
Watcher: TypeAlias = Callable[[Program, Call, tuple[Any, ...]], Any]


@contextlib.contextmanager
def watch_programs(watcher: Watcher) -> Iterator[None]:
    """Lets `watcher(program, call, arguments)` stand for each start of a program.

    Args:
        watcher: Must return what `call(*arguments)` returns.
    """
    own = Program.__call__

    def call(program: Program, *arguments: Any) -> Any:
        return watcher(program, lambda *given: own(program, *given), arguments)

    with mock.patch.object(Program, "__call__", call):
        yield


def lower_program(
    program: Program, call: Call, arguments: tuple[Any, ...]
) -> jax.stages.Lowered:
    """Returns what the compiler gets for a start that `watch_programs` caught."""
    compiled: Any = program._compiled
    lowered: list[jax.stages.Lowered] = []

    def lower(*given: Any) -> None:
        lowered.append(compiled.lower(*given))

    with mock.patch.object(program, "_compiled", lower):
        call(*arguments)
    return lowered[0]
