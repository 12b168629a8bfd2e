import pytest
from flax import nnx

from armillary.state import _nnx


def test_the_installed_flax_has_what_lifting_needs():
    _nnx._check_flax()
    assert hasattr(nnx.Variable(0), "_raw_value")


def test_a_flax_without_a_private_attribute_is_named(monkeypatch):
    class Renamed:
        def __init__(self, value):
            self.value = value
            self._trace_state = self._var_metadata = None

    monkeypatch.setattr(nnx, "Variable", Renamed)
    with pytest.raises(ImportError) as caught:
        _nnx._check_flax()
    message = str(caught.value)
    assert "has no nnx.Variable._raw_value, which Armillary needs" in message
    assert 'pip install "flax==0.12.8"' in message
