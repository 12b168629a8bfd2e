"""What of `MultiWorkerMirroredStrategy` a single process can show."""

import jax
import numpy as np
import pytest

import armillary
from armillary.errors import DatasetStateError


@pytest.mark.parametrize("name", ["cluster_resolver", "communication_options"])
def test_arguments_of_another_type_are_refused(name):
    with pytest.raises(TypeError, match=f"`{name}` is 3 of type int"):
        armillary.MultiWorkerMirroredStrategy(**{name: 3})


def test_without_other_processes_it_has_the_devices_of_this_one():
    resolver = armillary.cluster.SimpleClusterResolver({})
    strategy = armillary.MultiWorkerMirroredStrategy(resolver)
    assert strategy.cluster_resolver is resolver
    assert strategy.num_replicas_in_sync == len(jax.local_devices())
    assert strategy.layout == armillary.MirroredStrategy().layout
    assert repr(strategy) == "MultiWorkerMirroredStrategy(8 x cpu, 1 process)"


def test_an_evaluator_joins_nobody_and_leaves_the_workers_positions_alone():
    cluster = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}
    saved = {"pipelines": [{"of": "worker 0"}, {"of": "worker 1"}]}

    def make_dataset(*task):
        resolver = armillary.cluster.SimpleClusterResolver(*task)
        strategy = armillary.MultiWorkerMirroredStrategy(resolver)
        assert strategy.peers is None
        assert strategy.layout == armillary.MirroredStrategy().layout
        source = armillary.data.from_arrays({"x": np.arange(8.0)}, batch_size=1)
        return strategy.distribute_datasets_from_function(lambda context: source)

    dataset = make_dataset(cluster, "evaluator", 0)
    before = dataset.get_state()
    dataset.set_state(saved)
    assert dataset.get_state() == before
    assert len(list(dataset)) == 1
    with pytest.raises(DatasetStateError, match="positions of 2 input pipelines"):
        make_dataset({}).set_state(saved)
