"""Makes objects whose arrays are on the devices of a strategy from the beginning.

The constructor is traced, so that no array exists yet. The strategy then decides where
each array lies, and the constructor is compiled for these places. So no device ever
holds more than its part, and random numbers are the same as on one device.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from jax.core import Tracer
from jax.extend import core

from armillary._checks import list_lines
from armillary._jaxpr import VALUE_ERRORS, call_program
from armillary._planned import is_planning
from armillary.distribute._global_arrays import with_auto_axes
from armillary.distribute._new_arrays import note_new
from armillary.errors import StateStructureError
from armillary.state._adapters import leaves_placing
from armillary.state._holders import is_claimed
from armillary.state._lift import State, strong

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy

T = TypeVar("T")

_MAX_BYTES = 2**28  # of temporaries, for the scalars of a plan


def make_in_place(
    strategy: "Strategy",
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> T:
    """Returns `fn(*args, **kwargs)` with its arrays on the strategy's devices."""
    objects, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_claimed)
    args, kwargs = treedef.unflatten(map(with_auto_axes, objects))
    # Such as an `nnx.Rngs`, which counts the numbers that the constructor draws.
    claimed = [(item, "") for item in objects if is_claimed(item)]
    outside = State([(fn, ""), *claimed])
    before = outside.read()

    # An item of a dictionary can be replaced, and the empty name adds nothing to paths.
    holder: dict[str, Any] = {}
    made: Any = None
    # The indices of the arrays outside that the constructor has changed.
    changed: list[int] = []

    def construct(before: list[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal made, changed
        with outside.swapped(before):
            holder[""] = fn(*args, **kwargs)
            made = State([(holder, "")])
            arrays = [strong(leaf) for leaf in made.read()]
            after = outside.read()
        changed = [i for i, leaf in enumerate(after) if leaf is not before[i]]
        return arrays, [after[i] for i in changed]

    with strategy.leave_program_mesh(), strategy.jax_settings(), leaves_placing():
        with _explaining_values(fn):
            program = jax.make_jaxpr(construct)(before)
        _check_places(made, fn)

        roots = [(fn, ""), (args, ""), (kwargs, "")]
        # In a plan, too, an annotation or a rule that does not fit is an error.
        shardings = _choose_shardings(strategy, made, (holder, ""), roots)
        if is_planning():
            arrays, after = _describe(program, before, len(shardings))
        else:
            arrays, after = _build(strategy, program, before, shardings)

    outside_now = list(before)
    for i, value in zip(changed, after, strict=True):
        is_type = isinstance(value, jax.ShapeDtypeStruct)  # in a plan
        if is_type:
            outside_now[i] = value
        else:
            outside_now[i] = jax.device_put(value, before[i].sharding)
    outside.write(outside_now, set(changed))
    made.write(arrays)
    made.move_new(outside)
    return holder[""]


@contextlib.contextmanager
def _explaining_values(fn: Callable[..., Any]) -> Iterator[None]:
    """Adds advice to the error about an array that has no value in the trace."""
    try:
        yield
    except VALUE_ERRORS as error:
        error.add_note(
            f"`strategy.make` traces `{_name_of(fn)}`, so the arrays that it makes "
            "have no values yet. Compute with them (`jnp.where`), or make an array "
            "whose value Python needs before, and pass it in."
        )
        raise


def _choose_shardings(
    strategy: "Strategy",
    made: State,
    root: tuple[Any, str],
    others: Sequence[tuple[Any, str]],
) -> list[Any]:
    """Returns the shardings of the arrays of a result.

    An optimizer follows its parameters, so the objects that its constructor has read
    count, too, if it returns no parameters itself.
    """
    decide = strategy.placement.state_shardings
    has_parameters = False
    has_followers = False
    for leaf, is_follower in zip(made.read(), made.of_optimizer, strict=True):
        if is_follower:
            has_followers = True
        elif leaf.ndim:
            has_parameters = True
    if has_parameters or not has_followers:
        return list(decide(made, is_whole=False))

    both = State([root, *others])
    chosen = list(decide(both, is_whole=False))
    starts = {slot.key: start for slot, start, _ in both.ranges}
    shardings: list[Any] = []
    for slot, start, stop in made.ranges:
        num_arrays = stop - start
        first = starts[slot.key]
        shardings += chosen[first : first + num_arrays]
    return shardings


def _build(
    strategy: "Strategy",
    program: core.ClosedJaxpr,
    before: list[Any],
    shardings: list[Any],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs the program of a constructor, with each result on its devices.

    Returns:
        The arrays of the result, and those that the constructor has changed elsewhere.
    """
    num_made = len(shardings)

    # Arrays that the constructor has read are inputs: as constants, they would be in
    # the text of the program.
    def run(constants: list[Any], before: list[Any]) -> Any:
        closed = core.ClosedJaxpr(program.jaxpr, constants)
        outputs = call_program(closed, before, "make")
        return outputs[:num_made], outputs[num_made:]

    constants = [_bring(strategy, value) for value in program.consts]
    inputs = [_bring(strategy, value) for value in before]
    compiled = jax.jit(run, out_shardings=(shardings, None))
    strategy.dispatch.wait()
    arrays, after = compiled(constants, inputs)
    strategy.dispatch.finish(arrays)

    home = strategy.home
    if home is not None:
        arrays = jax.device_put(arrays, home)
    note_new(arrays)
    return arrays, after


def _describe(
    program: core.ClosedJaxpr, before: list[Any], num_made: int
) -> tuple[list[Any], list[Any]]:
    """Returns the types of the arrays that a constructor makes, for a plan.

    Scalars have their values, because a program may read a counter or a rate.
    """
    types: list[Any] = [
        jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in program.out_avals
    ]
    scalars = [i for i, kind in enumerate(types) if not kind.shape]
    has_values = not any(isinstance(each, jax.ShapeDtypeStruct) for each in before)
    if scalars and has_values:
        values = _compute_some(program, before, scalars)
        for i, value in zip(scalars, values, strict=False):
            types[i] = value
    return types[:num_made], types[num_made:]


def _compute_some(
    program: core.ClosedJaxpr, inputs: list[Any], numbers: list[int]
) -> list[jax.Array]:
    """Returns some results of a program; nothing if they need much memory.

    XLA removes the operations that the other results need.
    """

    def run(inputs: list[Any]) -> list[Any]:
        outputs = call_program(program, inputs, "make")
        return [outputs[i] for i in numbers]

    compiled = jax.jit(run).lower(inputs).compile()
    memory = compiled.memory_analysis()
    if memory is not None and memory.temp_size_in_bytes > _MAX_BYTES:
        return []
    return compiled(inputs)


def _bring(strategy: "Strategy", value: Any) -> Any:
    """Returns an array that a program on the strategy's devices can read."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return value
    array = with_auto_axes(value)
    layout = strategy.layout
    is_here = array.sharding.device_set == set(layout.devices)
    # JAX moves an array that is not committed to a device itself.
    if is_here or not array.committed:
        return array
    return layout.replicate(array)


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", "fn")


def _check_places(state: State, fn: Callable[..., Any]) -> None:
    """Raises if a constructor puts an array where it cannot be replaced."""
    lost: list[str] = []
    for path, value in state.look().constants:
        if isinstance(value, Tracer):
            lost.append(path)
    if not lost:
        return
    name = _name_of(fn)
    raise StateStructureError(
        f"`strategy.make` traces `{name}`, but {len(lost)} of its arrays are in a "
        f"tuple or a function, where nothing can replace them:\n{list_lines(lost)}\n"
        "Hold each of them in an attribute or a variable of the object, such as "
        "`self.scale = nnx.Variable(scale)`.",
        changes=lost,
    )
