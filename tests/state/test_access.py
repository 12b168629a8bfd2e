import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.state._access import Access, make_picker
from armillary.state._lift import State


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: Any
    y: Any
    name: str = dataclasses.field(metadata={"static": True}, default="")


def ones(count: int) -> list[jax.Array]:
    return [jnp.full(2, i, jnp.float32) for i in range(count)]


def make_root() -> Holder:
    a, b, c, d, e, f, g = ones(7)
    return Holder(
        array=a,
        params={"w": b, "scale": 2.0, "nested": [c, None]},
        point=Point(d, e, "origin"),
        model=nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        pair=nnx.Variable((f, g)),
        state=optax.adam(1e-3).init({"w": b}),
    )


def is_same(a: list[Any], b: list[Any], access: Access) -> bool:
    return not access.find_changes(a, b)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_what_was_written_is_what_would_be_read(data):
    root = make_root()
    state = State([(root, "")])
    access = Access(state)
    count = len(state.paths)
    only = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    before, old = access.read(), state.read()
    new = [leaf + 1 for leaf in old]
    held = access.writer(only)([new[i] for i in only], before)
    expected = [new[i] if i in only else old[i] for i in range(count)]
    assert all(a is b for a, b in zip(state.read(), expected, strict=True))
    assert is_same(held, access.read(), access)
    touched = {access.parts[part][0].path for part in access.find_changes(before, held)}
    assert touched == {state.owners[i].path for i in only}


def test_what_is_no_array_stays_beside_what_was_written():
    root = make_root()
    state = State([(root, "")])
    access = Access(state)
    only = [state.paths.index("params/w"), state.paths.index("point/x")]
    access.writer(only)([jnp.zeros(2), jnp.zeros(2)], access.read())
    assert root.params["scale"] == 2.0 and root.params["nested"][1] is None
    assert root.point.name == "origin"
    np.testing.assert_array_equal(root.params["w"], [0, 0])


def test_a_change_inside_a_container_is_found():
    root = make_root()
    access = Access(State([(root, "")]))
    before = access.read()
    root.params["w"] = jnp.zeros(2)
    (part,) = access.find_changes(before, access.read())
    assert access.parts[part][0].path == "params"


def test_picks_values_in_order():
    for positions in ([], [1], [2, 0], [0, 0, 1]):
        assert make_picker(positions)("abc") == ["abc"[i] for i in positions]
