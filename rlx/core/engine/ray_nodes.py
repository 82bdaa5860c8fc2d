"""Something done on a certain node of the Ray cluster, in a process of its own there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from rlx.core.engine.process_stacks import stacks_of
from rlx.core.threads import DaemonThreads


async def stacks_there(node: str, pids: Sequence[int]) -> list[str]:
    """The stacks of processes of another node; waits for the node however long it takes."""
    return await _on_node(node, _stacks_of_all, list(pids))


async def _on_node(node: str, function: Callable[..., Any], *args: Any) -> Any:
    """The function's result on a node; it takes no resources, so that it starts at once.

    Raises:
        ray.exceptions.RayError: the node is gone.
    """
    threads = DaemonThreads("node")
    try:
        # Ray tells the head of the cluster about the function, which may block.
        submitted = await threads.run(_submit, node, function, args, timeout=math.inf)
    finally:
        threads.close()
    return await submitted


def _submit(node: str, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(function)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
    return task.options(**options).remote(*args)


def _stacks_of_all(pids: Sequence[int]) -> list[str]:
    """In a process on the node."""

    async def ask() -> list[str]:
        return await asyncio.gather(*map(stacks_of, pids))

    return asyncio.run(ask())
