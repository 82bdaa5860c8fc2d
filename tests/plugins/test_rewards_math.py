"""The `math` reward: where the answer is found, what equals what, all of GSM8K."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.plugins.rewards._answers import last_boxed, last_number, number, same_number
from rlx.plugins.rewards._symbolic import UNDECIDED, Checker, equal
from rlx.plugins.rewards.math import math
from rlx.testing import reward_inputs

DATA = Path(__file__).parents[3] / "shared" / "data"


def score(label: object, response: str, **params: object) -> float | None:
    return math(reward_inputs(label=label, response=response), **params).score  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def gsm8k() -> list[dict[str, str]]:
    if not DATA.is_dir():
        pytest.skip(f"no folder {DATA}: the public data sets lie beside the repository")
    lines = (DATA / "gsm8k-train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_agrees_with_the_labels_on_every_gsm8k_solution(gsm8k: list[dict[str, str]]) -> None:
    wrong = [row["answer"] for row in gsm8k if score(row["answer"], row["answer"]) != 1.0]
    assert len(gsm8k) == 7473
    assert wrong == []


def test_rejects_every_gsm8k_solution_with_another_final_number(
    gsm8k: list[dict[str, str]],
) -> None:
    accepted = [
        row["answer"]
        for i, row in enumerate(gsm8k)
        if score(row["answer"], perturbed(row["answer"], i)) != 0.0
    ]
    assert accepted == []


def test_reads_gsm8k_solutions_without_their_marker(gsm8k: list[dict[str, str]]) -> None:
    """Most solutions name the result last; the text before `####` is what a model writes."""
    right = sum(score(row["answer"], row["answer"].rpartition("####")[0]) == 1.0 for row in gsm8k)
    assert right / len(gsm8k) > 0.9


def perturbed(solution: str, i: int) -> str:
    """The solution with its final number off by something between a tenth and a million."""
    head, _, tail = solution.rpartition("####")
    value = Fraction(tail.strip().replace(",", "")) + (1, -1, Fraction(1, 10), 10**6, 7)[i % 5]
    text = str(value) if value.denominator == 1 else str(float(value))
    return f"{head}#### {text}"


@pytest.mark.parametrize(
    ("label", "response"),
    [
        ("72", "In total 24+48 = 72."),
        (72, "**72** clips"),
        ("1,000", "it costs $1000.00 in all"),
        ("-3", "the result is −3"),
        ("-3", "$-3$"),
        ("0.5", "so 1/2"),
        ("3/4", r"thus $\frac{3}{4}$"),
        ("3/4", r"thus \frac{3}{4} of it"),
        (r"\frac{1}{2}", r"first \boxed{3}, no: \boxed{\frac{1}{2}}"),
        (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}"),
        (r"$\frac{\pi}{2}$", r"so it is $\frac{\pi}{2}$."),
        ("x^2+2x+1", r"\boxed{(x+1)^2}"),
        ("5", r"\boxed{x = 5}"),
        ("72", r"\boxed{72 \text{ clips}}"),
        ("50", "50%"),
        ("50%", r"\boxed{0.5}"),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
        ("The sum.\n#### 12", "#### 12\n\nI hope that 99 people like it."),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
    ],
)
def test_equal_answers(label: object, response: str) -> None:
    assert score(label, response) == 1.0


@pytest.mark.parametrize(
    ("label", "response"),
    [
        ("72", "71"),
        ("72", "no number here"),
        ("72", ""),
        ("72", r"\boxed{72} or rather \boxed{73}"),
        ("72", "72\n#### 73"),
        ("72", "72 of the 100"),
        ("-3", "10-3"),
        ("2", r"\frac{1}{2}"),
        ("2", "1/2"),
        ("3", "the H2O3"),
        ("1000", "1,0000"),
        ("x+1", r"\boxed{x+2}"),
        ("72", "####"),
    ],
)
def test_different_answers(label: object, response: str) -> None:
    assert score(label, response) == 0.0


def test_scores_and_the_strict_form_are_parameters() -> None:
    assert score("3", "it is 3", require_marker=True, wrong=-0.5) == -0.5
    assert score("3", "#### 3", require_marker=True, correct=2.0) == 2.0


def test_metrics_tell_missing_answers_from_wrong_ones() -> None:
    assert math(reward_inputs(label="3", response="?")).metrics["answered"] == 0.0
    assert math(reward_inputs(label="3", response="4")).metrics["answered"] == 1.0


@pytest.mark.parametrize("label", ["", "####", "  "])
def test_empty_label_is_an_error_not_a_wrong_answer(label: str) -> None:
    with pytest.raises(ValueError, match="label"):
        score(label, r"\boxed{x}")


def test_label_that_cannot_be_compared_with_is_an_error() -> None:
    with pytest.raises(ValueError, match="finds no number or expression in the label"):
        score(r"\text{}", r"\boxed{x}")


def test_answer_that_takes_for_ever_is_wrong_and_counted() -> None:
    start = time.monotonic()
    reward = math(reward_inputs(label="3", response=r"\boxed{9^{9^{9^{9}}}}"), timeout=0.5)
    assert reward.score == 0.0
    assert reward.metrics["undecided"] == 1.0
    assert time.monotonic() - start < 60
    assert score(r"\sqrt{4}", r"\boxed{2}") == 1.0, "the next answer finds a new process"


def test_number_of_thousands_of_digits_is_no_answer() -> None:
    assert score("4", "9" * 5000) == 0.0
    assert score("4", "1" + ",000" * 2000) == 0.0


def test_rewards_in_several_threads_agree() -> None:
    answers = [rf"\boxed{{\frac{{{n}}}{{2}}}}" for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(lambda text: score(r"\frac{20}{2}", text), answers))
    assert scores == [float(n == 20) for n in range(40)]


def test_checker_uses_no_more_processes_than_it_may() -> None:
    checker = Checker(processes=1)
    try:
        with ThreadPoolExecutor(4) as pool:
            verdicts = list(pool.map(lambda n: checker.equal("4", f"{n}+0", 30.0), range(8)))
        assert verdicts == [n == 4 for n in range(8)]
        assert len(checker._idle) == 1
        assert checker.equal("4", r"9^{9^{9^{9}}}", 0.3) is UNDECIDED
        assert checker._idle == []
    finally:
        checker.close()


def test_last_boxed_balances_braces() -> None:
    assert last_boxed(r"\boxed{a} and \boxed{\frac{1}{x_{2}}}.") == r"\frac{1}{x_{2}}"
    assert last_boxed(r"\boxed{1} then \boxed{unclosed") == "1"
    assert last_boxed(r"\fbox {2}") == "2"
    assert last_boxed("none") is None


@given(st.lists(st.sampled_from([r"\boxed{", r"\fbox {", "{", "}", "1", "x "]), max_size=14))
def test_last_boxed_is_the_last_whose_braces_close(pieces: list[str]) -> None:
    text = "".join(pieces)
    wanted = None
    for start in (found.end() for found in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)):
        depth = 1
        for at in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                wanted = text[start:at].strip()
                break
    assert last_boxed(text) == wanted


@pytest.mark.parametrize("label", ["72", "x^2"])
@pytest.mark.parametrize(
    "piece", [r"\boxed{", r"\boxed{1}", "$", "$x", r"\(", r"\[", "1,", "1,000", "1 / ", "#### "]
)
def test_a_policy_that_repeats_itself_costs_seconds_at_most(piece: str, label: str) -> None:
    start = time.monotonic()
    score(label, piece * (200_000 // len(piece)))
    assert time.monotonic() - start < 10  # linear; the square of it would be minutes


def test_last_number_keeps_fractions_and_thousands_together() -> None:
    assert last_number("from 3 to 1,234.5 miles") == "1,234.5"
    assert last_number("take 3 / 4 of it") == "3 / 4"
    assert last_number("temperatures of -5.") == "-5"
    assert last_number("pages 10-15") == "15"
    assert last_number("nothing") is None


_plain = st.builds(
    lambda sign, whole, decimals, commas: (
        sign + (f"{whole:,}" if commas else str(whole)) + (f".{decimals}" if decimals else "")
    ),
    st.sampled_from(["", "-"]),
    st.integers(0, 10**7),
    st.text("0123456789", max_size=7),
    st.booleans(),
)
_near = st.sampled_from(["0", "1", "-1", "0.1", "0.00001", "0.000001", "0.0000004", "1000000"])


@settings(max_examples=150)
@given(_plain, _plain, st.none() | _near)
def test_fast_path_agrees_with_math_verify(a: str, b: str, step: str | None) -> None:
    if step is not None:  # an answer next to the label is where the two could differ
        exact = Fraction(a.replace(",", "")) + Fraction(step)
        b = f"{float(exact):.7f}"
    first, second = number(a), number(b)
    assert first is not None
    assert second is not None
    verdict = same_number(first, second)
    if verdict is not None:
        assert verdict == equal(a, b)


def test_number_reads_what_is_plainly_a_number_only() -> None:
    for text in ("$1,000.50", "-$3", "$-3", "+4", "7%", r"\$5", "12.", ".5"):
        assert number(text) is not None, text
    for text in ("1/2", "x", "1,00", "3 clips", "1e5", "--3", "", "1.2.3", r"\frac{1}{2}"):
        assert number(text) is None, text


def test_importing_the_reward_imports_no_sympy() -> None:
    import subprocess
    import sys

    code = "import sys, rlx.plugins.rewards.math; print('sympy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch("False", done.stdout.strip())
