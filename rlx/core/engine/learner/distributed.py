"""The process group of the learner's ranks, and what the ranks tell one another.

Messages are small and go over gloo on the host, so that no rank waits for its accelerator.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from rlx.core.errors import EngineError

T = TypeVar("T")
_PATIENCE = timedelta(minutes=5)


def local_device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def join_group(*, rank: int, world: int, address: str, port: int) -> None:
    """Join the ranks' process group, or use the one that this process is in already.

    An in-process rollout engine leaves such a group of one behind.

    Raises:
        EngineError: the existing group is of another size, or the ranks don't meet in time.
    """
    # DeepSpeed reads both from the environment, and goes looking for them without.
    os.environ.setdefault("LOCAL_RANK", "0")
    if local_device().type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not dist.is_initialized():
        try:
            _create_group(rank, world, address, port)
        except (dist.DistError, RuntimeError) as error:
            raise EngineError(
                f"rank {rank} of {world} could not join the learner's group at {address}:{port}: "
                f"{error}"
            ) from error
    if (dist.get_rank(), dist.get_world_size()) != (rank, world):
        raise EngineError(
            f"this process is rank {dist.get_rank()} of a group of {dist.get_world_size()} and "
            f"can't become rank {rank} of {world}"
        )


def _create_group(rank: int, world: int, address: str, port: int) -> None:
    # A group of one needs no port.
    alone = world == 1
    store = (
        dist.HashStore()  # type: ignore[attr-defined]
        if alone
        else dist.TCPStore(address, port, world, rank == 0, _PATIENCE)  # type: ignore[attr-defined]
    )
    backend = "gloo" if local_device().type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def leave_group() -> None:
    """Leave a group of several ranks; a group of one stays, for others in the process."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
        dist.destroy_process_group()


def barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def highest(*values: float) -> list[float]:
    """The maximum over ranks of each value. All ranks call it."""
    if dist.get_world_size() == 1:
        return [float(value) for value in values]
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def gather(value: T) -> list[T]:
    """Every rank's picklable value, in the order of the ranks. All ranks call it."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [item for item in values if item is not None]
