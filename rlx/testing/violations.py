"""Runs properties and gathers every violation, each with its smallest counter-example.

A property is a function of one case that raises `Broken` (or anything else) when it does not hold.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from rlx.core.errors import RlxError
from rlx.core.importing import plugin_traceback

Case = TypeVar("Case")
EXAMPLES = 40
"""Cases per property."""
SECONDS = 3.0
"""Time per property after which no further case is tried."""
_LONGEST = 600
"""Characters of a counter-example that are shown."""
_OWN_FRAMES = ("hypothesis", "rlx/testing", "rlx/core/component.py")


class Broken(AssertionError):  # noqa: N818 - reads as what it says: the rule is broken
    """A property does not hold for the case at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One property that a component violates."""

    rule: str
    """What must hold, in a few words."""
    detail: str
    example: str | None = None
    """The smallest case that hypothesis found."""

    def __str__(self) -> str:
        lines = [f"{self.rule}: {self.detail}"]
        if self.example:
            lines.append("  for " + self.example.replace("\n", "\n  "))
        return "\n".join(lines)


class ConformanceError(AssertionError):
    """A component violates its contract; lists every violation."""

    def __init__(self, component: str, violations: list[Violation]) -> None:
        count = len(violations)
        listing = "\n".join(f"{n}. {violation}" for n, violation in enumerate(violations, 1))
        plural = "violation" if count == 1 else "violations"
        super().__init__(f"{component}: {count} {plural} of its contract\n{listing}")
        self.violations = violations


class Checker:
    """Collects the violations of one component."""

    def __init__(
        self,
        component: str,
        *,
        examples: int = EXAMPLES,
        render: Callable[[Any], str] = str,
    ) -> None:
        self.component = component
        self.examples = examples
        self._render = render
        self.violations: list[Violation] = []

    def holds(self, rule: str, cases: SearchStrategy[Case], check: Callable[[Case], None]) -> bool:
        """Try `check` on generated cases; a failure becomes a violation with the smallest case."""
        smallest: list[tuple[Case, Exception]] = []
        deadline = time.monotonic() + SECONDS

        def attempt(case: Case) -> None:
            if not smallest and time.monotonic() > deadline:
                return  # a slow component is tried on fewer cases
            try:
                with _quiet_generators():
                    check(case)
            except Exception as error:
                smallest[:] = [(case, error)]  # shrinking ends with the smallest
                raise

        run = settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )(given(cases)(attempt))
        try:
            run()
        except Exception as failure:
            case, error = smallest[0] if smallest else (None, failure)
            self.add(rule, error, case)
            return False
        return True

    def once(self, rule: str, check: Callable[[], None]) -> bool:
        """Try a check that needs no generated case."""
        try:
            check()
        except Exception as error:
            self.add(rule, error)
            return False
        return True

    def add(self, rule: str, error: Exception, case: object | None = None) -> None:
        example = None if case is None else shorten(self._render(case))
        self.violations.append(Violation(rule=rule, detail=_explain(error), example=example))

    def finish(self) -> None:
        """Raise `ConformanceError` when anything was violated."""
        if self.violations:
            raise ConformanceError(self.component, self.violations)


def _explain(error: Exception) -> str:
    """Say what went wrong: our own words, or the plugin's traceback without the kit's frames."""
    if isinstance(error, (Broken, RlxError)):
        return str(error)
    error.__notes__ = []  # hypothesis notes the case, which is shown shorter
    return plugin_traceback(error, without=_OWN_FRAMES)


@contextlib.contextmanager
def _quiet_generators() -> Iterator[None]:
    """Keep hypothesis from complaining about components that draw from the global generator."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def shorten(text: str) -> str:
    """Cut a long counter-example in the middle."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"


def label_of(target: Any) -> str:
    """Return how reports call a component that was given as a reference or an object."""
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))
