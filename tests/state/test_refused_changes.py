"""Tests of refused changes to state, after which the arrays are put back."""

import argparse
import collections
import copy
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer

from armillary.errors import StateStructureError
from armillary.state._lift import State
from tests.problems import Holder


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: Any


def linear(seed: int = 0) -> nnx.Linear:
    return nnx.Linear(2, 2, rngs=nnx.Rngs(seed))


def change(**changes: Any) -> Any:
    """Returns a step that sets attributes to what functions of the holder return."""

    def step(root: Holder) -> None:
        vars(root).update({name: make(root) for name, make in changes.items()})

    return step


W = jnp.ones(2)
NEW = "history: made by the step, so nothing carries it to the next one"


@pytest.mark.parametrize(
    ("before", "call", "message"),
    [
        ({"loss": W}, change(loss=lambda r: 0.0), "loss: an array became float 0.0"),
        (
            {"tree": {"w": W, "mean": np.zeros(2, "float32")}},
            lambda r: r.tree.update(mean=r.tree["w"] * 0),
            r"mean: float32 \(2,\) in `ndarray` became float32 \(2,\) in a `jax.Array`",
        ),
        (
            {"tree": (W, np.zeros(2, "float32"))},
            change(tree=lambda r: (r.tree[0], r.tree[1] + 1)),
            r"tree/1: float32 \(2,\) became another value",
        ),
        ({"w": W}, change(new=lambda r: r.w * 2), "new: made by the step"),
        (
            {"v": nnx.Variable({"a": W})},
            lambda r: r.v.set_value({"a": W, "b": W}),
            "v: tree structure",
        ),
        (
            {"model": linear()},
            lambda r: setattr(r.model, "cache", nnx.Variable(W)),
            "model/cache: made by the step",
        ),
        (
            {"model": Holder(count=3), "w": W},
            lambda r: setattr(r.model, "count", r.model.count + 1),
            "model/count: int 3 became 4, once, while the step was traced",
        ),
        (
            {"history": None, "w": W},
            change(history=lambda r: {"a": r.w, "b": [r.w]}),
            NEW,
        ),
        ({"history": [], "w": W}, lambda r: r.history.append(r.w), NEW),
        (
            {"history": {}, "w": W},
            lambda r: r.history.update(a=r.w),
            NEW,
        ),
        (
            {"state": {"step": 0, "w": W}},
            change(state=lambda r: {"step": r.state["step"] + 1, "w": r.state["w"]}),
            "state/step: int 0 became int 1",
        ),
        (
            {"a": Holder(w=W), "b": Holder(w=W + 1)},
            change(a=lambda r: r.b, b=lambda r: r.a),
            "changed plain values",
        ),
        (
            {"frozen": Frozen(W)},
            change(frozen=lambda r: Frozen(r.frozen.weight + 1)),
            r"frozen/weight: in a new object that the step made.*register_dataclass",
        ),
    ],
)
def test_a_change_that_no_loop_can_carry_is_named(run_lifted, before, call, message):
    root = Holder(**copy.deepcopy(before))
    state = State([(root, "")])
    arrays = state.read()
    with pytest.raises(StateStructureError, match=message):
        run_lifted(lambda: call(root), root)
    assert all(old is new for old, new in zip(arrays, state.read(), strict=True))
    slots = State([(root, "")]).slots
    left = [slot.read() for slot in slots if slot.variable is None]
    assert not any(isinstance(leaf, Tracer) for leaves in left for leaf in leaves)


def test_arrays_are_put_back_when_a_step_raises(run_lifted):
    model = linear()
    root = Holder(model=model, params={"w": jnp.ones(2)}, count=jnp.asarray(1))
    before = (model.kernel[...], root.params, root.count)

    def step():
        model.kernel[...] = model.kernel[...] * 0
        root.params = {"w": root.params["w"] * 0}
        root.count = root.count + 1
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        run_lifted(step, root)
    assert model.kernel[...] is before[0]
    assert root.params is before[1]
    assert root.count is before[2]
    model.kernel[...] = model.kernel[...] + 1  # its trace state is the outer one again


def test_all_changes_are_reported_together(run_lifted):
    root = Holder(
        model=linear(),
        params={"w": jnp.ones(2)},
        items=(jnp.ones(1), "tag"),
        moved=jnp.ones((2, 3)),
        lost=jnp.ones(1),
    )

    def step():
        root.model.kernel.set_value(root.model.kernel[...].astype(jnp.bfloat16))
        root.params = {"w": root.params["w"], "b": jnp.ones(1)}
        root.items = (root.items[0], "other")
        root.moved = root.moved.T
        root.lost = None
        root.fresh = jnp.zeros(())

    with pytest.raises(StateStructureError) as caught:
        run_lifted(step, root)
    message = str(caught.value)
    assert message.startswith("`step` changed 6 of 7 slots")
    assert "  model/kernel: float32 (2, 2) became bfloat16 (2, 2)\n" in message
    assert "  params: tree structure PyTreeDef({'w': *}) became" in message
    assert "  items/1: str 'tag' became str 'other'\n" in message
    assert "  moved: float32 (2, 3) became float32 (3, 2)\n" in message
    assert "  lost: tree structure" in message
    assert "  fresh: made by the step, so nothing carries it to the next one" in message
    assert "and cast before assigning (`value.astype(jnp.float32)`)" in message


def test_python_changes_of_a_failed_step_stay_without_its_arrays(run_lifted):
    root = Holder(last=None, names={"a"}, queue=collections.deque([1]), w=jnp.ones(2))

    def step():
        root.last = root.w.sum()
        root.queue.append(root.w)
        root.names.add("b")
        del root.w
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        run_lifted(step, root)
    assert root.last is None and list(root.queue) == [1, None]
    assert root.names == {"a", "b"} and root.w.tolist() == [1, 1]


def test_a_name_that_a_step_rebinds_to_an_array_is_named(run_lifted):
    weight = jnp.ones(2)

    def step():
        nonlocal weight
        weight = weight + 1

    with pytest.raises(
        StateStructureError, match=r"weight: the step put an array into a name.*hold it"
    ):
        run_lifted(step, step)


def test_a_flag_that_makes_the_next_step_another_one_is_refused(run_lifted):
    root = Holder(started=False, total=jnp.full((), 100.0))

    def step():
        if not root.started:
            root.total, root.started = jnp.zeros(()), True
        root.total = root.total + 1

    with pytest.raises(
        StateStructureError,
        match=r"`step` changed plain values, so the next step would be a different"
        r"(.|\n)*  started: bool False became True, once, while the step was traced\n"
        r"Hold counters and conditions in arrays",
    ):
        run_lifted(step, root)
    assert float(root.total) == 100


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ({"x": {"n": 0}}, lambda r: r.held["x"].update(n=r.held["x"]["n"] + 1)),
        (np.int64(0), lambda r: setattr(r, "held", r.held + 1)),
        ((0,), lambda r: setattr(r, "held", (r.held[0] + 1,))),
        (argparse.Namespace(n=0), lambda r: setattr(r.held, "n", r.held.n + 1)),
        (np.zeros(2), lambda r: r.held.__iadd__(1)),
        (["a"], lambda r: r.held.append("b")),
        ({"a"}, lambda r: r.held.add(len(r.held))),
    ],
    ids=["nested", "NumPy scalar", "tuple", "Namespace", "NumPy", "list", "set"],
)  # fmt: skip
def test_a_plain_value_that_a_step_counts_is_refused_anywhere(
    run_lifted, before, change
):
    root = Holder(held=before, w=jnp.ones(1))

    with pytest.raises(StateStructureError, match=r"\n  held.*, once, while the step"):
        run_lifted(lambda: change(root), root)


def test_an_error_lists_the_changes_of_all_places(run_lifted):
    root = Holder(loss=W, rows=(W, W))
    with pytest.raises(StateStructureError) as caught:
        run_lifted(lambda: change(loss=lambda r: 0.0, rows=lambda r: (W,))(root), root)
    paths = [line.partition(": ")[0] for line in caught.value.changes]
    assert paths == ["loss", "rows"]
