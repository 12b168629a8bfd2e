"""Tests of the examples, compiled for TPUs and GPUs that are not there.

These tests need the wheels of the compilers: see `test_compiled.py`.
"""

import jax
import pytest
from flax import nnx

from armillary.plan import plan
from armillary.plan._costs import count_rounds
from tests.plan.test_compiled import topology as topology
from tests.testing.test_collectives import make_example

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["digits", "bert_mrpc"])
def test_an_example_sums_its_gradients_once_and_leaves_the_host_alone(name, topology):
    trainer, _ = make_example(name)
    found = plan(trainer, topology)
    assert found.fits
    assert found.host_transfers == ()
    assert count_rounds(found.of_step(), "all-reduce") == 1
    assert found.of_step() == found.of_step("all-reduce")
    parameters = jax.tree.leaves(nnx.state(trainer.model, nnx.Param))
    # All of each gradient, also BERT's positions that no input has: `all_reduce` sums
    # what the step hands it, and no compiler moves that sum before the scatter that
    # fills the other rows with zeros. When JAX placed the sums itself, where a value
    # that replicas share met one of their own, they stood before it by accident.
    num_bytes = sum(leaf.nbytes for leaf in parameters)
    moved = sum(each.num_bytes * each.times for each in found.of_step())
    assert num_bytes <= moved < num_bytes + 64  # and what metrics add up
    assert found.memory.donated > 0.9 * found.state_bytes
    is_gpu = found.topology.target.platform == "cuda"
    if is_gpu and name == "bert_mrpc":
        # Sums of the last layers go on while gradients of the first are computed.
        assert any(each.is_asynchronous for each in found.of_step())
