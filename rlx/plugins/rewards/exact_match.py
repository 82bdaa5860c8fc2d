"""Exact match: 1 when the response is the label, else 0."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.rewards import RewardInputs


@component(needs_label=True)
def exact_match(
    sample: RewardInputs,
    *,
    ignore_case: bool = False,
    ignore_whitespace: bool = False,
    ignore_punctuation: bool = False,
    last_line: bool = False,
) -> float:
    """1.0 when response and label are the same text after stripping, else 0.0.

    Args:
        ignore_case: compare case-folded.
        ignore_whitespace: runs of white space count as one blank.
        ignore_punctuation: strip `.,;:!?"'` and back-quotes from both ends, too.
        last_line: compare the response's last line that is not empty.
    """
    response = sample.response.strip()
    if last_line and response:
        response = response.splitlines()[-1]
    texts = [response, str(sample.label)]
    if ignore_whitespace:
        texts = [" ".join(text.split()) for text in texts]
    if ignore_case:
        texts = [text.casefold() for text in texts]
    ends = " \t\r\n" + (".,;:!?\"'`" if ignore_punctuation else "")
    return float(texts[0].strip(ends) == texts[1].strip(ends))
