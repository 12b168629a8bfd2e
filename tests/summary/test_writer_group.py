"""Several writers at once."""

from unittest.mock import Mock

import numpy as np
import pytest

from armillary.summary import SummaryManager, Text

SCALARS = ["scalar", "flush", "close"]


def test_every_writer_gets_what_it_has_a_method_for(tmp_path):
    plain, rich = Mock(spec=SCALARS), Mock(spec=[*SCALARS, "text", "hyperparameters"])
    manager = SummaryManager(tmp_path, writer_fn=(lambda _: plain, lambda _: rich))

    manager.write_summaries({"loss": 1.0, "note": Text("hello")}, step=2)
    manager.write_hyperparameters({"rate": 0.1})
    manager.flush()
    manager.close()

    shared = [("scalar", ("loss", 1.0, 2)), ("flush", ()), ("close", ())]
    assert [call[:2] for call in plain.method_calls] == shared
    assert [call[:2] for call in rich.method_calls] == [
        shared[0],
        ("text", ("note", "hello", 2)),
        ("hyperparameters", ({"rate": 0.1},)),
        *shared[1:],
    ]


def test_what_no_writer_can_write_is_an_error(tmp_path):
    makers = [lambda _: Mock(spec=SCALARS)] * 2
    manager = SummaryManager(tmp_path, writer_fn=makers)

    with pytest.raises(AttributeError, match=r"none .* has a method 'histogram'"):
        manager.write_summaries({"x": np.ones(2)}, step=1)


def test_each_of_several_must_be_callable(tmp_path):
    with pytest.raises(TypeError, match=r"`writer_fn\[1\]` is 3 of type int"):
        SummaryManager(tmp_path, writer_fn=[Mock(), 3])


def test_no_writer_at_all_writes_nothing(tmp_path):
    manager = SummaryManager(tmp_path, writer_fn=[])
    manager.write_summaries({"loss": 1.0}, step=1)
    manager.close()
    assert not list(tmp_path.iterdir())
