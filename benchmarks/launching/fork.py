"""The fork, the rendezvous and the step themselves: what no launcher that forks can do without.

A process that has imported the stack forks the ranks, which train, and waits for them. Nothing supervises them, and
nothing is proved.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

from benchmarks.launching.serve import serve


def main(world_size: int) -> None:
    from pytest_trlcompat.launch.preload import preload

    preload()
    from torch.distributed import TCPStore

    from benchmarks.launching.training import train_here

    def launch(folder: Path, number: int) -> None:
        import socket

        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        port = listener.getsockname()[1]
        children = []
        for rank in range(world_size):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    listener.close()
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
                    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                    losses = train_here()
                    (folder / f"{rank}.json").write_text(json.dumps(losses))
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=300),
            master_listen_fd=listener.detach(),
        )
        for child in children:
            _, status = os.waitpid(child, 0)
            if status != 0:
                raise SystemExit(f"a rank ended with status {status}")
        del store

    serve(launch)


if __name__ == "__main__":
    main(int(sys.argv[1]))
