"""A Ray cluster of two nodes on one machine, as somebody else would have started it.

python ray_cluster.py    # prints the address, ends with its standard input
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> None:
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 3, "object_store_memory": 128 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    cluster.add_node(**small)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


@contextmanager
def two_nodes() -> Iterator[str]:
    """Yield the address of a cluster that was started elsewhere."""
    bare = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "RLX", "RAY"))
    }
    # Of its own: `ray.init` of others on this machine must not find it.
    folder = tempfile.mkdtemp(prefix="ray-")
    process = subprocess.Popen(
        [sys.executable, __file__],
        cwd="/",
        env={
            **bare,
            "RAY_USAGE_STATS_ENABLED": "0",
            # `ray start` and `ray.init` turn tokens on where there is one, these nodes don't.
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": folder,
            "RAY_prestart_worker_first_driver": "0",
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
