r"""Find the final answer in a text, and read plain numbers. Used by the rewards that need it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# [0-9], not \d: other scripts' digits are not what math-verify reads.
_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_CURRENCY = r"(?:\\?\$|[€£¥₹])"
# Signs may stand before or after the currency sign; a decimal comma is left to math-verify.
_PLAIN = re.compile(
    rf"(?P<sign>[-+]?)\s*{_CURRENCY}?\s*(?P<sign2>[-+]?)"
    rf"(?P<digits>{_DIGITS})\s*(?P<percent>\\?%)?\.?"
)
# A minus directly after a digit is subtraction, a digit directly after a letter part of a name.
_MINUS = r"(?:(?<![\w)])-)?"
_LAST = re.compile(
    rf"{_MINUS}\\[dt]?frac\{{-?[0-9]+\}}\{{[0-9]+\}}"
    rf"|{_MINUS}{_CURRENCY}?(?<![\w.])(?:{_DIGITS})"
    r"(?:\s*/\s*[0-9]+(?![0-9.,]*[0-9]))?(?:\s*\\?%)?"
)
# No formula of an answer is as long: without the bound, unclosed ones cost quadratic time.
_FORMULA = r"(.{1,1000}?)"
_INLINE = re.compile(
    rf"\$\${_FORMULA}\$\$|\${_FORMULA}\$|\\\({_FORMULA}\\\)|\\\[{_FORMULA}\\\]", re.DOTALL
)
_MOST_DIGITS = 300
"""Python converts no more than 4300, and takes quadratic time for it."""
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written: 1,000 or $1.50 or 12%."""

    value: Fraction
    """Without the percent sign's hundredth."""
    percent: bool
    decimals: int


def number(text: str) -> Number | None:
    """Return a plainly written number, or None: commas by thousands, currency and % are read."""
    found = _PLAIN.fullmatch(text.strip().replace("−", "-").replace("\\!", ""))
    if found is None or (found["sign"] and found["sign2"]):
        return None
    digits = found["digits"].replace(",", "")
    if len(digits) > _MOST_DIGITS:  # Python refuses to read integers of more than 4300 digits
        return None
    value = Fraction(digits)
    if "-" in (found["sign"], found["sign2"]):
        value = -value
    return Number(value, found["percent"] is not None, len(digits.partition(".")[2]))


def same_number(a: Number, b: Number) -> bool | None:
    """Whether two plain numbers are equal; None where math-verify's own rules must decide.

    It rounds decimals to six places and lets 50% stand for 50 and for 0.5.
    """
    if a.percent or b.percent:
        return None
    if a.value == b.value:
        return True
    return False if max(a.decimals, b.decimals) <= 5 else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` (braces balanced), or None.

    >>> last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    # One pass with a stack: a policy that says nothing but `\boxed{` must not cost minutes.
    opened: list[tuple[int, int] | None] = []
    last: tuple[int, int, int] | None = None
    for found in _BRACES.finditer(text):
        if not found.group().endswith("}"):
            is_box = len(found.group()) > 1
            opened.append((found.start(), found.end()) if is_box else None)
        elif opened and (box := opened.pop()) is not None:
            last = max(last or (-1, 0, 0), (*box, found.start()))
    return None if last is None else text[last[1] : last[2]].strip()


def label_answer(label: object) -> str:
    r"""Return the answer in a label: after `####`, in the last `\boxed{…}`, or all of it.

    Raises `ValueError` for an empty label.
    """
    text = str(label)
    answer = after_hashes(text)
    if answer is None:
        answer = last_boxed(text) or text.strip()
    if not answer:
        raise ValueError("the label is empty; there is nothing to compare the response with")
    inline = _INLINE.fullmatch(answer)
    return next(group for group in inline.groups() if group).strip() if inline else answer


def final_answer(text: str, *, numeric: bool, require_marker: bool = False) -> str | None:
    """Return the final answer of a response, or None when it has none.

    Args:
        numeric: the label is a plain number, so without a marker the last number is the answer;
            otherwise the last formula in `$…$` comes first.
        require_marker: no marker, no answer.
    """
    marked = last_boxed(text)
    if marked is None:
        marked = after_hashes(text)
    if marked is not None or require_marker:
        return marked or None
    if not numeric:
        formulas = [next(g for g in m.groups() if g) for m in _INLINE.finditer(text)]
        if formulas:
            return formulas[-1].strip()
    return last_number(text)


def after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last `####`, or None without one."""
    _, marker, tail = text.rpartition("####")
    return tail.strip().partition("\n")[0].strip() if marker else None


def last_number(text: str) -> str | None:
    r"""Return the last number of a text, fractions (`3/4`, `\frac{3}{4}`) in one piece."""
    last = None
    for found in _LAST.finditer(text.replace("−", "-")):
        last = found.group()
    return last
