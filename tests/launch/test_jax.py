"""Tests that JAX processes connect with the launcher's environment alone."""

import re

from armillary.launch import ExitCode

SCRIPT = """
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
    jax.distributed.initialize(workers[0], len(workers), index)
    mesh = Mesh(jax.devices(), "replica")
    values = jax.make_array_from_callback(
        (4,),
        NamedSharding(mesh, PartitionSpec("replica")),
        lambda where: jnp.arange(4.0)[where],
    )
    total = jax.jit(
        jax.shard_map(
            lambda value: jax.lax.psum(value.sum(), "replica"),
            mesh=mesh,
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec(),
        )
    )(values)
    port = int(workers[0].rpartition(":")[2])
    table = open("/proc/net/tcp").read() + open("/proc/net/tcp6").read()
    listening = [line.split() for line in table.splitlines() if f":{port:04X} " in line]
    hosts = {row[1].partition(":")[0] for row in listening if row[3] == "0A"}
    print(len(jax.devices()), len(jax.local_devices()), float(total), sorted(hosts))
    jax.distributed.shutdown()
"""


def test_two_workers_add_up_over_their_devices(launcher):
    code, stdout, stderr = launcher.run(
        SCRIPT,
        "--workers 2 --devices-per-worker 2",
        JAX_PLATFORMS="cpu",
    )
    assert code == ExitCode.OK, stderr
    # 127.0.0.1 as the kernel prints it: the coordinator listens nowhere else.
    printed = re.compile(r"\[worker (\d)\] 4 2 6\.0 \['(?:0{16}F{4}0{4})?0100007F'\]")
    # Gloo writes lines of its own to stdout.
    found = [match[1] for line in stdout.splitlines() if (match := printed.match(line))]
    assert sorted(found) == ["0", "1"], stdout
