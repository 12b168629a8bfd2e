"""Tests of the walk that finds the arrays that an object reaches."""

import abc
import argparse
import collections
import dataclasses
import functools
import pathlib
import threading
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.state._lift import State, find_slots
from armillary.state._slots import Role
from armillary.state._walk import Walk
from tests.problems import Holder

GLOBAL_MODULE = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@dataclasses.dataclass
class Record:
    weight: Any
    name: str = "record"


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    weight: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    weight: Any
    bias: Any


class Pair(collections.namedtuple("Pair", "left right")):
    __slots__ = ()


def linear(seed: int = 0) -> nnx.Linear:
    return nnx.Linear(2, 3, rngs=nnx.Rngs(seed))


def find_paths(root: Any, path: str = "") -> list[str]:
    return [leaf for slot in find_slots(root, path) for leaf in slot.paths]


@pytest.mark.parametrize(
    "value",
    [
        {"inner": [jnp.ones(1)]},
        types.SimpleNamespace(inner=jnp.ones(1)),
        Record(jnp.ones(1)),
        FrozenRecord(jnp.ones(1)),
        argparse.Namespace(inner=jnp.ones(1)),
        collections.deque([{"w": jnp.ones(1)}]),
        (collections.Counter(w=jnp.ones(1)), 3),
        Pair(jnp.ones(1), None),
        nnx.Dict(inner=nnx.Param(jnp.ones(1))),
        functools.partial(lambda weight: weight, jnp.ones(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_array_is_found_in(value):
    root = Holder(place=value)
    expected = 0 if isinstance(value, functools.partial) else 1
    # The values in a partial are constants of the function, not places to rebind.
    assert len(find_paths(root)) == expected


@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: {"a": [module]},
        lambda module: ({"a": module},),
        lambda module: types.SimpleNamespace(a=module),
        Record,
        FrozenRecord,
        lambda module: nnx.List([module]),
        lambda module: Pair(module, 1),
        lambda module: functools.partial(lambda x: x, module),
        lambda module: functools.partial(lambda x: x, x=module),
        lambda module: Registered(module, None),
        lambda module: lambda x: module(x),
        lambda module: module.__call__,
    ],
    ids=[
        "list in dict", "dict in tuple", "namespace", "dataclass", "frozen dataclass",
        "nnx.List", "namedtuple", "partial argument", "partial keyword",
        "registered dataclass", "closure", "bound method",
    ],
)  # fmt: skip
def test_a_module_is_found_in(wrap):
    module = linear()
    slots = find_slots(Holder(place=wrap(module)))
    assert {slot.key for slot in slots} == {id(module.kernel), id(module.bias)}


class Abstract(abc.ABC):
    def __init__(self) -> None:
        self.weight = jnp.ones(1)

    @abc.abstractmethod
    def train_step(self, iterator: Any) -> None: ...


MEMBERS = {"train_step": lambda self, iterator: None}


def make_by_type() -> Any:
    return type("Made", (Abstract,), MEMBERS)()


def make_by_new_class() -> Any:
    return types.new_class("Made", (Abstract,), {}, lambda body: body.update(MEMBERS))()


def make_trainer() -> Any:
    made = type("Made", (armillary.StandardTrainer,), MEMBERS)
    trainer: Any = made(armillary.data.from_arrays({"x": np.ones(4)}, batch_size=2))
    trainer.weight = jnp.ones(1)
    return trainer


def make_record() -> Any:
    return dataclasses.make_dataclass("Made", ["weight"])(jnp.ones(1))


@pytest.mark.parametrize(
    "make", [make_by_type, make_by_new_class, make_trainer, make_record]
)
def test_an_object_of_a_class_that_a_call_made_is_looked_into(make) -> None:
    assert "weight" in find_paths(make())


def test_a_pytree_attribute_is_one_slot_with_a_path_for_each_leaf():
    (slot,) = find_slots(Holder(params={"dense": {"w": jnp.ones(2)}, "b": jnp.ones(1)}))
    assert slot.path == "params"
    assert slot.paths == ("params/b", "params/dense/w")


def test_cycles_end():
    root = Holder(weight=jnp.ones(1))
    root.self = root
    root.items = [root, {"root": root}]
    assert find_paths(root) == ["weight"]


def test_shared_parameters_are_one_slot():
    first, second = linear(0), linear(1)
    second.kernel = first.kernel
    slots = find_slots(Holder(first=first, second=second))
    assert sorted(slot.path for slot in slots) == [
        "first/bias", "first/kernel", "second/bias",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        threading.local(),
        pathlib.Path("data"),
        np.ones(3),
        "text",
        3,
        None,
        optax.sgd(0.1),
        armillary.MirroredStrategy(),
        jnp,
        nnx.Linear,
        nnx.relu,
        print,
        {1: "a", "b": object()},
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_is_found_in(value):
    assert find_slots(Holder(place=value)) == []
    assert not find_slots(value)


def in_called_function(model, other):
    def helper():
        return model.kernel, other.kernel

    return lambda: helper()


def in_defaults(model, other):
    def step(x, model=model, *, other=other):
        return x, model, other

    return step


def in_compiled(model, other):
    return jax.jit(lambda x: model(other(x)))


def in_wrapper(model, other):
    def step(x):
        return model(x)

    @functools.wraps(step)
    def wrapper(x):
        return step(other(x))

    return wrapper


def in_function_of_the_library(model, other):
    step = armillary.function(lambda x: model(other(x)))
    return lambda: step


@pytest.mark.parametrize(
    "make",
    [
        in_called_function,
        in_defaults,
        in_compiled,
        in_wrapper,
        in_function_of_the_library,
    ],
)
def test_objects_that_a_function_reaches_by_name_are_found(make):
    model, other = linear(0), linear(1)
    found = {slot.key for slot in find_slots(make(model, other))}
    assert found == {id(v) for m in (model, other) for v in (m.kernel, m.bias)}


def test_paths_of_functions_are_the_names_in_them():
    model = linear()

    def helper():
        return model.kernel, [GLOBAL_MODULE(x) for x in ()]

    class Trainer:
        def __init__(self):
            self.model = model

        def step(self):
            return self.model.kernel, helper()

    assert sorted(find_paths(lambda: helper())) == [
        "helper/GLOBAL_MODULE/bias", "helper/GLOBAL_MODULE/kernel",
        "helper/model/bias", "helper/model/kernel",
    ]  # fmt: skip
    assert sorted(find_paths(Trainer().step))[-2:] == [
        "self/model/bias", "self/model/kernel",
    ]  # fmt: skip


def test_a_method_of_a_library_class_leads_to_its_object():
    model, metric = linear(), nnx.metrics.Average()
    assert len(find_slots(model.__call__)) == 2
    assert len(find_slots(functools.partial(nnx.relu, model))) == 2
    assert len(find_slots(Holder(update=metric.update))) == 2


def test_names_that_are_assigned_later_are_passed_over():
    def step():
        return later

    assert find_slots(step) == []
    later = linear()
    assert len(find_slots(step)) == 2


def test_roles_follow_the_variable_type():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.bn = nnx.BatchNorm(2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    root = Holder(net=Net(nnx.Rngs(0)), loss=nnx.metrics.Average(), w=jnp.ones(1))
    roles = {slot.path: slot.role for slot in find_slots(root)}
    assert roles["net/bn/scale"] is Role.PLAIN
    assert roles["net/bn/mean"] is Role.BATCH_STATISTIC
    assert roles["net/dropout/rngs/key"] is Role.RANDOM_KEY
    assert roles["net/dropout/rngs/count"] is Role.PLAIN
    assert roles["loss/total"] is Role.METRIC
    assert roles["loss/count"] is Role.METRIC
    assert roles["w"] is Role.PLAIN


class Slotted:
    __slots__ = ("__hidden", "model", "unset", "weight")

    def __init__(self) -> None:
        self.weight, self.model = jnp.ones(2), linear()
        self.__hidden = jnp.ones(1)


class SlottedAndMore(Slotted):
    def __init__(self) -> None:
        super().__init__()
        self.more = jnp.ones(3)


@dataclasses.dataclass(slots=True)
class SlottedRecord:
    weight: Any


def test_attributes_in_slots_are_found():
    expected = ["_Slotted__hidden", "model/bias", "model/kernel", "weight"]
    assert sorted(find_paths(Slotted())) == expected
    assert sorted(find_paths(Holder(x=SlottedAndMore()), "")) == sorted(
        f"x/{path}" for path in [*expected, "more"]
    )
    assert find_paths([SlottedRecord(jnp.ones(1))]) == ["0/weight"]
    assert find_paths({"x": {"y": SlottedRecord({"w": jnp.ones(1)})}}) == [
        "x/y/weight/w"
    ]


@pytest.mark.slow
def test_no_nest_is_too_deep():
    chain: Any = Holder(weight=jnp.ones(1))
    nest: Any = {"weight": jnp.ones(1)}
    for _ in range(3000):
        chain, nest = Holder(next=chain), {"next": [nest]}
    assert len(find_slots(chain)) == 1
    assert len(find_slots(Holder(nest=nest))) == 1
    assert jax.tree.leaves({"a": 1}) == [1]


def test_a_module_that_two_attributes_lead_to_is_reached_from_both():
    model = linear()
    walk = Walk([(root := Holder(first=model, second=Holder(inner=[model])), "")])
    for name in ("first", "second"):
        assert {id(model), id(model.kernel)} <= walk.reached_from({name})
    assert id(model) not in walk.reached_from({"third"})
    assert {id(root), id(root.second)} <= walk.leading_to_slots


@pytest.mark.parametrize("value", [None, (), {}, optax.MaskedNode()])
def test_a_variable_without_arrays_is_a_slot_without_arrays(value):
    (slot,) = find_slots(Holder(v=nnx.Variable(value)))
    assert slot.paths == () and slot.read() == []


def test_a_long_list_of_plain_tuples_is_looked_at_as_one():
    files = [(f"image_{i}", i, ("train", 0.5)) for i in range(1000)]

    walk = Walk([(Holder(files=files, kernel=jnp.ones(2)), "")])

    assert len(walk.nodes) < 10
    assert [slot.path for slot in walk.slots.values()] == ["kernel"]


@pytest.mark.parametrize("wrap", [lambda value: (0, value), lambda value: (0, [value])])
def test_an_array_among_many_plain_tuples_is_found(wrap):
    found = Holder(rows=[*((f"{i}", i) for i in range(100)), wrap(jnp.ones(2))])
    walk = Walk([(found, "")])

    paths = [slot.path for slot in walk.slots.values()]
    assert [*paths, *(path for path, _ in walk.constants)] != []


def test_a_list_within_many_tuples_is_watched():
    inner = [1]
    state = State([(Holder(rows=[("a", 1), ("b", inner)], kernel=jnp.ones(2)), "")])
    state.watch()
    assert state.is_current()

    inner.append(2)

    assert not state.is_current()


def test_a_proxy_whose_object_is_gone_holds_nothing():
    gone = weakref.proxy(Holder())
    trainer = Holder(gone=gone, several=[gone, (gone,)], kernel=jnp.ones(2))

    assert find_paths(trainer) == ["kernel"]


def make_rows(number: int = 1000) -> list[Any]:
    return [
        {"path": f"{i}", "at": [i, (0.5, {"part": "train"})]} for i in range(number)
    ]


def test_a_long_list_of_plain_dictionaries_is_looked_at_as_one():
    holder = Holder(rows=make_rows(), kernel=jnp.ones(2))

    walk = Walk([(holder, "")], finds_plain=False)

    assert len(walk.nodes) < 10
    assert [slot.path for slot in walk.slots.values()] == ["kernel"]
    assert len(Walk([(holder, "")]).nodes) > 1000


@pytest.mark.parametrize(
    "put",
    [
        lambda rows, value: rows[-1].update(weight=value),
        lambda rows, value: rows[-1]["at"].append(value),
        lambda rows, value: rows[-1]["at"].append({"deep": [value]}),
        lambda rows, value: rows.append(value),
    ],
)
def test_an_array_among_many_plain_dictionaries_is_found(put):
    rows = make_rows(100)
    holder = Holder(rows=rows)
    assert find_paths(holder) == []

    put(rows, jnp.ones(2))

    (path,) = find_paths(holder)
    assert path.startswith("rows/")
    (slot,) = Walk([(holder, "")]).slots.values()
    assert slot.paths == (path,)


def test_a_plain_list_that_holds_itself_ends():
    rows: list[Any] = [1, {"two": 2}]
    rows += [rows, rows, {"rows": rows}]
    assert find_paths(Holder(rows=rows, kernel=jnp.ones(2))) == ["kernel"]


def test_a_number_in_a_plain_dictionary_is_watched():
    rows = make_rows(10)
    state = State([(Holder(rows=rows, kernel=jnp.ones(2)), "")])
    state.watch()
    assert state.is_current()

    rows[3]["at"][1] = 7

    assert not state.is_current()
