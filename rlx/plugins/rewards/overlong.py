"""Soft penalty on overlong responses: DAPO, arXiv:2503.14476, equation 13.

    n <= max_length - buffer              0
    max_length - buffer < n < max_length  -(n - (max_length - buffer)) / buffer
    max_length <= n                       -1

times `factor`; n counts action tokens only, so prompt and tool output cost nothing.
"""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.errors import UsageError
from rlx.core.rewards import RewardInputs


@component(example={"max_length": 8, "buffer": 4})
class overlong:  # noqa: N801 - its name on the command line
    """Penalty in [-factor, 0] that grows linearly over the last `buffer` tokens.

    Args:
        max_length: action tokens at which the penalty is complete; as a rule `max_new_tokens`.
        buffer: tokens before `max_length` over which the penalty grows; 0 is a hard limit.
        factor: the penalty at `max_length`.

    Raises `UsageError` unless 0 <= buffer <= max_length, max_length >= 1 and factor >= 0.
    """

    def __init__(self, *, max_length: int, buffer: int, factor: float = 1.0) -> None:
        if max_length < 1 or factor < 0:
            raise UsageError(
                f"overlong needs max_length >= 1 and factor >= 0, not {max_length} and {factor}",
                where="parameters of the reward 'overlong'",
                fix="the penalty's sign is built in: give a positive factor",
            )
        if not 0 <= buffer <= max_length:
            raise UsageError(
                f"overlong: buffer {buffer} is not between 0 and max_length {max_length}",
                where="parameters of the reward 'overlong'",
                fix=f"buffer={max(1, max_length // 4)}, for example",
            )
        self.max_length = max_length
        self.buffer = buffer
        self.factor = factor

    def __call__(self, sample: RewardInputs) -> float:
        over = sample.response_tokens - (self.max_length - self.buffer)
        if over <= 0:
            return 0.0
        if self.buffer == 0:
            return -self.factor
        return -self.factor * min(1.0, over / self.buffer)
