"""Each reward part group-normalised, summed by weight, batch-normalised: GDPO, arXiv:2601.05242."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import NonNegative


@component(requires={"groups"})
def gdpo(x: EstimatorInputs, *, eps: NonNegative = 1e-6) -> Tensor:
    """Reward parts standardised one by one, so that none drowns the others.

    Formula: S = Σ_k w_k·(r_k − mean_g(r_k))/(std_g(r_k) + eps); A = (S − mean(S))/(std(S) + eps)
    over the rollouts of the batch, unbiased stds.
    Source: GDPO, arXiv:2601.05242.
    Use: several rewards of different scale or difficulty. `reward.clip` does not act on parts.

    Args:
        eps: keeps nearly constant groups from blowing up.

    Returns:
        [B].
    """
    total = torch.zeros_like(x.rewards)
    for name, scores in x.parts.items():
        centred = scores - x.group_mean(scores)
        scale = (x.group_std(scores) + eps).where(centred != 0, 1.0)
        total = total + x.part_weights.get(name, 1.0) * centred / scale
    centred = total - x.batch_mean(total)
    return centred / (x.batch_std(total) + eps).where(centred != 0, 1.0)
