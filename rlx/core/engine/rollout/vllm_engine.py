"""The default rollout engine: vLLM inside this process, on a thread of its own."""

from __future__ import annotations

from rlx.core.config import RolloutConfig
from rlx.core.engine.rollout.async_engine import AsyncEngine
from rlx.core.engine.rollout.vllm_core import VllmCore


class VllmEngine(AsyncEngine):
    """`RolloutEngine` with vLLM.

    Args:
        model: Hugging Face folder or hub name.
        settings: the run's rollout section.
        context_length: most tokens of prompt and continuation together.
        dtype: of weights and KV cache; `auto` is the checkpoint's.
        seed: of vLLM's own generators; requests bring their own seeds.
        threads: CPU threads.
        transport: how weights come: `nccl`, `ipc`, or anything else, which is rlx's own way.
        sleeps: it will be asked to give up its GPU's memory (`sleep`).
    """

    def __init__(
        self,
        *,
        model: str,
        settings: RolloutConfig,
        context_length: int,
        dtype: str = "auto",
        seed: int = 0,
        threads: int = 1,
        sleeps: bool = False,
        transport: str = "auto",
    ) -> None:
        core = VllmCore(
            model=model,
            settings=settings,
            context_length=context_length,
            dtype=dtype,
            seed=seed,
            threads=threads,
            sleeps=sleeps,
            transport=transport,
        )
        super().__init__(core, name="vllm")
