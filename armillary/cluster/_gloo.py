"""Gloo, through which processes on CPUs exchange values: its address and its start."""

import jax
import numpy as np
from jax.extend.backend import register_backend_factory
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from armillary._logging import logger
from armillary.cluster._peers import Peers


def uses_gloo() -> bool:
    """Returns whether processes on CPUs exchange values through Gloo."""
    return jax.config.jax_cpu_collectives_implementation == "gloo"  # pyright: ignore[reportAttributeAccessIssue]


def keep_gloo_on(host: str) -> None:
    """Makes Gloo listen at an address of this machine, once it starts."""
    # By default Gloo listens at the address of the machine's name, which other machines
    # may reach. JAX has no option for that, and its functions for a client are private.
    from jax._src import distributed, xla_bridge  # noqa: TID251
    from jax._src.lib import _jax  # noqa: TID251

    if not hasattr(xla_bridge, "make_cpu_client"):
        logger.warning(
            "Armillary does not know how JAX %s makes its CPU devices. So Gloo "
            "listens at the address to which the name of this machine resolves.",
            jax.__version__,
        )
        return

    def make_client() -> object:
        client = distributed.global_state.client
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host)
        return xla_bridge.make_cpu_client(gloo)

    register_backend_factory("cpu", make_client, fail_quietly=False)


def connect_gloo(peers: Peers) -> None:
    """Lets the processes connect to each other, if they compute on CPUs."""
    # By itself Gloo connects at the first operation, and gives up after 30 seconds. By
    # then, one process may still compile the program that the others already run.
    if jax.default_backend() != "cpu" or not uses_gloo():
        return
    mesh = Mesh(np.array(jax.devices()), ("device",))
    row = jax.make_array_from_callback(
        (mesh.size,),
        NamedSharding(mesh, PartitionSpec("device")),
        lambda index: np.zeros(1, np.int32),
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    add = jax.jit(lambda x: x.sum(), out_shardings=everywhere)
    compiled = add.lower(row).compile()
    # ORDER: all processes have compiled before the first one waits in the program.
    peers.gather("the first meeting", "")
    jax.block_until_ready(compiled(row))
