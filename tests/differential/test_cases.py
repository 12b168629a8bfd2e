"""A sample of the constructs gives on two replicas what plain JAX gives on one device.

`make differential` runs all constructs: see `all_cases.py`.
"""

import pytest

from tests.differential.harness import check
from tests.differential.suite import CASES, GROUP, groups, name_group

# One construct of each section whose constructs share a program.
SAMPLE = (
    "optax.adam",
    "armillary.weighted_mean",
    "armillary.over_replicas(mean): jax.grad",
    "nnx.Conv",
    "nnx.metrics.Accuracy",
    "nnx.remat",
    "lax.cond (local predicate, one shared branch)",
    "jax.vjp",
    "jax.experimental.io_callback",
    "sparse.BCOO (of parameters)",
    "jax.random.bernoulli",
    "optax.softmax_cross_entropy",
    "jax.nn.relu",
)
SAMPLED = [case for case in CASES if case.name in SAMPLE and case.is_here]


@pytest.mark.parametrize("cases", groups(SAMPLED), ids=name_group)
def test_constructs_equal_plain_jax(cases):
    check(cases, replicas=(2,))


def test_every_name_of_the_sample_has_a_case():
    assert {case.name for case in SAMPLED} == set(SAMPLE)


def test_a_group_is_not_too_large_to_read_its_failures():
    assert max(map(len, groups(CASES))) <= GROUP


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)
