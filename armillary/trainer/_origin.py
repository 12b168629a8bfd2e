"""Finds the operation of a step that first left values which are not finite.

A bad step was undone, and its data taken back, so it can run once more, now with a flag
for every value on the way. From an array that it leaves bad, the flags lead back,
operand by operand, to an operation whose operands are all good, or to the batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from armillary._jax_compat import get_mapped_axes
from armillary._jaxpr import source_line
from armillary.distribute.program._trace import TracedStep
from armillary.trainer._guard import is_bad

# Programs that are part of the one around them.
_CALLS = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint")


class _Node(NamedTuple):
    """A value on the way.

    Attributes:
        made_by: An equation, after those that it is within; for an array of the batch
            its path; `None` for state.
        operands: The nodes that it was made from.
    """

    made_by: Any
    operands: tuple[int, ...]


class _Value(NamedTuple):
    """An array, and its node if it has one."""

    array: Any
    node: int | None = None


def find_origin(
    step: TracedStep,
    slots: Sequence[Any],
    batches: Sequence[Any],
    batch_paths: Sequence[str],
    bad: Sequence[int],
) -> str | None:
    """Returns a sentence on where bad values come from; `None` if it is not known.

    The step gets the arrays of the state and of its batches, which have these paths. Of
    the first, `bad` are the indices of those that it leaves bad.
    """
    probe = _Probe(len(slots), batch_paths)
    flags = np.asarray(jax.jit(probe.run, static_argnums=0)(step, slots, batches))
    is_flagged = dict(zip(probe.flagged, flags, strict=True))
    ends = [probe.outputs[step.changed.index(i)].node for i in bad if i in step.changed]
    on_the_way = {node for node in ends if node is not None and is_flagged.get(node)}
    # Operands come before what is made from them, so this ends at the first of all.
    node = None
    while on_the_way:
        node = max(on_the_way)
        on_the_way.remove(node)
        on_the_way |= {i for i in probe.nodes[node].operands if is_flagged.get(i)}
    return None if node is None else _describe(probe.nodes[node].made_by)


class _Probe:
    """A step with a flag for each of its values.

    Attributes:
        nodes: The values that have flags, and the inputs; operands come first.
        flagged: The nodes that the flags are of, in their order.
        outputs: What the step returned.
    """

    def __init__(self, num_slots: int, batch_paths: Sequence[str]) -> None:
        # What is bad before the step is no cause: it counts as good.
        self.nodes = [_Node(path, ()) for path in (*[None] * num_slots, *batch_paths)]
        self.flagged: list[int] = []
        self.outputs: list[_Value] = []

    def run(self, step: TracedStep, slots: list[Any], batches: list[Any]) -> Any:
        """Traces the step; returns its flags."""
        flags: dict[int, Any] = {}
        inputs = [_Value(array) for array in slots]
        for node, array in enumerate(batches, len(slots)):
            inputs.append(_Value(array, node))
            flags[node] = jnp.any(is_bad(array))
        self.outputs = self._interpret(step.program, inputs, flags)
        self.flagged = list(flags)
        return jnp.array(list(flags.values()), bool)

    def _interpret(
        self,
        program: Any,
        inputs: Sequence[_Value],
        flags: dict[int, Any],
        within: tuple[Any, ...] = (),
    ) -> list[_Value]:
        jaxpr = getattr(program, "jaxpr", program)
        constants = map(_Value, getattr(program, "consts", ()))
        names = (*jaxpr.constvars, *jaxpr.invars)
        values = dict(zip(names, (*constants, *inputs), strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val) if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            name, params = equation.primitive.name, equation.params
            path = (*within, equation)
            if name in _CALLS:
                body = params.get("call_jaxpr", params.get("jaxpr"))
                results = self._interpret(body, operands, flags, path)
            elif name == "shard_map":
                results = self._interpret_mapped(path, operands, flags)
            else:
                results = self._apply(jaxpr, path, operands, flags)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _interpret_mapped(
        self,
        path: tuple[Any, ...],
        operands: Sequence[_Value],
        flags: dict[int, Any],
    ) -> list[_Value]:
        params = path[-1].params
        axes = get_mapped_axes(path[-1])
        inner: dict[int, Any] = {}
        results: list[_Value] = []

        def body(*arrays: Any) -> Any:
            pairs = zip(arrays, operands, strict=True)
            inputs = [_Value(array, operand.node) for array, operand in pairs]
            results[:] = self._interpret(params["jaxpr"], inputs, inner, path)
            return [r.array for r in results], jnp.array(list(inner.values()), bool)[
                None
            ]

        arrays, on_replicas = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(
                list(params["out_specs"]),
                PartitionSpec(tuple(axes)),
            ),
            axis_names=axes,
            check_vma=params["check_vma"],
        )(*[operand.array for operand in operands])
        flags.update(zip(inner, jnp.any(on_replicas, 0), strict=True))
        pairs = zip(arrays, results, strict=True)
        return [_Value(array, result.node) for array, result in pairs]

    def _apply(
        self,
        jaxpr: Any,
        path: tuple[Any, ...],
        operands: Sequence[_Value],
        flags: dict[int, Any],
    ) -> list[_Value]:
        """Runs one equation as it is: loops and branches are one operation."""
        equation = path[-1]
        pairs = zip(equation.invars, operands, strict=True)
        arrays = {atom: o.array for atom, o in pairs if isinstance(atom, core.Var)}
        alone = jaxpr.replace(
            constvars=[],
            invars=list(arrays),
            outvars=equation.outvars,
            eqns=[equation],
            effects=equation.effects,
        )
        run = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))
        before = tuple(o.node for o in operands if o.node is not None)
        results: list[_Value] = []
        for array in run(*arrays.values()):
            node = None
            if jnp.issubdtype(array.dtype, jnp.inexact):
                node = len(self.nodes)
                self.nodes.append(_Node(path, before))
                flags[node] = jnp.any(is_bad(array))
            results.append(_Value(array, node))
        return results


def _describe(made_by: Any) -> str:
    if isinstance(made_by, str):
        return f"They come from the batch, whose `{made_by}` holds such values."
    # What JAX traced once and used again does not know whom it was called by.
    lines = [line for line in map(source_line, made_by) if line]
    where = f", at {lines[-1]}" if lines else ""
    name = made_by[-1].primitive.name
    # JAX fills in NaN there.
    hint = " An index of it lies outside, such as a label that is no class."
    return (
        f"The first operation to leave such values is `{name}`{where}."
        f"{hint if name == 'gather' else ''}"
    )
