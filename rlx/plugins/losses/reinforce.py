"""−A·log π: the policy gradient (Williams, 1992)."""

from __future__ import annotations

from rlx.core.inputs import LossInputs
from rlx.core.ragged import Tensor


def reinforce(x: LossInputs) -> Tensor:
    """Plain policy gradient, without ratio or clip.

    Formula: −A·log π.
    Source: Williams, 1992.
    Use: exactly on policy, one update per batch; off policy together with a correction.

    Returns:
        [N].
    """
    return -x.advantages * x.logprobs
