"""Whether new weights can get to the engines in the way that was asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from rlx.core import sizes
from rlx.core.machine import SHARED_MEMORY, find_gpus
from rlx.core.preflight_case import Case, Finding, error

_KEY = "publication.transport"
_FIX = "`publication.transport: auto`"


def check_publication(case: Case) -> Iterator[Finding]:
    """The transport suits engine, runtime and devices; shared memory has room."""
    config = case.config
    transport = config.publication.transport
    if config.replay is not None:
        return
    if transport in ("nccl", "ipc"):
        between = "between GPUs" if transport == "nccl" else "within a GPU"
        if not find_gpus():
            yield error(f"{transport} moves weights {between}, and there is none", _KEY, _FIX)
        if config.rollout.engine != "vllm":
            yield error(
                f"{transport} is vLLM's; {config.rollout.engine} takes no weights from it",
                _KEY,
                f"{_FIX}, or `--engine vllm`",
            )
        if config.runtime.kind == "inline":
            yield error(
                f"{transport} needs learner and engine in processes of their own",
                _KEY,
                f"{_FIX}, or `--runtime ray`",
            )
    elif transport != "gloo" and SHARED_MEMORY.is_dir() and case.info.parameters is not None:
        needed = sizes.weight_bytes(case.info.parameters, sizes.learner_dtype(config, case.info))
        if (free := shutil.disk_usage(SHARED_MEMORY).free) < needed:
            yield error(
                f"{SHARED_MEMORY} has {sizes.gib(free)} free; publishing the weights takes "
                f"{sizes.gib(needed)}",
                _KEY,
                "a larger /dev/shm (`docker run --shm-size`), or `publication.transport: gloo`",
            )
