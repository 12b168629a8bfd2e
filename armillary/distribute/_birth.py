"""Makes objects whose arrays are on the devices of a strategy from the beginning.

The constructor is traced, so that no array exists yet. The strategy then decides where
each array lies, and the constructor is compiled for these places. So no device ever
holds more than its part, and random numbers are the same as on one device.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from jax.core import Tracer
from jax.extend import core

from armillary._checks import list_lines
from armillary._jaxpr import call_program
from armillary.errors import StateStructureError
from armillary.state._adapters import leaves_placing
from armillary.state._lift import State, strong
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy

T = TypeVar("T")


def make_in_place(
    strategy: "Strategy",
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> T:
    """Returns `fn(*args, **kwargs)` with its arrays on the strategy's devices."""
    # An item of a dictionary can be replaced, and the empty name adds nothing to paths.
    holder: dict[str, Any] = {}
    state: Any = None

    def construct() -> list[Any]:
        nonlocal state
        holder[""] = fn(*args, **kwargs)
        state = State([(holder, "")])
        return [strong(leaf) for leaf in state.read()]

    with strategy.leave_program_mesh(), leaves_placing():
        program = jax.make_jaxpr(construct)()
        _check_places(state, fn)
        arrays = _build(strategy, program, state)
    state.write(arrays)
    state.move_new(State([]))
    return holder[""]


def _build(
    strategy: "Strategy", program: core.ClosedJaxpr, state: State
) -> list[jax.Array]:
    """Runs the program of a constructor, with each result on its devices."""
    shardings = list(strategy.placement.state_shardings(state))

    # Arrays that the constructor has read are inputs: as constants, they would be in
    # the text of the program.
    def run(constants: PyTree) -> list[Any]:
        return call_program(core.ClosedJaxpr(program.jaxpr, constants), [], "make")

    strategy.dispatch.wait()
    with strategy.jax_settings():
        arrays = jax.jit(run, out_shardings=shardings)(program.consts)
    strategy.dispatch.finish(arrays)

    home = strategy.home
    return arrays if home is None else jax.device_put(arrays, home)


def _check_places(state: State, fn: Callable[..., Any]) -> None:
    """Raises if a constructor puts an array where it cannot be replaced."""
    lost = [path for path, value in state.look().constants if isinstance(value, Tracer)]
    if not lost:
        return
    name = getattr(fn, "__name__", "fn")
    raise StateStructureError(
        f"`strategy.make` traces `{name}`, but {len(lost)} of its arrays are in a "
        f"tuple or a function, where nothing can replace them:\n{list_lines(lost)}\n"
        "Hold each of them in an attribute or a variable of the object, such as "
        "`self.scale = nnx.Variable(scale)`.",
        changes=lost,
    )
