"""What rlx adds to a vLLM worker (`worker_extension_cls`): a way for weights, and a watchdog."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from rlx.core.engine.rollout.sampling import draw
from rlx.core.engine.rollout.vllm_updates import BACKEND
from rlx.core.engine.transfer.receiver import Received

OWNER_VARIABLE = "RLX_ENGINE_PID"
"""Names the process that owns the engine; with tensor parallelism workers are its children."""


class WorkerExtension:
    """Methods for `collective_rpc`; vLLM mixes them into its worker class."""

    weight_transfer_engine: Any

    def rlx_received(self) -> Received:
        """About the weights that came last."""
        received: Received = self.weight_transfer_engine.received
        return received


def _watch(owner: int) -> None:
    while True:
        time.sleep(1.0)
        if os.getppid() == 1 or not _alive(owner):
            os._exit(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_watchdog() -> None:
    """End this worker with its owner: vLLM's children outlive a parent that was killed."""
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner and owner != os.getpid():
        threading.Thread(target=_watch, args=(owner,), name="watchdog", daemon=True).start()


def _skip_ranks() -> None:
    """Replace the ranks of sampled tokens, which rlx does not ask for, by zeros.

    vLLM can't be told to leave them out; counting them compiles a kernel at the first generation
    (1.5 s) and reads all logits once more at every step.
    """
    import torch
    import vllm.v1.sample.sampler

    def no_ranks(logprobs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(logprobs), dtype=torch.int64, device=logprobs.device)

    sampler: Any = vllm.v1.sample.sampler
    sampler.batched_count_greater_than = no_ranks


def _draw_by_inversion() -> None:
    """Sample on a CPU by one random number a row in place of one for each token.

    vLLM's own way (the largest of log-probs with noise) takes as long as an eighth of the model.
    """
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler

    own = topk_topp_sampler.TopKTopPSampler.forward_cpu

    def forward_cpu(
        self: Any, logits: Any, generators: dict[int, torch.Generator], k: Any, p: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.logprobs_mode != "processed_logprobs":
            return own(self, logits, generators, k, p)
        kept = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
        logprobs = kept.log_softmax(dim=-1, dtype=torch.float32)
        uniforms = torch.rand(len(logits), dtype=torch.float64)
        for row, generator in generators.items():
            uniforms[row] = torch.rand((), dtype=torch.float64, generator=generator)
        return draw(logprobs, uniforms), logprobs

    sampler: Any = topk_topp_sampler.TopKTopPSampler
    sampler.forward_cpu = forward_cpu


def _register_backend() -> None:
    """Make rlx's buckets known to vLLM, which looks for the backend after it imported this."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rlx.core.engine.rollout.vllm_receiver", "BucketsEngine"
        )


_start_watchdog()
_skip_ranks()
_draw_by_inversion()
_register_backend()
