"""Supervised fine-tuning: −log π of the tokens that the data shows."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.offline.inputs import ObjectiveInputs
from rlx.core.ragged import Tensor


@component(data="conversations", head="lm", per="token")
def sft(x: ObjectiveInputs) -> Tensor:
    """Cross-entropy of each trained token.

    Formula: −log π(y_t | x, y_<t), averaged over all trained tokens of the optimizer step.
    Use: demonstrations; text to go on training on (`offline.train_on: all`).

    Returns:
        [N].
    """
    return -x.logprobs
