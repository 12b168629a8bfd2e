"""All cases, by what they are about."""

from tests.differential import (
    derivatives,
    functions,
    layers,
    optimizers,
    programs,
    reductions,
    settings,
)
from tests.differential.harness import Case, can_merge

GROUP = 10
SECTIONS: dict[str, list[Case]] = {
    "Optimizers, wrappers and schedules of Optax": optimizers.CASES,
    "Reductions over replicas": reductions.CASES,
    "The loss of all replicas": derivatives.CASES,
    "Layers of Flax NNX": layers.LAYERS,
    "Metrics of Flax NNX": layers.METRICS,
    "Changes to a model between loops": [*layers.SURGERY, *layers.SWITCHES],
    "Transformations of Flax NNX": programs.NNX,
    "Control flow": programs.CONTROL_CASES,
    "Derivatives and other transformations of JAX": programs.AUTODIFF_CASES,
    "Callbacks": programs.CALLBACK_CASES,
    "Sparse arrays": programs.SPARSE_CASES,
    "Random numbers": functions.RANDOM_CASES,
    "Losses and other functions of Optax": functions.OPTAX_CASES,
    "Functions of JAX": functions.JAX_CASES,
    "Options of the trainer": settings.OPTION_CASES,
    "JAX's settings and tools for debugging": settings.TOOLS,
    "State that differs between replicas": settings.STATE,
}
CASES = [case for cases in SECTIONS.values() for case in cases]


def count_configurations(cases: list[Case]) -> int:
    """Returns how many trainings the full suite compares: replicas, loops, options."""
    return sum(4 * len(case.loops) * len(case.options) for case in cases)


def groups(cases: list[Case]) -> list[list[Case]]:
    """Returns cases that share a program together, and all others by themselves."""
    together = []
    for is_sharded in (False, True):
        shared = [c for c in cases if can_merge(c) and bool(c.reference) == is_sharded]
        together += [shared[i : i + GROUP] for i in range(0, len(shared), GROUP)]
    return together + [[case] for case in cases if not can_merge(case)]


def name_group(cases: list[Case]) -> str:
    """Returns the names of the first and the last case of a group."""
    return " to ".join(dict.fromkeys((cases[0].name, cases[-1].name)))
