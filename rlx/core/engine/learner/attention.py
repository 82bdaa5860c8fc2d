"""Which attention a loaded model computes, and what may therefore lie in a row: measured.

`ragged` is rlx's own (`ragged_attention`): flat rows without pads, common prefixes once. Every
other name is one of transformers': rows of several sequences whose positions restart, or, where
prefixes are shared, one row with a dense mask. A model that mixes tokens in another way than by
attention (or whose attention knows windows or sinks) gives other hidden states when packed than one
by one; it then falls back to what gives the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.packing import Layout
from rlx.core.engine.learner.ragged_attention import (
    NAME,
    UnsupportedAttentionError,
    laid_out,
    register,
)
from rlx.core.engine.learner.requirements import FLASH
from rlx.core.errors import UsageError
from rlx.core.soft_capping import exact_attention, soft_capped

WORTH = 16
"""Least saving, in tokens of a tree, with which `shared_prefix: auto` shares (ADR 90)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What the rows of a model's micro-batches may hold."""

    several: bool
    """Whether several sequences may share a row."""
    flat: bool = False
    """Whether a micro-batch is one row without pads."""
    worth: int | None = None
    """Least saving, in tokens, for which sequences share their prefix; None: never. Only flat."""
    whole: bool = False
    """Whether the tokens after the last one that predicts an action token are read too."""

    def both(self, other: Packing) -> Packing:
        """What two models may do that read the same micro-batches."""
        flat = self.flat and other.flat
        shares = flat and self.worth is not None and other.worth is not None
        return Packing(
            several=self.several and other.several,
            flat=flat,
            worth=self.worth if shares else None,
            whole=self.whole or other.whole,
        )


def hidden_states(
    body: Any, tokens: Tensor, positions: Tensor, layout: Layout | None = None
) -> Tensor:
    """Hidden states [R, L, H] of packed rows.

    Without a layout, positions that restart keep packed sequences apart, but only with neither a
    cache nor a mask.
    """
    options: dict[str, Any] = {"attention_mask": None}
    if layout is not None and body.config._attn_implementation == NAME:
        options["rlx_layout"] = laid_out(layout, tokens.device, body.dtype)
    elif layout is not None and len(layout.stems):
        options["attention_mask"] = dense_mask(layout, tokens.device, body.dtype)
    return body(
        input_ids=tokens, position_ids=positions, use_cache=False, **options
    ).last_hidden_state


def dense_mask(layout: Layout, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[1, 1, T, T]: 0 where a token reads another one, else the least number of `dtype`."""
    count = int(layout.spans[:, 1].max())
    reads = torch.zeros(count, count, dtype=torch.bool, device=device)
    for start, stop in layout.spans.tolist():
        reads[start:stop, start:stop] = True
    for start, stop, end in layout.stems.tolist():
        reads[stop:end, start:stop] = True
    mask = torch.full((count, count), torch.finfo(dtype).min, dtype=dtype, device=device)
    return mask.masked_fill_(reads.tril_(), 0.0)[None, None]


def starting_attention(settings: LearnerConfig, config: Any) -> str | None:
    """The name under which transformers loads the model (None: its choice); `settle` may change it.

    Args:
        config: the model's.

    Raises:
        UsageError: the attention that was asked for leaves a part of the model's out.
    """
    if settings.attention in ("auto", "ragged"):
        return exact_attention(config)
    if settings.attention == "sdpa" and soft_capped(config):
        raise UsageError(
            "The model caps the scores of its attention, which sdpa leaves out.",
            where="learner.attention",
            fix="learner.attention: auto",
        )
    return settings.attention


@torch.no_grad()
def settle(
    body: Any, settings: LearnerConfig, device: torch.device, *, shares: bool = True
) -> Packing:
    """Give the model its attention, and find out by short sequences how they may be packed.

    Args:
        shares: false where what is read from the model needs whole sequences.

    Raises:
        UsageError: the model can't do what the settings ask for.
    """
    probe, plain = _Probe(body, device), body.config._attn_implementation
    on_cpu = device.type == "cpu"
    if settings.attention == "ragged" or (settings.attention == "auto" and on_cpu):
        if _use_ragged(body) and probe.tree():
            worth = {"off": None, "on": 1, "auto": WORTH}[settings.shared_prefix]
            return Packing(
                several=True, flat=True, worth=worth if shares else None, whole=not shares
            )
        if settings.attention == "ragged":
            raise _refusal(body, "learner.attention: ragged", "learner.attention: auto")
        body.set_attn_implementation(plain)
    several = probe.row()
    if settings.shared_prefix == "on" and shares:
        if settings.attention in FLASH or _windows(body.config) or not probe.tree():
            raise _refusal(body, "learner.shared_prefix: on", "learner.shared_prefix: auto")
        return Packing(several=several, flat=True, worth=1)
    flat = several and settings.attention in FLASH
    return Packing(several=several, flat=flat, whole=not shares)


def _use_ragged(body: Any) -> bool:
    """Whether the model lets its attention be replaced."""
    if not (body._can_set_attn_implementation() and body._supports_attention_backend):
        return False
    body.set_attn_implementation(register())
    return bool(body.config._attn_implementation == NAME)


def _windows(config: Any) -> bool:
    """Whether a layer reads a part of the past only, which a mask given to the model would undo."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    if any(kind != "full_attention" for kind in kinds):
        return True
    return not kinds and getattr(text, "sliding_window", None) is not None


def _refusal(body: Any, setting: str, fix: str) -> UsageError:
    return UsageError(
        f"{type(body).__name__} gives other hidden states with {setting} than without.",
        where=setting.partition(":")[0],
        fix=fix,
    )


class _Probe:
    """Three short sequences, two with a common beginning: alone, in a row, and as a tree."""

    def __init__(self, body: Any, device: torch.device) -> None:
        self._body, self._device = body, device
        vocabulary = body.get_input_embeddings().weight.shape[0]
        first = torch.arange(1, 7) * 7 % vocabulary
        self._sequences = [
            torch.cat([first, torch.arange(2, 5) * 5 % vocabulary]),
            torch.cat([first, torch.arange(3, 8) * 3 % vocabulary]),
            torch.arange(3, 11) * 5 % vocabulary,
        ]
        self._stem = len(first)
        self._alone = [self._hidden(one, torch.arange(len(one)), None) for one in self._sequences]

    def row(self) -> bool:
        """Whether positions that restart keep sequences apart."""
        return self._same(self._sequences, [0, 0, 0], None)

    def tree(self) -> bool:
        """Whether a layout is followed: the first two share a stem, the third stands alone."""
        stem = self._stem
        a, b, c = (len(one) for one in self._sequences)
        ends = np.cumsum([stem, a - stem, b - stem, c])
        layout = Layout(
            spans=np.stack([np.concatenate([[0], ends[:-1]]), ends], 1),
            stems=np.array([[0, stem, ends[2]]]),
        )
        pieces = [self._sequences[0], self._sequences[1][stem:], self._sequences[2]]
        return self._same(pieces, [0, stem, 0], layout)

    def _same(self, pieces: list[Tensor], firsts: list[int], layout: Layout | None) -> bool:
        """Whether `pieces` in one row have the states that they have alone, from `firsts` on."""
        positions = torch.cat(
            [first + torch.arange(len(one)) for one, first in zip(pieces, firsts, strict=True)]
        )
        try:
            found = self._hidden(torch.cat(pieces), positions, layout)
        except (UnsupportedAttentionError, TypeError, ValueError):
            return False
        alone = torch.cat(
            [states[first:] for states, first in zip(self._alone, firsts, strict=True)]
        )
        return close(found, alone)

    def _hidden(self, tokens: Tensor, positions: Tensor, layout: Layout | None) -> Tensor:
        row, places = tokens.to(self._device)[None], positions.to(self._device)[None]
        return hidden_states(self._body, row, places, layout)[0]


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether tokens [n, H] differ by rounding: on average, each relative to its norm.

    A foreign token changes at least one by about its norm. Two kernels in bfloat16 give SmolLM2's
    tokens differences of 0.02, and one beside an attention sink 0.16.
    """
    tolerance = 1e-3 if theirs.dtype == torch.float32 else 0.1
    gap = (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1)
    return bool(gap.square().mean().sqrt() <= tolerance)
