"""Hyperparameters are where TensorBoard looks for them."""

import dataclasses
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from armillary.summary import SummaryManager


@dataclasses.dataclass
class Optimizer:
    name: str
    nesterov: bool
    schedule: dict[str, float] = dataclasses.field(default_factory=dict)


VALUES = {
    "rate": 0.1,
    "layers": 3,
    "optimizer": Optimizer("adam", True, {"begin": 0.1}),
    "sizes": [4, 5],
    "seed": None,
    "dtype": jnp.bfloat16,
    "class": Optimizer,
    "activation": jax.nn.relu,
}
FLAT = {
    "rate": 0.1,
    "layers": 3,
    "optimizer/name": "adam",
    "optimizer/nesterov": True,
    "optimizer/schedule/begin": 0.1,
    "sizes": "[4, 5]",
    "seed": "None",
    "dtype": "bfloat16",
    "class": "Optimizer",
    "activation": "relu",
}


def test_a_writer_gets_them_flat(tmp_path):
    writer = Mock()
    manager = SummaryManager(tmp_path, writer_fn=lambda _: writer)

    manager.write_hyperparameters(VALUES)
    manager.write_hyperparameters({})

    writer.hyperparameters.assert_called_once_with(FLAT)


def test_tensorboard_shows_them_with_the_metrics(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed.")
    from tensorboard.backend.event_processing import (
        data_provider,
        plugin_event_multiplexer,
    )
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import (
        api_pb2,
        backend_context,
        list_session_groups,
    )

    for attempt in range(2):  # A run that is resumed writes them again.
        manager = SummaryManager(tmp_path / "train")
        manager.write_hyperparameters(VALUES)
        manager.write_summaries({"loss": 0.5}, step=attempt)
        manager.close()

    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    context = backend_context.Context(TBContext(data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=10,
        allowed_statuses=[api_pb2.STATUS_UNKNOWN],
        col_params=[],
    )
    handler = list_session_groups.Handler(RequestContext(), context, "", request)
    (group,) = handler.run().session_groups

    shown = {
        name: getattr(value, value.WhichOneof("kind"))
        for name, value in group.hparams.items()
    }
    assert shown == FLAT
    assert [metric.name.tag for metric in group.metric_values] == ["loss"]
