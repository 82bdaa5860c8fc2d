"""The policy as the learner sees it: packed rows in, log-probs of action tokens out.

A causal language model is taken apart into body (hidden states) and head (projection to logits), so
that the head runs on action positions only. Whether that is all the model does, and whether it
keeps packed sequences apart, is measured when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from rlx.core.config import LearnerConfig
from rlx.core.engine.float32_linear import quicken
from rlx.core.engine.learner.attention import (
    Packing,
    close,
    hidden_states,
    settle,
    starting_attention,
)
from rlx.core.engine.learner.fusing import fuse, fused_modules, is_bare
from rlx.core.engine.learner.packing import Layout
from rlx.core.engine.learner.requirements import check_settings
from rlx.core.engine.learner.token_logprobs import token_logprobs
from rlx.core.errors import EngineError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PackedPolicy(nn.Module):
    """Log-probs (and entropies) [n] of the action tokens of a micro-batch, at one temperature."""

    model: Any

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self._shape_logits = logit_shape(model)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        source: Tensor,
        targets: Tensor,
        *,
        layout: Layout | None = None,
        chunks: int = 1,
        entropy_gradient: bool = False,
        entropy: bool = True,
    ) -> tuple[Tensor, ...]:
        hidden = self.hidden(tokens, positions, layout).flatten(0, 1).index_select(0, source)
        return token_logprobs(
            self.head,
            hidden,
            targets,
            temperature=self.temperature,
            chunks=chunks,
            entropy_gradient=entropy_gradient,
            entropy=entropy,
            weight=self._projection(),
        )

    def _projection(self) -> Tensor | None:
        """The weight of a head that does nothing but multiply by it."""
        head = self.model.get_output_embeddings()
        return head.weight if self._shape_logits is None and is_bare(head) else None

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout | None = None) -> Tensor:
        return hidden_states(self.model.base_model, tokens, positions, layout)

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits if self._shape_logits is None else self._shape_logits(logits)


def logit_shape(model: Any) -> Callable[[Tensor], Tensor] | None:
    """What the model does to its logits after the projection: scaling, soft-capping, or nothing."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    factor = scale / divisor
    if factor == 1.0 and not cap:
        return None

    def shape(logits: Tensor) -> Tensor:
        if factor != 1.0:
            logits = logits * factor
        return torch.tanh(logits / cap) * cap if cap else logits

    return shape


M_co = TypeVar("M_co", bound=nn.Module, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[M_co]):
    """A model with what is known about it."""

    module: M_co
    dtype: torch.dtype
    packing: Packing
    """What the rows of its micro-batches may hold."""
    head: str | None = None
    """Part of the module's `model` that is trained whole, beside whatever adapters."""

    def facts(self) -> dict[str, Any]:
        """For the run's manifest."""
        model: Any = self.module.model
        return {
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": next(self.module.parameters()).device.type,
            "packed": self.packing.several,
            "attention": model.config._attn_implementation,
            "shared_prefix": self.packing.worth is not None,
            "fused": fused_modules(model),
        }


def load_policy(
    model: str, settings: LearnerConfig, temperature: float, device: torch.device
) -> Loaded[PackedPolicy]:
    """Load a Hugging Face folder, ready to train, without dropout.

    Raises:
        EngineError: the model can't be loaded, or its logits are not its head's projection.
        UsageError: it can't do what the settings ask for.
    """
    from transformers import AutoModelForCausalLM

    loaded, dtype = load_pretrained(AutoModelForCausalLM, model, settings, device)
    policy = PackedPolicy(loaded.to(device), temperature).eval()
    examine(policy, device)
    packing = settle(loaded.base_model, settings, device)
    make_trainable(policy, settings)
    return Loaded(module=policy, dtype=dtype, packing=packing)


def load_pretrained(
    auto_class: Any,
    model: str,
    settings: LearnerConfig,
    device: torch.device,
    **options: Any,
) -> tuple[Any, torch.dtype]:
    """A model of the folder by one of transformers' auto classes, and its dtype.

    Args:
        options: of the model's configuration, such as `num_labels`.

    Raises:
        EngineError: it can't be loaded.
        UsageError: what the settings ask for can't be had on this machine.
    """
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    check_settings(settings, device)
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(model)
        chosen = resolve_dtype(config, settings.dtype)
        if settings.lora.quantization:
            options["quantization_config"] = four_bits(settings.lora.quantization, chosen)
        loaded = auto_class.from_pretrained(
            model,
            dtype=chosen,
            attn_implementation=starting_attention(settings, config),
            **options,
        )
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"the model '{model}' can't be loaded: {error}") from error
    if settings.liger:
        use_liger(loaded)
    fuse(loaded, settings, device)
    quicken(loaded)
    for layer in loaded.modules() if settings.lora.quantization else ():
        # Else bitsandbytes repacks the weights of a model in evaluation mode for a kernel of CPUs
        # that has no gradient, and says so in a warning only.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return loaded, chosen


def four_bits(kind: str, dtype: torch.dtype) -> Any:
    """Linear layers, the head's excepted, in 4 bits with their scales in 8."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )


def use_liger(model: Any) -> None:
    """Replace norms, rotations and activations by Liger's kernels; log-probs stay rlx's own."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)


def make_trainable(module: Any, settings: LearnerConfig) -> None:
    """Switch gradient checkpointing on where it is asked for; models come without dropout."""
    if settings.gradient_checkpointing:
        # Checkpointing is active in training mode only.
        _switch_off_dropout(module.model)
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
        module.train()


def resolve_dtype(config: object, wanted: str) -> torch.dtype:
    """`auto` is the checkpoint's dtype; float16 is trained in float32, which holds it exactly."""
    if wanted != "auto":
        return _DTYPES[wanted]
    stored = getattr(config, "dtype", None)
    return torch.bfloat16 if stored in (torch.bfloat16, "bfloat16") else torch.float32


def _switch_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@torch.no_grad()
def examine(policy: PackedPolicy, device: torch.device) -> None:
    """Compare the model's own logits of a short sequence with those of body and head.

    Raises:
        EngineError: body and head don't make up the model's own logits.
    """
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    row = (torch.arange(1, 9) * 7 % vocabulary).to(device)[None]
    positions = torch.arange(row.shape[1], device=device)[None]
    whole = policy.model(input_ids=row, use_cache=False).logits
    if not close(policy.head(policy.hidden(row, positions)), whole):
        raise EngineError(
            f"{type(policy.model).__name__} changes its logits after the projection in a way "
            "that rlx does not know, so its log-probs would be wrong"
        )
