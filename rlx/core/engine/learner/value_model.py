"""The critic as its learner sees it: packed rows in, values of action tokens out.

It is the body of a language model with one number per hidden state in place of the vocabulary's
logits. The value of an action token is read where that token is predicted, so it does not know it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.attention import hidden_states, settle
from rlx.core.engine.learner.model import (
    Loaded,
    load_pretrained,
    make_trainable,
)
from rlx.core.engine.learner.packing import Layout
from rlx.core.engine.learner.scored_model import HEAD_NAMES
from rlx.core.errors import EngineError


class PackedCritic(nn.Module):
    """Values [n] float32 of the action tokens of a micro-batch."""

    def __init__(self, body: nn.Module, weight: Tensor) -> None:
        """`weight`: [H], of the head."""
        super().__init__()
        self.model: Any = body
        self.head = ValueHead(weight)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        source: Tensor,
        targets: Tensor,
        *,
        layout: Layout | None = None,
    ) -> tuple[Tensor]:
        """`targets` is there because every packed model is given it; values don't depend on it."""
        hidden = hidden_states(self.model, tokens, positions, layout)
        return (self.head(hidden.flatten(0, 1).index_select(0, source)),)


class ValueHead(nn.Module):
    """Hidden states [n, H] → values [n], in float32 whatever the model's dtype."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self.weight.float()


def load_critic(model: str, settings: LearnerConfig, device: torch.device) -> Loaded[PackedCritic]:
    """Body and head of a reward model's folder, or any language model's body with a head of zeros.

    With a head of zeros all values start at 0, so that the first advantages are the bare returns.

    Raises:
        EngineError: the model can't be loaded, or its head gives more than one number.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification

    if _is_classifier(model):
        whole, dtype = load_pretrained(AutoModelForSequenceClassification, model, settings, device)
        body, weight = whole.base_model, _head_weight(whole, model)
    else:
        body, dtype = load_pretrained(AutoModel, model, settings, device)
        weight = torch.zeros(body.config.get_text_config().hidden_size, dtype=dtype)
    critic = PackedCritic(body, weight).to(device).eval()
    packing = settle(body, settings, device)
    make_trainable(critic, settings)
    return Loaded(module=critic, dtype=dtype, packing=packing)


def _is_classifier(model: str) -> bool:
    from transformers import AutoConfig

    try:
        architectures = AutoConfig.from_pretrained(model).architectures or []
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"the critic '{model}' can't be loaded: {error}") from error
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def _head_weight(whole: Any, model: str) -> Tensor:
    head = next((getattr(whole, name) for name in HEAD_NAMES if hasattr(whole, name)), None)
    weight = getattr(head, "weight", None)
    if weight is None or weight.shape[0] != 1:
        found = "no linear head" if weight is None else f"a head with {weight.shape[0]} outputs"
        raise EngineError(f"the critic '{model}' has {found}; a value is one number")
    return weight.detach()[0]
