"""Makes, lends and checks the state of a pure step.

The trainer holds the state, and each step gets a copy of its nodes. So a step may use
up the nodes, as with an `eqx.nn.State`, or write into the variables of an `nnx.State`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import list_lines
from armillary.distribute._global_arrays import is_on_host
from armillary.distribute._new_arrays import is_new
from armillary.distribute.replica._context import get_replica_context
from armillary.errors import StateStructureError
from armillary.state import _equinox
from armillary.state._adapters import (
    adapter_of,
    is_leaf_variable,
    is_tree_node,
    is_tree_variable,
    value_of,
)
from armillary.state._slots import became, describe, is_array, is_equal
from armillary.state._tree import (
    PURE_STATE,
    Leaf,
    children_with_keys,
    expression_of,
    is_object,
    leaves_of,
)
from armillary.typing import PyTree


def has_data(state: PyTree) -> bool:
    """Returns whether a state has an array, or a leaf that becomes one."""
    return any(map(_is_data, leaves_of(state)))


def _is_data(leaf: Leaf) -> bool:
    """Returns whether a leaf is an array, or a number that becomes one."""
    value = leaf.value
    if is_array(value) or is_leaf_variable(value):
        return True
    if isinstance(value, jax.ShapeDtypeStruct):
        return True  # The array of a plan.
    # As in `jax.jit`, an integer is an array. A flag or a rate of Equinox is not.
    if isinstance(value, np.ndarray | np.generic) or type(value) is int:
        return True
    # A class of Flax declares its constants with `pytree_node=False`.
    if not leaf.above:
        return False
    parent_type = type(leaf.above[-1])
    is_of_flax = hasattr(parent_type, "_flax_dataclass")
    return is_of_flax and type(value) is float


def own_state(state: PyTree) -> PyTree:
    """Returns a state with copies of its arrays, and with arrays for numbers.

    An array of `strategy.make` is not copied: the first step may reuse its memory, so
    a large state is never there twice.

    Raises:
        TypeError: If JAX makes no array of a leaf.
        ValueError: If modules of NNX share a variable.
    """
    leaves = list(leaves_of(state))
    _check_is_not_tied(leaves)
    structure = jax.tree.structure(state)
    kept: set[int] = set()

    def own(leaf: Leaf) -> Any:
        # A program cannot reuse the memory of one array in two places.
        key = id(leaf.value)
        if key in kept or not is_new(leaf.value):
            return _own(leaf)
        kept.add(key)
        return leaf.value

    return structure.unflatten(map(own, leaves))


def _check_is_not_tied(leaves: Iterable[Leaf]) -> None:
    """Raises if a module has one variable in two places.

    A pytree has two leaves for it, so the places would differ after one step.
    """
    places: dict[Any, str] = {}
    for leaf in leaves:
        depths = [i for i, node in enumerate(leaf.above) if is_tree_node(node)]
        if not depths or not is_tree_variable(leaf.above[-1]):
            continue
        variable = leaf.above[-1]
        # The state may have the same module twice, such as for an average.
        module = leaf.keys[: depths[0]]
        place = leaf.expression(PURE_STATE)
        first = places.setdefault((module, id(variable)), place)
        if first != place:
            raise ValueError(
                f"`{first}` and `{place}` are one variable of NNX, but `state` is a "
                "pytree, in which they would become two that differ after one step. "
                "Split the model: `graph, state = nnx.split(model)`. Give `state`, and "
                "write `model = nnx.merge(graph, state)` in the step."
            )


def _own(leaf: Leaf) -> Any:
    """Returns a copy of a leaf, as an array if it is data."""
    value = leaf.value
    if not _is_data(leaf):
        return value
    if is_leaf_variable(value):
        value = value_of(value)
    if is_on_host(value):
        return jax.device_put(value, value.sharding, may_alias=False)
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    try:
        return jnp.array(value)
    except (OverflowError, TypeError) as error:
        raise TypeError(
            f"`state` has the leaf {value!r:.80}, which JAX cannot make an array: "
            f"{error}"
        ) from error


def lend(state: PyTree) -> PyTree:
    """Returns a state for one step, with nodes that the step may use up."""
    context = get_replica_context()
    is_alone = context is None or context.axis_name is None
    copy_state = _equinox.as_state if is_alone else _equinox.as_replica_state
    return _map_states(_equinox.is_state, copy_state, state)


def take_back(held: PyTree, returned: PyTree) -> PyTree:
    """Returns the state that a step left, checked against the state that it took.

    Raises:
        StateStructureError: If the two have different leaves, shapes or dtypes.
    """
    new = _map_states(_equinox.is_replica_state, _equinox.as_state, returned)
    check_state(held, new)
    old_leaves, structure = jax.tree.flatten(held, is_leaf=is_object)
    new_leaves = structure.flatten_up_to(new)
    return structure.unflatten(map(_take_object, old_leaves, new_leaves))


def _map_states(
    is_state: Callable[[Any], bool], change: Callable[[Any], Any], tree: PyTree
) -> PyTree:
    """Changes the parts of a pytree that `is_state` finds; all else stays."""

    def is_leaf(part: Any) -> bool:
        return is_object(part) or is_state(part)

    def map_leaf(leaf: Any) -> Any:
        return change(leaf) if is_state(leaf) else leaf

    return jax.tree.map(map_leaf, tree, is_leaf=is_leaf)


def _take_object(old: Any, new: Any) -> Any:
    """Returns the value to hold; a module stays the same object, with new values.

    A compiled program may refer to the module.
    """
    if old is new or not is_tree_node(old):
        return new
    adapter_of(old).assign(old, new)
    return old


def is_like(held: PyTree, returned: PyTree) -> bool:
    """Returns whether a value could be the state that a step left."""
    new = _map_states(_equinox.is_replica_state, _equinox.as_state, returned)
    first_change = next(_find_changes(held, new, ()), None)
    return first_change is None


def check_state(before: PyTree, after: PyTree) -> None:
    """Raises, with all places, if a step returns a different kind of state."""
    problems = list(_find_changes(before, after, ()))
    if not problems:
        return
    shown = f"{problems[0]}. "
    if len(problems) > 1:
        shown = f"{len(problems)} places differ:\n{list_lines(problems, most=10)}\n"
    raise StateStructureError(
        f"`step` must return a state like the one that it takes, but {shown}Return all "
        "of it, in the same order, with the same shapes and dtypes, and the metrics "
        "after it: `return state, metrics`."
    )


def _find_changes(before: Any, after: Any, keys: tuple[Any, ...]) -> Iterator[str]:
    """Yields a text for each difference between two nodes, or below them."""
    place = expression_of(PURE_STATE, keys)
    old = children_with_keys(before)
    new = children_with_keys(after)
    if old is None and new is None:
        yield from _compare_leaves(place, before, after)
    elif old is None or new is None or type(before) is not type(after):
        change = f"was {_describe_node(before)} and became {_describe_node(after)}"
        yield f"`{place}` {change}"
    elif [key for key, _ in old] != [key for key, _ in new]:
        yield from _compare_children(dict(old), dict(new), keys)
    else:
        for (own, was), (_, now) in zip(old, new, strict=True):
            yield from _find_changes(was, now, (*keys, *own))
        if _own_structure(before) != _own_structure(after):
            kind = type(before).__name__
            yield f"`{place}`, {_a(kind)}, has different static fields now"


def _compare_children(
    old: Mapping[Any, Any], new: Mapping[Any, Any], keys: tuple[Any, ...]
) -> Iterator[str]:
    """Yields the differences below a node with new or lost children."""
    all_keys = dict.fromkeys([*old, *new])
    for own in all_keys:
        child_keys = (*keys, *own)
        if own not in new:
            yield f"`{expression_of(PURE_STATE, child_keys)}` is gone"
        elif own not in old:
            yield f"`{expression_of(PURE_STATE, child_keys)}` is new"
        else:
            yield from _find_changes(old[own], new[own], child_keys)


def _compare_leaves(place: str, old: Any, new: Any) -> Iterator[str]:
    """Yields the difference between two leaves, unless they count as equal."""
    if not is_array(old):
        if not is_equal(old, new):
            yield (
                f"`{place}`, which is not an array but {old!r:.40}, became "
                f"{describe(new)}: begin with `jnp.asarray(...)`"
            )
        return
    if describe(old) == describe(new):
        return
    change = became(old, new).replace(" became ", " and became ")
    yield f"`{place}` was {change}{_find_cast(old, new)}"


def _find_cast(old: Any, new: Any) -> str:
    """Returns a text on keeping the dtype of an array, if only the dtype changed."""
    is_number = is_array(new) and not jnp.issubdtype(new.dtype, jax.dtypes.prng_key)
    if not is_number or new.shape != old.shape:
        return ""
    if old.dtype == bool:
        return (
            ": cast it in the step (`.astype(bool)`), because a sum, a mean or an "
            "`all_reduce` of flags is a number"
        )
    wanted = f"`.astype({str(new.dtype)!r})`"
    return f": begin with that dtype ({wanted}), or cast it in the step"


def _describe_node(node: Any) -> str:
    return describe(node) if is_array(node) else _a(type(node).__name__)


def _a(kind: str) -> str:
    return "None" if kind == "NoneType" else f"a `{kind}`"


def _own_structure(node: Any) -> Any:
    """Returns the structure of a node without its children."""
    return jax.tree.structure(node, is_leaf=lambda part: part is not node)
