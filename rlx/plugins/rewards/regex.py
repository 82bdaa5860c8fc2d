"""Format reward: 1 when the response matches a regular expression, else 0."""

from __future__ import annotations

import re
from typing import Literal

from rlx.core.component import component
from rlx.core.errors import UsageError
from rlx.core.rewards import RewardInputs


@component(example={"pattern": "4"})
class regex:  # noqa: N801 - its name on the command line
    r"""`match` when the pattern is found, else `mismatch`.

    Args:
        pattern: Python regular expression; `.` matches line ends as well
            (`<think>.*</think>\s*<answer>.*</answer>`).
        mode: `search` anywhere in the response, or `full` for the whole of it (white space at its
            ends stripped).
        ignore_case: match in either case.
        match: score of a response that matches.
        mismatch: score of one that doesn't.

    Raises `UsageError` for a pattern that doesn't compile. The pattern is the user's, so one that
    backtracks without end is theirs, too; Python can't interrupt it.
    """

    def __init__(
        self,
        *,
        pattern: str,
        mode: Literal["search", "full"] = "search",
        ignore_case: bool = False,
        match: float = 1.0,
        mismatch: float = 0.0,
    ) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
        except re.error as error:
            raise UsageError(
                f"{pattern!r} is not a regular expression: {error}",
                where="pattern of the reward 'regex'",
                fix="escape signs that are meant literally: \\( \\[ \\* \\+ \\?",
            ) from error
        self.mode = mode
        self.match = match
        self.mismatch = mismatch

    def __call__(self, sample: RewardInputs) -> float:
        if self.mode == "full":
            found = self.pattern.fullmatch(sample.response.strip())
        else:
            found = self.pattern.search(sample.response)
        return self.match if found else self.mismatch
