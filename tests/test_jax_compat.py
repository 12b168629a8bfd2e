"""Tests of the single warning about a JAX that is newer than the tested ones."""

import jax
import jax.numpy as jnp
import pytest

import armillary
from armillary import _jax_compat


@pytest.fixture
def newer(monkeypatch):
    """JAX 99, at the start of a program."""
    monkeypatch.setattr(jax, "__version__", "99.1.0")
    monkeypatch.setattr(jax, "__version_info__", (99, 1, 0))
    _jax_compat.warn_if_untested.cache_clear()
    yield
    _jax_compat.warn_if_untested.cache_clear()


def use():
    strategy = armillary.MirroredStrategy(jax.devices()[:2])
    strategy.run(lambda: jnp.zeros(()))


def test_a_newer_jax_is_one_line(newer, caplog):
    use()
    use()
    (record,) = caplog.records
    assert record.name == "armillary"
    assert record.levelname == "WARNING"
    message = record.getMessage()
    newest = ".".join(map(str, _jax_compat.NEWEST_TESTED))
    assert message.startswith(f"JAX 99.1.0 is newer than {newest}, the newest release")
    assert message.endswith(f'pip install "jax=={newest}".')
    assert "\n" not in message


@pytest.mark.slow
def test_a_newer_jax_is_asked_which_flags_it_knows(newer):
    flags = {"xla_cpu_collective_timeout_seconds": "5", "xla_no_such_flag": "1"}
    assert _jax_compat.find_unknown_flags(flags) == ["xla_no_such_flag"]


def test_a_tested_jax_knows_all_flags_of_the_library(monkeypatch):
    monkeypatch.setattr(_jax_compat.subprocess, "run", None)
    assert _jax_compat.find_unknown_flags({"xla_some_flag": "1"}) == []


def test_a_tested_jax_is_none(newer, monkeypatch, caplog):
    monkeypatch.setattr(jax, "__version_info__", _jax_compat.NEWEST_TESTED)
    use()
    assert not caplog.records
