"""Tests of `EpochHelper`."""

import jax.numpy as jnp
import pytest

import armillary
from armillary.trainer import EpochHelper


def test_an_epoch_may_have_several_loops():
    step = armillary.create_global_step()
    helper = armillary.utils.EpochHelper(epoch_steps=4, global_step=step)
    assert helper.current_epoch is None
    seen = []
    for _ in range(4):
        begins = helper.epoch_begin()
        step[...] += 2
        seen.append((begins, helper.batch_index, helper.epoch_end()))
    assert seen == [(True, 2, False), (False, 4, True)] * 2
    assert helper.current_epoch == 1


def test_a_helper_starts_where_the_global_step_is():
    helper = EpochHelper(10, lambda: 25)
    assert helper.epoch_begin()
    assert (helper.current_epoch, helper.batch_index) == (2, 5)


def test_an_epoch_that_has_not_begun_is_an_error():
    helper = EpochHelper(10, lambda: 0)
    with pytest.raises(ValueError, match=r"`epoch_end\(\)`.*Call `epoch_begin\(\)`"):
        helper.epoch_end()
    with pytest.raises(ValueError, match="`batch_index` of"):
        _ = helper.batch_index


def test_its_arguments_are_checked():
    with pytest.raises(ValueError, match="`epoch_steps` is 0"):
        EpochHelper(0, lambda: 0)
    with pytest.raises(TypeError, match="global_step"):
        EpochHelper(1, jnp.zeros(3))


def test_a_restore_of_an_earlier_step_begins_its_epoch():
    steps = [35]
    helper = EpochHelper(10, lambda: steps[-1])
    assert helper.epoch_begin()

    steps.append(12)
    assert helper.epoch_begin()
    assert helper.current_epoch == 1
    steps.append(20)
    assert not helper.epoch_begin()
    assert helper.epoch_end()
