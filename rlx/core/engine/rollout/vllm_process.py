"""How vLLM becomes a well-behaved guest in a process.

vLLM expects to own its process: it takes settings from the environment and exports more, seeds
every generator, replaces `torch.set_num_threads`, draws from torch's default generator at every
step and destroys the default process group when it ends. Under `--runtime inline` the driver and
the learner live in the same process (docs/adr/0002-vllm-in-process.md).
"""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlx.core.openmp import openmp_environment


def vllm_environment(model: str, *, threads: int) -> dict[str, str]:
    """Variables that must be set before vLLM is imported.

    A worker process should have them from its start: OpenMP reads its own when torch loads it.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        **openmp_environment(),
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


class ProcessGroups:
    """vLLM's process groups in this process, which all its engines share.

    vLLM destroys them, and the default group with them, when *one* engine shuts down.
    """

    _engines = 0
    _foreign_default = False

    @classmethod
    def enter(cls) -> None:
        """Note a new engine, before vLLM makes groups."""
        import torch

        if cls._engines == 0:
            cls._foreign_default = torch.distributed.is_initialized()
        cls._engines += 1

    @classmethod
    def leave(cls) -> None:
        """After the last engine destroy vLLM's groups, and the default group if it was vLLM's."""
        import torch
        from vllm import envs
        from vllm.distributed import parallel_state

        cls._engines -= 1
        if cls._engines:
            return
        envs.disable_envs_cache()
        if not torch.distributed.is_initialized():
            _forget_destroyed_groups(parallel_state)
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None
        # DeepSpeed adopts a default group that it finds.
        adopted = getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None) is not None
        if torch.distributed.is_initialized() and not (cls._foreign_default or adopted):
            torch.distributed.destroy_process_group()


def _forget_destroyed_groups(parallel_state: Any) -> None:
    """Drop handles on groups that went with a default group which somebody else destroyed."""
    for coordinator in vars(parallel_state).values():
        if isinstance(coordinator, parallel_state.GroupCoordinator):
            for name in ("device_group", "cpu_group"):
                if hasattr(coordinator, name):
                    delattr(coordinator, name)


def make_engine(arguments: Mapping[str, Any]) -> Any:
    """An in-process `LLMEngine` from arguments of `EngineArgs`."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    ProcessGroups.enter()
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except BaseException:
        ProcessGroups.leave()
        raise


def shut_down(engine: Any) -> None:
    """Shut an in-process `LLMEngine` down; its groups go with `ProcessGroups.leave`."""
    import vllm.v1.engine.core

    core: Any = vllm.v1.engine.core
    clean_up = core.cleanup_dist_env_and_memory
    core.cleanup_dist_env_and_memory = gc.collect
    try:
        engine.engine_core.shutdown()
    finally:
        core.cleanup_dist_env_and_memory = clean_up
        ProcessGroups.leave()
