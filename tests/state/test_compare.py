"""Tests of the comparison of objects before and after a step."""

import collections
import dataclasses
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from armillary.state._differences import find_differences, find_facts
from armillary.state._walk import Walk
from tests.problems import Holder


@dataclasses.dataclass(frozen=True)
class Frozen:
    number: int


def make_root() -> Holder:
    config = {"optim": {"rate": 0.1, "steps": [1, 2]}, "names": ("a", {"b": 3})}
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    return Holder(
        config=config,
        again=[config],
        model=model,
        loss=nnx.metrics.Average("loss"),
        params={"w": jnp.ones(2), "scale": 1.0},
        table=np.arange(3),
        frozen=Frozen(1),
        queue=collections.deque([1]),
        names={"x", "y"},
        space=types.SimpleNamespace(flag=True),
        fn=lambda x, factor=2: x * factor,
    )


def snapshot(root: Any) -> Walk:
    walk = Walk([(root, "")])
    walk.copy(walk.nodes.keys(), is_read=False)
    return walk


def differences(old: Walk, root: Any, names: Any = None) -> dict[str, str]:
    facts = [find_facts(walk, names) for walk in (old, snapshot(root))]
    return find_differences(*facts)


def test_objects_that_are_made_again_are_alike():
    assert differences(snapshot(make_root()), make_root()) == {}


def test_arrays_in_slots_may_change():
    root = make_root()
    old = snapshot(root)
    root.params = {"w": jnp.zeros(2), "scale": 1.0}
    root.model.layers[0].kernel[...] = jnp.zeros((2, 2))
    assert differences(old, root) == {}


@pytest.mark.parametrize(
    ("change", "path", "text"),
    [
        (lambda r: r.config["optim"].update(rate=2), "config/optim/rate", "became int"),
        (lambda r: r.config["optim"]["steps"].append(3), "config/optim/steps/2", "put"),
        (lambda r: r.config["optim"].pop("rate"), "config/optim/rate", "was removed"),
        (lambda r: r.config["names"][1].update(b=4), "config/names/1/b", "3 became 4"),
        (lambda r: setattr(r, "frozen", Frozen(2)), "frozen/number", "1 became 2"),
        (lambda r: r.queue.append(2), "queue/1", "int 2 was put there"),
        (lambda r: r.names.clear(), "names", "became set set()"),
        (lambda r: setattr(r.space, "flag", 1), "space/flag", "True became int 1"),
        (lambda r: r.params.update(scale=2.0), "params/scale", "1.0 became 2.0"),
        (lambda r: r.params.update(b=jnp.ones(1)), "params", "({'b': *, 's"),
        (lambda r: setattr(r, "again", [{**r.config}]), "again/0", "dict"),
        (lambda r: r.table.fill(7), "table", "int64 (3,) has changed"),
        (lambda r: setattr(r, "fn", lambda x: x), "fn", "became <code"),
        (
            lambda r: r.model.layers[0].kernel.set_metadata(frozen=True),
            "model/layers/0/kernel/frozen",
            "bool True was put there",
        ),
    ],
)
def test_a_change_at_any_depth_is_named(change, path, text):
    root = make_root()
    old = snapshot(root)
    change(root)
    changes = differences(old, root)
    assert path in changes
    assert text in changes[path]


def test_only_attributes_that_were_read_count():
    root = make_root()
    old = snapshot(root)
    root.config["optim"]["rate"] = 2.0
    root.added = 1
    assert differences(old, root, {"model", "space"}) == {}
    assert differences(old, root, {"again"}).keys() == {"config/optim/rate"}
    assert differences(old, root, {"added"}).keys() == {"added"}


def test_other_connections_are_a_difference():
    one, other = Holder(n=1), Holder(n=1)
    root = Holder(a=one, b=other)
    old = snapshot(root)
    root.b = one
    assert differences(old, root).keys() == {"b"}
