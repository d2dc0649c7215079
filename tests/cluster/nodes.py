"""A cluster of several nodes on this machine: ``python nodes.py FOLDER COUNT``, until its standard input ends.

A program of its own, so that the tests import no Ray, and what Ray leaves in a process is not in theirs.
"""

from __future__ import annotations

import json
import socket
import sys

from ray.cluster_utils import Cluster


def main(folder: str, count: int) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    head = {"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [
        cluster.add_node(num_cpus=1, env_vars={"TRLCOMPAT_NODE_CACHE": f"{folder}/node{number}"})
        for number in range(count)
    ]
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    answer = {
        "address": cluster.address,
        "client": f"ray://127.0.0.1:{port}",
        "raylets": raylets,
        "logs": f"{cluster.head_node.get_session_dir_path()}/logs",
    }
    print(json.dumps(answer), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
