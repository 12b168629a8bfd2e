"""How the processes of a CPU job connect, to exchange values."""

import jax
import numpy as np
from jax.extend.backend import register_backend_factory
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from armillary._logging import logger
from armillary.cluster._peers import Peers


def keep_gloo_on(host: str) -> None:
    """Makes Gloo listen at an address of this machine, once it starts.

    By default it listens at the address of the machine's name, which others may reach,
    and JAX has no option to change that.
    """
    # Private, as is all of JAX that makes a client.
    from jax._src import distributed, xla_bridge  # noqa: TID251
    from jax._src.lib import _jax  # noqa: TID251

    is_known = hasattr(xla_bridge, "make_cpu_client")
    if not (is_known and hasattr(_jax, "make_gloo_tcp_collectives")):
        logger.warning(
            "JAX %s makes its CPU devices in another way than the versions that this "
            "library knows, so Gloo listens where the name of this machine points to.",
            jax.__version__,
        )
        return

    def make_client() -> object:
        if jax.config.jax_cpu_collectives_implementation != "gloo":  # pyright: ignore[reportAttributeAccessIssue]
            return xla_bridge.make_cpu_client()
        return xla_bridge.make_cpu_client(
            _jax.make_gloo_tcp_collectives(
                distributed_client=distributed.global_state.client, hostname=host
            )
        )

    register_backend_factory("cpu", make_client, fail_quietly=False)


def connect_gloo(peers: Peers) -> None:
    """Lets the processes connect to each other, if they compute on CPUs.

    Gloo does so at the first operation between devices, and gives up after 30 seconds,
    while one process may still compile what the others run already. Here each waits for
    the others as it does in any round.
    """
    implementation = jax.config.jax_cpu_collectives_implementation  # pyright: ignore[reportAttributeAccessIssue]
    if jax.default_backend() != "cpu" or implementation != "gloo":
        return
    mesh = Mesh(np.array(jax.devices()), ("device",))
    row = jax.make_array_from_callback(
        (mesh.size,),
        NamedSharding(mesh, PartitionSpec("device")),
        lambda index: np.zeros(1, np.int32),
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    connect = jax.jit(lambda x: x.sum(), out_shardings=everywhere).lower(row).compile()
    peers.gather("the first meeting", "")
    jax.block_until_ready(connect(row))
