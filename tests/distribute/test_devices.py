"""Tests of the devices, names, arguments and resolvers of single strategies."""

import os
import re
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import MirroredStrategy, OneDeviceStrategy, get_strategy
from armillary.cluster import CommunicationImplementation as Implementation
from armillary.cluster import (
    SimpleClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
)
from armillary.distribute import DefaultStrategy
from armillary.errors import ClusterError, DatasetStateError
from armillary.state._lift import State
from tests.mistakes import mistakes
from tests.patience import patience


def test_the_default_strategy_is_one_object():
    assert DefaultStrategy() is DefaultStrategy()
    assert get_strategy() is DefaultStrategy()
    assert repr(DefaultStrategy()) == "DefaultStrategy(1 replica)"


def test_the_default_strategy_changes_nothing():
    strategy, seen = DefaultStrategy(), object()
    assert strategy.run(lambda x: x, args=(seen,)) is seen
    assert strategy.reduce("sum", 3.5) == 3.5
    array = jnp.ones((2, 3))
    assert strategy.gather(array, axis=0) is array
    np.testing.assert_array_equal(strategy.reduce("sum", array, axis=0), [2, 2, 2])
    assert strategy.local_results(array)[0] is array
    state = State([({"w": jnp.ones(2)}, "")])
    assert strategy.placement.state_shardings(state) == [None] and strategy.mesh is None


def test_run_under_the_default_strategy_is_eager():
    values = []
    DefaultStrategy().run(lambda: values.append(float(jnp.ones(()) * 2)))
    assert values == [2.0]


@pytest.mark.parametrize("name", ["cpu:3", "/device:CPU:3"])
def test_a_device_may_be_named(name):
    strategy = OneDeviceStrategy(name)
    assert strategy.run(lambda: jnp.ones(2) * 2).devices() == {jax.devices()[3]}
    assert "OneDeviceStrategy" in repr(strategy)


def test_state_moves_to_the_device():
    strategy = OneDeviceStrategy("cpu:5")
    count = armillary.create_global_step()

    @armillary.function
    def step():
        count[...] = count[...] + 1

    with strategy.scope():
        step()
    assert count[...].devices() == {jax.devices()[5]}


@pytest.mark.parametrize("name", ["gpu:0", "cpu:99", "cpu", "", 7])
def test_an_unknown_device_is_an_error(name):
    with pytest.raises(ValueError, match=r"no such device\. Its devices are cpu:0"):
        OneDeviceStrategy(name)


def test_all_devices_are_used_by_default():
    strategy = MirroredStrategy()
    assert strategy.num_replicas_in_sync == len(jax.local_devices()) == 8
    assert repr(strategy) == "MirroredStrategy(8 x cpu)"


def test_devices_may_be_named_in_any_order():
    strategy = MirroredStrategy(["cpu:3", "/cpu:1"])
    assert [device.id for device in strategy.mesh.devices] == [3, 1]


def test_batches_are_split_over_devices(make_mirrored):
    strategy = make_mirrored(4)
    (batch,) = strategy.distribute_dataset([np.arange(8)])
    shards = batch.stacked.addressable_shards
    assert [np.asarray(shard.data).tolist() for shard in shards] == [
        [[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], r"`devices` is \[\], but it must be a sequence of at least one device"),
        ("cpu:0", "`devices` is 'cpu:0', but it must be a sequence"),
        (["cpu:0", "gpu:1"], "`devices` is 'gpu:1', but .* no such device.* cpu:7: p"),
        (["cpu:0", "cpu:1", "/cpu:0"], "which repeats a device. Name each device once"),
    ],
)
def test_wrong_devices_are_errors(devices, message):
    with pytest.raises(ValueError, match=message):
        MirroredStrategy(devices)


def test_threads_do_not_share_a_scope(make_mirrored):
    seen = []
    with make_mirrored(2).scope():
        thread = threading.Thread(target=lambda: seen.append(armillary.get_strategy()))
        thread.start()
        thread.join()
    assert seen == [DefaultStrategy()]


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
        assert strategy.peers.is_alone
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


class OnCPU(armillary.TPUStrategy):
    _kind = "cpu"


class OnNothing(armillary.TPUStrategy):
    _kind = "rocm"


def test_there_is_a_replica_for_each_device_and_the_resolver_is_kept():
    resolver = SimpleClusterResolver({})
    strategy = OnCPU(resolver)
    assert strategy.num_replicas_in_sync == jax.local_device_count() == 8
    assert strategy.cluster_resolver is resolver
    assert repr(strategy) == "OnCPU(8 x cpu, 1 process)"
    assert not hasattr(strategy, "no_such_name")


def devices_of(*arrays):
    found = [device for array in arrays for device in array.devices()]
    return [f"{device.platform}:{device.id}" for device in found]


def test_objects_made_in_the_scope_of_one_device_are_there():
    strategy = OneDeviceStrategy("cpu:2")
    with strategy.scope():
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        key, array = jax.random.key(0), jnp.asarray(np.ones(3))
        dense = keras.layers.Dense(2)
        dense.build((None, 2))
        step = armillary.create_global_step()
        result = jax.jit(lambda x: x + 1)(array)
    made = [model.kernel[...], key, array, dense.kernel.value, step[...], result]
    assert devices_of(*made) == ["cpu:2"] * len(made)

    # Nothing moves when a step uses it.
    pointer = model.kernel[...].unsafe_buffer_pointer()
    strategy.run(lambda: model(jnp.ones((1, 2))))
    assert model.kernel[...].unsafe_buffer_pointer() == pointer


def test_a_scope_places_arrays_until_it_ends_and_in_its_thread_alone():
    seen = []
    strategy = OneDeviceStrategy("cpu:3")

    def make():
        seen.extend(devices_of(jnp.ones(1)))

    with strategy.scope():
        with strategy.scope():
            make()
        make()
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    make()
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError
    make()
    assert [int(name[-1]) for name in seen] == [3, 3, 0, 0, 0]


def test_a_strategy_that_was_set_places_arrays_until_another_one_is_set():
    try:
        for device in ("cpu:1", "cpu:2"):
            armillary.distribute.set_strategy(OneDeviceStrategy(device))
            assert devices_of(jnp.ones(1)) == [device]
        armillary.distribute.set_strategy(MirroredStrategy(["cpu:4", "cpu:5"]))
        assert devices_of(jnp.ones(1)) == ["cpu:0"]
    finally:
        armillary.distribute.set_strategy(None)
    assert devices_of(jnp.ones(1)) == ["cpu:0"]


@pytest.mark.parametrize("tpu", ["", "local", None])
def test_on_one_machine_it_can_be_made_after_a_look_at_the_devices(tpu):
    assert jax.devices()
    resolver = TPUClusterResolver(tpu=tpu, environ={})
    strategy = OnCPU(resolver)
    assert repr(strategy) == "OnCPU(8 x cpu, 1 process)"
    assert strategy.cluster_resolver is resolver
    assert resolver.process_plan().is_chief


# Before any device was used.
FIRST = """
    import jax
    import armillary

    class OnCPU(armillary.TPUStrategy):
        _kind = "cpu"

    strategy = OnCPU(armillary.cluster.TPUClusterResolver(tpu=""))
    assert strategy.peers.is_alone
    assert not jax.distributed.is_initialized()
    strategy.run(lambda: None)
    print(strategy)
"""


@pytest.mark.slow
def test_on_one_machine_it_can_be_made_before_any_device_is_used():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FIRST)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=patience(300),
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"OnCPU\(\d+ x cpu, 1 process\)", done.stdout.strip())


def make_tpu_of_two_workers():
    workers = '"worker": ["127.0.0.1:1", "127.0.0.1:2"]'
    config = f'{{"cluster": {{{workers}}}, "task": {{"type": "worker", "index": 1}}}}'
    resolver = TFConfigClusterResolver(environ={"TF_CONFIG": config})
    return armillary.TPUStrategy(resolver)


def make_tpu_without_its_library():
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    try:
        armillary.TPUStrategy()
    finally:
        jax.config.update("jax_platforms", before)


def make_worker(**options):
    options = armillary.cluster.CommunicationOptions(**options)
    return armillary.MultiWorkerMirroredStrategy(communication_options=options)


def test_options_that_the_platform_can_follow_are_taken_in_a_single_process():
    strategy = make_worker(implementation="RING", timeout_seconds=60)
    assert strategy.num_replicas_in_sync == 8


def make_tpu_by_name():
    return armillary.TPUStrategy(TPUClusterResolver(tpu="grpc://10.0.0.2:8470"))


@mistakes(
    {
        ClusterError: {
            "needs a TPU, but JAX found none .*rocm": OnNothing,
            "needs a TPU, but JAX found none .*`JAX_PLATFORMS` allows only cpu": (
                lambda: armillary.TPUStrategy(TPUClusterResolver(tpu=""))
            ),
            # It does not wait for the other one.
            "needs a TPU, but JAX found none .*cpu": make_tpu_of_two_workers,
            "needs a TPU, but JAX found none .*`libtpu`": make_tpu_without_its_library,
        },
        ValueError: {
            # In a single process as well.
            "`implementation` is 'NCCL', which XLA follows only on gpu": (
                lambda: make_worker(implementation="NCCL")
            ),
            "`bytes_per_pack` is 1024, which XLA follows only on gpu": (
                lambda: make_worker(bytes_per_pack=1024)
            ),
            "`tpu` is 'grpc://10.0.0.2:8470', .* leave `tpu` out": make_tpu_by_name,
        },
        TypeError: {
            "`cluster_resolver` is .*NCCL.*implementation=.NCCL": (
                lambda: armillary.MultiWorkerMirroredStrategy(Implementation.NCCL)
            ),
            "`cluster_resolver` is 'ring'.*implementation=.RING": (
                lambda: armillary.MultiWorkerMirroredStrategy("ring")
            ),
            "`device_assignment` is 3, but `.*` has no such argument": (
                lambda: OnCPU(device_assignment=3)
            ),
        },
    }
)
def test_arguments_that_it_cannot_follow_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
