"""Dynamic sampling: train only on groups that have something to tell apart.

    keep  ⇔  low < mean(score) < high  and  not all scores equal

A group whose rollouts are all right or all wrong has zero group-normalised advantages; replacing it
keeps the number of effective gradients per step constant.

Source: DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.2.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge

from rlx.core.errors import ComponentError, UsageError
from rlx.core.rollouts import Group
from rlx.core.samplers import Drop


class Dynamic:
    """Drop groups whose mean score is at or beyond a bound, or whose scores are all equal."""

    def __init__(
        self,
        *,
        low: float = 0.0,
        high: float = 1.0,
        part: str | None = None,
        max_oversample: Annotated[float, Ge(1)] = 10.0,
    ) -> None:
        """
        Args:
            low: the mean score must lie above.
            high: the mean score must lie below; `inf` and `-inf` switch a bound off.
            part: name of the reward that is looked at; None: the composed reward.
            max_oversample: groups generated per group kept before the run ends with an error.
        """
        if not low < high:
            raise UsageError(
                f"sampler dynamic: low={low} is not below high={high}",
                where="sampler.low, sampler.high",
                fix="low=0 high=1 for rewards of 0 and 1",
            )
        self.low = low
        self.high = high
        self.part = part
        self.max_oversample = max_oversample

    def keep(self, group: Group) -> bool | Drop:
        scores = self._scores(group)
        mean = sum(scores) / len(scores)
        if max(scores) == min(scores):
            return Drop("all rewards equal")
        if not mean > self.low:
            return Drop(f"mean reward at or below {self.low:g}")
        if not mean < self.high:
            return Drop(f"mean reward at or above {self.high:g}")
        return True

    def _scores(self, group: Group) -> list[float]:
        if self.part is None:
            return group.rewards
        try:
            return [rollout.parts[self.part] for rollout in group.rollouts]
        except KeyError:
            known = ", ".join(group.rollouts[0].parts) or "none"
            raise ComponentError(
                f"there is no reward part {self.part!r} (sampler.part); parts: {known}"
            ) from None
