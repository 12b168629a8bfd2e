"""Stops Ray after tests."""

import gc
import warnings


def stop_ray() -> None:
    """Stops the cluster, and lets go of its processes.

    On a busy machine Ray does not wait for all of them, so Python warns of each.
    """
    import ray

    ray.shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
