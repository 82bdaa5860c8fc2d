"""A model with a head of few numbers, as a learner sees it: packed rows in, one number a token out.

`score`: a sequence classifier with one label; its number is read at a sequence's last token.
`token`: a token classifier with the labels wrong and right; its number is their log-odds.
Both are read at the state *of* the token, as transformers' own classifiers do, and computed in
float32. What is saved, `AutoModelForSequenceClassification` and `…TokenClassification` load.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.attention import hidden_states, settle
from rlx.core.engine.learner.model import (
    Loaded,
    load_pretrained,
    make_trainable,
)
from rlx.core.engine.learner.packing import Layout
from rlx.core.errors import EngineError

HEAD_NAMES = ("score", "classifier")
"""What transformers' classification models call their last layer."""
_LABELS = {"score": ["score"], "token": ["wrong", "right"]}
_TASKS = {"score": "ForSequenceClassification", "token": "ForTokenClassification"}


class PackedScores(nn.Module):
    """One number [n] float32 for each trained token of a micro-batch."""

    def __init__(self, model: Any, head: str) -> None:
        super().__init__()
        self.model = model
        self._head = head

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        source: Tensor,
        targets: Tensor,
        *,
        layout: Layout | None = None,
    ) -> tuple[Tensor]:
        """`source` is the token before each trained one; the number is read one further."""
        hidden = hidden_states(self.model.base_model, tokens, positions, layout).flatten(0, 1)
        numbers = self.model.get_submodule(self._head)(hidden.index_select(0, source + 1))
        return (numbers[:, 0] if numbers.shape[1] == 1 else numbers[:, 1] - numbers[:, 0],)


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32, whatever its weights are stored in."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.weight.float(), bias)


def load_scores(
    model: str,
    settings: LearnerConfig,
    device: torch.device,
    *,
    kind: str,
    seed: int,
    pad_token_id: int | None,
) -> Loaded[PackedScores]:
    """A classifier's folder with its head, or any language model's body with a new one.

    Args:
        kind: `score` or `token`.
        seed: of a new head, whose weights are drawn from N(0, 1/(H + 1)).
        pad_token_id: written into the model's configuration, which its loader needs.

    Raises:
        EngineError: the model can't be loaded, or its head is of another shape.
    """
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
    from transformers.utils import logging

    auto = {
        "score": AutoModelForSequenceClassification,
        "token": AutoModelForTokenClassification,
    }[kind]
    labels = _LABELS[kind]
    fresh = not _is_trained(model, kind)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # that the head is new is known
    options = {"num_labels": len(labels)} if fresh else {}
    try:
        whole, dtype = load_pretrained(auto, model, settings, device, **options)
    finally:
        logging.set_verbosity(verbosity)
    name = _replace_head(whole, model, len(labels))
    if fresh:
        _draw(whole.get_submodule(name), seed)
        whole.config.id2label = dict(enumerate(labels))
        whole.config.label2id = {label: index for index, label in enumerate(labels)}
    for config in {id(one): one for one in (whole.config, whole.config.get_text_config())}.values():
        config.pad_token_id = pad_token_id
    scored = PackedScores(whole, name).to(device).eval()
    # A number is read one place further than a log-prob, which is not next to it behind a stem.
    packing = settle(whole.base_model, settings, device, shares=False)
    make_trainable(scored, settings)
    return Loaded(module=scored, dtype=dtype, packing=packing, head=name)


def _is_trained(model: str, kind: str) -> bool:
    from transformers import AutoConfig

    try:
        architectures = AutoConfig.from_pretrained(model).architectures or []
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"the model '{model}' can't be loaded: {error}") from error
    return any(name.endswith(_TASKS[kind]) for name in architectures)


def _replace_head(whole: Any, model: str, outputs: int) -> str:
    """Put a float32 layer with the same parameters in the head's place; returns its name."""
    name = next((name for name in HEAD_NAMES if hasattr(whole, name)), None)
    head = getattr(whole, name) if name else None
    if name is None or not isinstance(head, nn.Linear) or head.out_features != outputs:
        found = f"a head of {head}" if head is not None else "no head that rlx knows"
        raise EngineError(f"the model '{model}' has {found}; a linear one of {outputs} is needed")
    layer = Float32Linear(head.in_features, outputs, bias=head.bias is not None, device="meta")
    layer.weight, layer.bias = head.weight, head.bias
    setattr(whole, name, layer)
    return name


@torch.no_grad()
def _draw(head: nn.Linear, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(head.weight.shape, generator=generator)
    head.weight.copy_(drawn / math.sqrt(head.in_features + 1))
    if head.bias is not None:
        head.bias.zero_()
