"""The fallback rollout engine and numerical oracle: a sampling loop over transformers."""

from __future__ import annotations

from rlx.core.config import RolloutConfig
from rlx.core.engine.rollout.async_engine import AsyncEngine
from rlx.core.engine.rollout.transformers_core import TransformersCore


class TransformersEngine(AsyncEngine):
    """`RolloutEngine` with plain transformers; the arguments are `VllmEngine`'s."""

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
        # Requests bring their own seeds; it needs no preparation to sleep, or for new weights.
        del seed, sleeps, transport
        core = TransformersCore(
            model=model,
            max_running=settings.max_running,
            context_length=context_length,
            dtype=dtype,
            threads=threads,
        )
        super().__init__(core, name="transformers")
