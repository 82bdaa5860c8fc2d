"""Return-to-go over turns, normalised among the group's rollouts at the same turn."""

from __future__ import annotations

import torch

from rlx.core import ragged
from rlx.core.component import component
from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import Fraction, NonNegative


@component(requires={"groups"})
def turn_returns(
    x: EstimatorInputs, *, turn_gamma: Fraction = 1.0, eps: NonNegative = 1e-6
) -> Tensor:
    """Discounted return from each turn on, standardised within the group by turn index.

    Formula: G_k = r_k + γ·G_{k+1} over the rollout's turns, A_k = (G_k − mean)/(std + eps) over the
    group's rollouts that have a turn k; unbiased std. r_k is the sum of `token_rewards` of turn k.
    Source: turn-level credit assignment, arXiv:2505.11821; return normalisation as in GRPO.
    Use: agents with per-turn rewards. Biased when turn counts differ: late turns are compared only
    with the rollouts that got that far, and a rollout alone at its turn learns nothing there.

    Args:
        turn_gamma: discount per turn.
        eps: keeps nearly constant turns from blowing up.

    Returns:
        [N].
    """
    stride = int(x.turn.max()) + 1 if x.token_count else 1
    # One segment per (rollout, turn) that has action tokens, in the order of the tokens.
    keys, segment = torch.unique(x.sequence_index * stride + x.turn, return_inverse=True)
    rewards = ragged.segment_sum(x.token_rewards, segment, keys.shape[0])
    turns_per_rollout = torch.bincount(keys // stride, minlength=x.sequence_count)
    returns = ragged.discounted_sum(rewards, turns_per_rollout, turn_gamma)

    peers = x.group_index[keys // stride] * stride + keys % stride
    peers = torch.unique(peers, return_inverse=True)[1]
    centred = returns - ragged.group_mean(returns, peers)
    scale = (ragged.group_std(returns, peers) + eps).where(centred != 0, 1.0)
    return (centred / scale)[segment]
