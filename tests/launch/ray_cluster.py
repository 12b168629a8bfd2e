"""A Ray cluster whose nodes are processes on loopback, until its stdin ends.

It writes the address of its head, and then a line after each command: `add` starts a
node with room for one worker, `lose` kills the last one without a word to the others.
"""

import sys


def main() -> None:
    """Runs a cluster, as the lines of stdin say."""
    from ray.cluster_utils import Cluster

    where = {"node_ip_address": "127.0.0.1"}
    head = {"num_cpus": 0, "include_dashboard": False, **where}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = []
    try:
        sys.stdout.write(f"{cluster.address}\n")
        sys.stdout.flush()
        for line in sys.stdin:
            if line.strip() == "add":
                nodes.append(cluster.add_node(num_cpus=1, **where))
            else:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            sys.stdout.write("done\n")
            sys.stdout.flush()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
