"""What the objectives on preference pairs report."""

from __future__ import annotations

import torch

from rlx.core.offline.inputs import ObjectiveInputs
from rlx.core.ragged import Tensor


def metrics(x: ObjectiveInputs, rewards: Tensor) -> dict[str, Tensor]:
    """Accuracy (a tie counts half), margin and log-probs; `rewards`: implicit ones [B]."""
    c, r = x.chosen(rewards).detach(), x.rejected(rewards).detach()
    gap = c - r
    totals = x.sequence_sum(x.logprobs).detach()
    return {
        "accuracy": torch.where(gap == 0, 0.5, (gap > 0).to(gap.dtype)),
        "reward_margin": gap,
        "reward_chosen": c,
        "reward_rejected": r,
        "logprob_chosen": x.chosen(totals),
        "logprob_rejected": x.rejected(totals),
    }
