"""How much of Ray's object store is in use, on all nodes, and how much goes through it."""

from __future__ import annotations

import contextlib
from typing import Any

_TIMEOUT = 2.0


class ObjectStore:
    """Asks Ray, over one connection that is kept."""

    def __init__(self) -> None:
        self._stub: Any = None
        self._written = 0

    def metrics(self) -> dict[str, float]:
        """`memory/object_store_gib` in use, `…_written_gib` since the last call; empty where Ray
        does not tell (blocks for some ms)."""
        with contextlib.suppress(Exception):
            used, written = self._bytes()
            since, self._written = written - self._written, written
            return {
                "memory/object_store_gib": used / 2**30,
                "memory/object_store_written_gib": since / 2**30,
            }
        return {}

    def _bytes(self) -> tuple[int, int]:
        """In use now, and written since Ray's start."""
        from ray.core.generated import node_manager_pb2

        if self._stub is None:
            self._stub = _stub()
        messages: Any = node_manager_pb2  # made by protobuf, which tells no types
        request = messages.FormatGlobalMemoryInfoRequest(include_memory_info=False)
        reply = self._stub.FormatGlobalMemoryInfo(request, timeout=_TIMEOUT)
        stats = reply.store_stats
        return int(stats.object_store_bytes_used), int(stats.cumulative_created_bytes)


def _stub() -> Any:
    """A connection to any raylet, which asks all others."""
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.internal_api import get_state_from_address
    from ray.core.generated import node_manager_pb2_grpc

    # This run's own Ray, whichever others there are on the machine.
    table = get_state_from_address(ray.get_runtime_context().gcs_address).node_table()
    node = next(node for node in table if node["Alive"])
    address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    return node_manager_pb2_grpc.NodeManagerServiceStub(init_grpc_channel(address))
