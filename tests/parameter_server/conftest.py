"""One Ray cluster, and one strategy for most tests of this folder."""

import os
import signal
import time

import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.distribute.coordinator import ClusterCoordinator
from armillary.distribute.partitioners import FixedShardsPartitioner
from tests.patience import patience
from tests.ray_cluster import stop_ray


@pytest.fixture(scope="package")
def make_coordinator():
    """Returns a function that makes coordinators, which are stopped at the end."""
    pytest.importorskip("ray")
    # Workers run Keras, too.
    patch = pytest.MonkeyPatch()
    patch.setenv("JAX_NUMPY_RANK_PROMOTION", "allow")
    made = []

    def make(**options):
        strategy = armillary.ParameterServerStrategy(**options)
        made.append(ClusterCoordinator(strategy))
        return made[-1]

    yield make
    for coordinator in made:
        if not coordinator._scheduler.is_stopped:
            coordinator.shutdown()
    stop_ray()
    patch.undo()


@pytest.fixture(scope="package")
def shared_coordinator(make_coordinator):
    return make_coordinator(
        num_workers=2,
        num_ps=2,
        variable_partitioner=FixedShardsPartitioner(2),
        report_seconds=1.0,
    )


@pytest.fixture(scope="package")
def alone(make_coordinator):
    """Returns a coordinator of one worker, which no update of others makes stale."""
    return make_coordinator(
        num_workers=1, num_ps=2, variable_partitioner=FixedShardsPartitioner(2)
    )


@pytest.fixture
def coordinator(shared_coordinator):
    """Returns the coordinator of two workers and two servers, which are up."""
    while not all(worker.pid for worker in shared_coordinator._scheduler.workers):
        time.sleep(0.05)
    yield shared_coordinator
    assert shared_coordinator.done()


class Problem:
    """A linear model to be fitted, and its data."""

    def __init__(self):
        self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.05), wrt=nnx.Param)
        self.inputs = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        self.labels = self.inputs @ np.array([1, -2, 3], "float32")

    def make_data(self, batch_size=8, **options):
        arrays = {"x": self.inputs, "y": self.labels}
        options = {"repeat": True, "shuffle_seed": 0, **options}
        return armillary.data.from_arrays(arrays, batch_size=batch_size, **options)

    def make_step(self, strategy):
        """Returns a step that can be scheduled."""
        model, optimizer = self.model, self.optimizer

        def step(iterator):
            def replica(batch):
                def loss_fn(model):
                    error = model(batch["x"])[:, 0] - batch["y"]
                    return armillary.compute_average_loss(error**2)

                loss, gradients = nnx.value_and_grad(loss_fn)(model)
                gradients = armillary.all_reduce("sum", gradients)
                optimizer.update(model, gradients)
                return loss

            return strategy.run(replica, args=(next(iterator),))

        return step

    def make_iterator(self, coordinator, **options):
        data = self.make_data(**options)
        return iter(coordinator.create_per_worker_dataset(lambda context: data))

    def start(self, coordinator, **options):
        """Returns a function that schedules a number of steps."""
        step = self.make_step(coordinator.strategy)
        iterator = self.make_iterator(coordinator, **options)

        def schedule(count=1):
            return [coordinator.schedule(step, args=(iterator,)) for _ in range(count)]

        return schedule

    @property
    def kernel(self):
        return np.asarray(self.model.kernel[...])

    @property
    def num_steps(self):
        return int(self.optimizer.step[...])


@pytest.fixture
def problem():
    return Problem()


@pytest.fixture
def kill():
    """Returns a function that kills the process of a worker or a server at once."""

    import ray

    def kill(actor):
        while True:
            try:
                pid = ray.get(actor.greet.remote(), timeout=patience(120))[0]
            except ray.exceptions.ActorUnavailableError:
                time.sleep(0.1)  # It is not up again yet.
            else:
                os.kill(pid, signal.SIGKILL)
                return

    return kill
