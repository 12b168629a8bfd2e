"""The table of a plan."""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from armillary._format import format_bytes, format_scaled, make_table
from armillary.plan._costs import COLLECTIVE_KINDS, Collective, count_rounds
from armillary.plan._peak import Tensor

if TYPE_CHECKING:
    from rich.table import Table

    from armillary.plan._record import Memory, Plan, Variant

_MAX_TENSORS = 5
# Parts of the path of an operation that every operation of a loop has.
_AROUND = "call_exported/"  # The loop around a step, as it travels to the compiler.
_CALLS = ("jit(", "jvp(", "transpose(")
_USUAL_PARTS = {"while", "body", "closed_call", "checkpoint", "rematted_computation"}


def tabulate(plan: "Plan") -> "Table":
    """Returns the table of a plan."""
    state = "traced, not compiled" if plan.is_abstract else "compiled, not run"
    sections = (_list_work(plan), _list_memory(plan), _list_peak(plan.peak))
    title = f"{plan.topology.text}: {state}"
    rows = (*sections, _list_traffic(plan))
    return make_table(["", ""], *filter(None, rows), title=title)


def _list_work(plan: "Plan") -> list[tuple[str, str]]:
    sizes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    replicas = f"1, over {sizes}" if plan.is_divided else str(plan.num_replicas)
    batch = f"{plan.per_replica_batch} each, {plan.global_batch} global"
    if plan.accumulate_steps > 1:
        batch += f", in {plan.accumulate_steps} parts"
    if not plan.global_batch:
        batch = "none: the steps make their own data"
    held = f"{format_bytes(plan.held_bytes)} on each device"
    if plan.held_bytes < plan.state_bytes:
        held = f"{format_bytes(plan.state_bytes)}, {held}"
    flops = [f"{format_scaled(n, 'FLOP')} {kind}" for kind, n in plan.flops.items()]
    return [
        ("replicas", replicas),
        ("batch", batch),
        ("steps in a program", f"up to {plan.steps_per_program}"),
        ("state", held),
        ("products, per device", f"{', '.join(flops) or '0 FLOP'} a step"),
    ]


def _list_memory(plan: "Plan") -> list[tuple[str, str]]:
    target = plan.topology.target
    memory = plan.memory
    if plan.is_abstract or target is None:
        return []
    need = format_bytes(memory.total) if memory else "the compiler needs more"
    if target.memory_bytes is not None:
        verdict = "fits" if plan.fits else "does not fit"
        need = f"{verdict}: {need} of {format_bytes(target.memory_bytes)}"
    rows = [("memory", need)]
    parts = asdict(memory) if memory else {}
    for name, size in parts.items():
        rows.append((f"  {name.replace('_', ' ')}", format_bytes(size)))
    for variant in plan.variants:
        rows.append((f"with {variant.name}", _describe_variant(variant, memory)))
    if plan.largest_batch is not None:
        rows.append(("largest batch", f"{plan.largest_batch} on each replica"))
    rows.append(("compiled in", f"{plan.compile_seconds or 0.0:.1f} s here"))
    return rows


def _describe_variant(variant: "Variant", memory: "Memory | None") -> str:
    if variant.error is not None:
        first, _, _ = variant.error.partition("\n")
        return f"not possible: {first}"
    if variant.memory is None:
        return "the compiler needs more"
    total = format_bytes(variant.memory.total)
    if memory is None:
        return total
    saved = memory.total - variant.memory.total
    change = f"{format_bytes(abs(saved))} {'less' if saved >= 0 else 'more'}"
    return f"{total}, {change}"


def _list_peak(tensors: Iterable[Tensor]) -> list[tuple[str, str]]:
    """Returns the largest arrays at the peak, equal ones together."""
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for tensor in tensors:
        key = (tensor.shape, _shorten(tensor))
        sizes[key] += tensor.num_bytes
        counts[key] += 1
    rows: list[tuple[str, str]] = []
    for (shape, made_by), size in sizes.most_common(_MAX_TENSORS):
        count = counts[shape, made_by]
        several = f"{count} x " if count > 1 else ""
        name = "" if rows else "at the peak"
        rows.append((name, f"{format_bytes(size)}: {several}{shape}, {made_by}"))
    return rows


def _shorten(tensor: Tensor) -> str:
    """Returns the end of the path of an operation, and the pass that it is in."""
    if tensor.made_by.startswith(_AROUND):
        return "outside of the step"
    parts = tensor.made_by.split("/")
    telling = [
        part
        for part in parts
        if part not in _USUAL_PARTS and not part.startswith(_CALLS)
    ]
    text = "/".join(telling[-2:]) or parts[-1]
    if "transpose(jvp" in tensor.made_by:
        return f"{text} (backward)"
    return f"{text} (forward)" if "jvp(" in tensor.made_by else text


def _list_traffic(plan: "Plan") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for kind in COLLECTIVE_KINDS:
        found = plan.of_step(kind)
        if found:
            rows.append((kind, _describe_kind(plan, kind, found)))
    if plan.num_groups > 1 and (rows or not plan.is_abstract):
        rows.append(("over slow links", _describe_slow(plan)))
    others = _describe_others(plan)
    if others:
        rows.append(("not in every step", others))
    if not rows:
        is_unknown = plan.is_abstract and plan.is_divided
        unknown = "not known before a compiler divides the step"
        rows.append(("collectives", unknown if is_unknown else "none"))
    if plan.memory is not None:
        hosts = ", ".join(plan.host_transfers) or "none"
        rows.append(("host, inside the loop", hosts))
    return rows


def _describe_kind(plan: "Plan", kind: str, found: list[Collective]) -> str:
    """Returns the bytes, the number and the order of collectives of one kind."""
    size = format_bytes(
        sum(collective.times * collective.num_bytes for collective in found)
    )
    count = sum(collective.times for collective in found)
    how = "before a compiler combines them"
    if not plan.is_abstract:
        num_asynchronous = sum(collective.is_asynchronous for collective in found)
        rounds = count_rounds(found, kind)
        how = f"{rounds} after each other; {num_asynchronous} asynchronous"
    return f"{size} a step in {count}, {how}"


def _describe_slow(plan: "Plan") -> str:
    """Returns the bytes between groups of devices, by the kind of collective."""
    slow = sorted(
        (collective for collective in plan.of_step() if collective.is_slow),
        key=lambda collective: collective.kind,
    )
    between = f"between {plan.num_groups} groups of devices"
    if not slow:
        return f"nothing {between}"
    parts: list[str] = []
    for kind, found in itertools.groupby(slow, key=lambda collective: collective.kind):
        of_kind = list(found)
        size = sum(collective.times * collective.num_bytes for collective in of_kind)
        count = sum(collective.times for collective in of_kind)
        parts.append(f"{kind} {format_bytes(size)} in {count}")
    return f"{', '.join(parts)}, {between}"


def _describe_others(plan: "Plan") -> str:
    """Returns the collectives that run once a loop or call, or conditionally."""
    counts: Counter[str] = Counter()
    for collective in plan.collectives:
        if not collective.is_of_step:
            when = (
                "under a condition" if collective.scope == "step" else collective.scope
            )
            counts[f"{collective.kind} {when}"] += 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())
