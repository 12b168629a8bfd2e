import threading

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary import DefaultStrategy
from armillary.errors import ReplicaContextError


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: armillary.compute_average_loss(jnp.ones(2)),
            "`compute_average_loss` was called outside `Strategy.run`. It needs a "
            "replica context: move the call into the function given to `strategy.run`, "
            "or pass `global_batch_size=...` here.",
        ),
        (
            lambda: armillary.scale_regularization_loss(jnp.ones(2)),
            "`scale_regularization_loss` was called outside `Strategy.run`. It needs a "
            "replica context: move the call into the function given to `strategy.run`, "
            "or divide by `strategy.num_replicas_in_sync` here.",
        ),
    ],
    ids=["compute_average_loss", "scale_regularization_loss"],
)
def test_replica_calls_in_a_scope_are_errors(call, message, make_mirrored):
    with make_mirrored(2).scope(), pytest.raises(ReplicaContextError) as caught:
        call()
    assert str(caught.value) == message


def test_threads_do_not_share_a_scope(make_mirrored):
    seen = []
    with make_mirrored(2).scope():
        thread = threading.Thread(target=lambda: seen.append(armillary.get_strategy()))
        thread.start()
        thread.join()
    assert seen == [DefaultStrategy()]


def test_two_threads_run_steps_at_once(make_mirrored):
    strategy = make_mirrored(2)
    results = {}

    def work(name):
        count = armillary.create_global_step()
        for _ in range(20):
            strategy.run(lambda: count.set_value(count[...] + 1))
        results[name] = int(np.asarray(count[...]))

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": 20, "b": 20}
