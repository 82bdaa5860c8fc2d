"""How vLLM becomes a well-behaved guest in a process.

vLLM expects to own its process: it takes settings from the environment and exports more, seeds
every generator, replaces `torch.set_num_threads`, draws from torch's default generator at every
step and destroys the default process group when it ends. Under `--runtime inline` the driver and
the learner live in the same process (docs/adr/0002-vllm-in-process.md).
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def vllm_environment(model: str, *, threads: int) -> dict[str, str]:
    """Variables that must be set before vLLM is imported.

    A worker process should have them from its start: OpenMP reads its own when torch loads it.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        # Threads that wait in a spin loop take the cores from whoever's turn it is.
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if Path(model).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    return variables


@contextmanager
def borrowed_process(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` meanwhile; leave environment, thread setter and generators as they were."""
    import torch

    environment = dict(os.environ)
    set_num_threads: Any = torch.set_num_threads
    os.environ.update(variables)
    # Whole GiB only, and it would win over the engine's own setting.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    try:
        with preserved_generators(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_num_threads
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave Python's, NumPy's and torch's default generators as they were found."""
    import numpy as np
    import torch

    python, numpy, default = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(default)


def default_group_exists() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def shut_down(engine: Any, *, foreign_group: bool) -> None:
    """Shut vLLM down without pulling the default process group from under somebody else.

    Args:
        engine: an in-process `LLMEngine`.
        foreign_group: the default process group was there before the engine.
    """
    from vllm.distributed import parallel_state

    # DeepSpeed adopts a default group that it finds, so vLLM's own may have a second user.
    adopted = getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None) is not None
    shared = foreign_group or adopted
    destroy = parallel_state.destroy_distributed_environment
    if not default_group_exists():
        _forget_groups(parallel_state)
    if shared:
        parallel_state.destroy_distributed_environment = lambda: _destroy_world(parallel_state)
    try:
        engine.engine_core.shutdown()
    finally:
        parallel_state.destroy_distributed_environment = destroy


def _destroy_world(parallel_state: Any) -> None:
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


def _forget_groups(parallel_state: Any) -> None:
    """Drop handles on groups that went with a default group which somebody else destroyed."""
    for value in list(vars(parallel_state).values()):
        if isinstance(value, parallel_state.GroupCoordinator):
            for name in ("device_group", "cpu_group"):
                if hasattr(value, name):
                    delattr(value, name)
