"""Configuration of low-rank adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlx.core.config_base import Part, as_list

ALL_LINEAR = "all-linear"


class LoraConfig(Part):
    """Train low-rank adapters beside frozen weights; off while `rank` is unset."""

    rank: int | None = Field(None, ge=1)
    """r, of every adapter; unset: all weights are trained."""
    alpha: float | None = Field(None, gt=0)
    """Adapters are scaled by α / r; unset: 2 r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is left out while the model learns."""
    target_modules: Annotated[list[str], BeforeValidator(as_list)] = [ALL_LINEAR]
    """Linear layers that get an adapter, by the end of their names (`q_proj`); `all-linear`: all
    but the head."""
    modules_to_save: Annotated[list[str], BeforeValidator(as_list)] = []
    """Modules that are trained whole, by the end of their names (`lm_head`)."""
    rslora: bool = False
    """Scale by α / √r."""
    dora: bool = False
    """Train the length of every output's weights apart from their direction (DoRA)."""
    quantization: Literal["nf4", "fp4"] | None = None
    """Keep the frozen weights in 4 bits (QLoRA); needs bitsandbytes."""

    @property
    def enabled(self) -> bool:
        return self.rank is not None
