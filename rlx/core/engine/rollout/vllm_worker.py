"""What rlx adds to a vLLM worker (`worker_extension_cls`): new weights in place, and a watchdog."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlx.core.engine.interfaces import WeightsFile
from rlx.core.engine.rollout.sampling import draw
from rlx.core.engine.weights import open_weights

OWNER_VARIABLE = "RLX_ENGINE_PID"
"""Names the process that owns the engine; with tensor parallelism workers are its children."""


class WorkerExtension:
    """Methods for `collective_rpc`; vLLM mixes them into its worker class."""

    model_runner: Any
    model_config: Any

    def rlx_load_weights(self, weights: WeightsFile) -> None:
        """Replace the weights in place.

        Raises:
            EngineError: the file is missing or damaged; the old weights stay. Any other error, a
                tensor of the wrong name or shape among them, leaves the model unusable.
        """
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        with open_weights(weights) as tensors, _quiet_about_gaps(weights.partial):
            if not weights.partial:
                unpack_experts(model)
            initialize_layerwise_reload(model)
            loaded = model.load_weights(iter(tensors.items()))
            finalize_layerwise_reload(model, self.model_config)
        repack_tied_heads(model)
        missing = missing_parameters(model, self.model_config.hf_config, loaded)
        if missing and not weights.partial:
            raise RuntimeError(f"the published weights lack {', '.join(missing[:5])}")


def missing_parameters(model: Any, config: Any, loaded: set[str] | None) -> list[str]:
    """Parameters that a publication left at their old values."""
    tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    names = {name for name, _ in model.named_parameters()} - (loaded or set())
    return sorted(name for name in names if not (tied and "lm_head" in name))


@contextmanager
def _quiet_about_gaps(partial: bool) -> Iterator[None]:
    """vLLM warns of every layer that keeps its weights, which a partial publication means."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    if partial:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def unpack_experts(model: Any) -> None:
    """Make vLLM's CPU backend pack the experts of a mixture again when new ones arrive.

    Once a layer has a kernel, a reload skips the packing and copies plain weights into packed
    storage: log-probs off by several units, without any error.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_tied_heads(model: Any) -> None:
    """Refresh the packed copy that vLLM's CPU backend keeps of the output head.

    A reload does not touch the head of a model with tied embeddings, and its packed copy would
    keep the old weights: log-probs off by some hundredths, without any error.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


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


_start_watchdog()
_skip_ranks()
_draw_by_inversion()
