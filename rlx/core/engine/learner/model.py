"""The policy as the learner sees it: packed rows in, log-probs of action tokens out.

A causal language model is taken apart into body (hidden states) and head (projection to logits), so
that the head runs on action positions only. Whether that is all the model does, and whether it
keeps packed sequences apart, is measured when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.token_logprobs import token_logprobs
from rlx.core.errors import EngineError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PackedPolicy(nn.Module):
    """Log-probs and entropies [n] of the action tokens of a micro-batch, at one temperature."""

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
        chunks: int = 1,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(tokens, positions).flatten(0, 1).index_select(0, source)
        return token_logprobs(
            self.head,
            hidden,
            targets,
            temperature=self.temperature,
            chunks=chunks,
            entropy_gradient=entropy_gradient,
        )

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [R, L, H]. Restarting positions keep packed sequences apart, but only with
        neither a cache nor a mask."""
        body = self.model.base_model
        return body(
            input_ids=tokens, position_ids=positions, attention_mask=None, use_cache=False
        ).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        return self._shape_logits(self.model.get_output_embeddings()(hidden))


def logit_shape(model: Any) -> Callable[[Tensor], Tensor]:
    """What the model does to its logits after the projection: scaling, soft-capping."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    factor = scale / divisor

    def shape(logits: Tensor) -> Tensor:
        if factor != 1.0:
            logits = logits * factor
        return torch.tanh(logits / cap) * cap if cap else logits

    return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPolicy:
    """A policy with what is known about it."""

    policy: PackedPolicy
    dtype: torch.dtype
    packable: bool
    """Whether several sequences may share a row."""


def load_policy(
    model: str, settings: LearnerConfig, temperature: float, device: torch.device
) -> LoadedPolicy:
    """Load a Hugging Face folder, ready to train: no dropout, sdpa attention.

    Raises:
        EngineError: the model can't be loaded, or its logits are not its head's projection.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        dtype = resolve_dtype(AutoConfig.from_pretrained(model), settings.dtype)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"the model '{model}' can't be loaded: {error}") from error
    policy = PackedPolicy(loaded.to(device), temperature).eval()
    packable = examine(policy, device)
    if settings.gradient_checkpointing:
        # Checkpointing is active in training mode only.
        _switch_off_dropout(loaded)
        loaded.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
    return LoadedPolicy(policy=policy, dtype=dtype, packable=packable)


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
def examine(policy: PackedPolicy, device: torch.device) -> bool:
    """Compare two short sequences one by one with their packed row; returns whether they agree.

    Raises:
        EngineError: body and head don't make up the model's own logits.
    """
    vocabulary = policy.model.get_output_embeddings().weight.shape[0]
    pair = [torch.arange(1, 7) * 7 % vocabulary, torch.arange(3, 11) * 5 % vocabulary]
    alone = []
    for tokens in pair:
        row = tokens.to(device)[None]
        alone.append(policy.model(input_ids=row, use_cache=False).logits[0].float())
        own = policy.head(policy.hidden(row, _positions([tokens], device)))[0].float()
        if not _close(own, alone[-1]):
            raise EngineError(
                f"{type(policy.model).__name__} changes its logits after the projection in a way "
                "that rlx does not know, so its log-probs would be wrong"
            )
    packed = policy.head(policy.hidden(torch.cat(pair).to(device)[None], _positions(pair, device)))[
        0
    ].float()
    return _close(packed, torch.cat(alone))


def _positions(sequences: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(len(tokens)) for tokens in sequences]).to(device)[None]


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Within the rounding of bfloat16 kernels, which is far below what a foreign token changes."""
    return bool((ours - theirs).abs().max() <= 0.02 * theirs.std())
