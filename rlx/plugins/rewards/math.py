r"""Mathematical equality of the response's final answer and the label, by math-verify.

The final answer is the last `\boxed{…}`, else what follows the last `####` (GSM8K), else the last
number of the response (the last `$…$` where the label is not a plain number).
https://github.com/huggingface/Math-Verify
"""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.rewards import Reward, RewardInputs
from rlx.plugins.rewards._answers import final_answer, label_answer, number, same_number
from rlx.plugins.rewards._symbolic import UNDECIDED, checker


@component(needs_label=True)
def math(
    sample: RewardInputs,
    *,
    correct: float = 1.0,
    wrong: float = 0.0,
    require_marker: bool = False,
    timeout: float = 5.0,
) -> Reward:
    r"""`correct` when the final answer equals the label mathematically, else `wrong`.

    Args:
        correct: score of an answer that equals the label.
        wrong: score of any other, and of a response without an answer.
        require_marker: only `\boxed{…}` and `####` count, not the last number of the text.
        timeout: seconds for one symbolic comparison; an answer that takes longer (`9^{9^9}`) is
            wrong, and counted in the metric `math/undecided`.

    The label is a number, LaTeX, or text with `#### n` or `\boxed{n}` in it.
    Raises `ValueError` for a label in which math-verify finds nothing to compare with.
    """
    label = label_answer(sample.label)
    label_number = number(label)
    answer = final_answer(
        sample.response, numeric=label_number is not None, require_marker=require_marker
    )
    if answer is None:
        return Reward(wrong, metrics={"answered": 0.0, "undecided": 0.0})
    answer_number = number(answer)
    # Plain numbers are compared exactly: a thousand times faster than by way of a parser and
    # sympy, and where rounding or percentages could decide `same_number` leaves it to math-verify.
    verdict = None
    if label_number is not None and answer_number is not None:
        verdict = same_number(label_number, answer_number)
    if verdict is None:
        checked = checker.equal(label, answer, timeout)
        if checked is UNDECIDED:
            return Reward(wrong, metrics={"answered": 1.0, "undecided": 1.0})
        verdict = bool(checked)
    return Reward(correct if verdict else wrong, metrics={"answered": 1.0, "undecided": 0.0})
