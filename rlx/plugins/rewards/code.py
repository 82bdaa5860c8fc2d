"""Run the row's tests on the program in the response, in a sandbox (which one: `sandbox/`).

    score = correct when every test passes, else wrong
    partial: score = wrong + (correct - wrong) * share of tests that pass

Rows as HumanEval has them (`prompt`, `test` with `check(candidate)`, `entry_point`;
arXiv:2107.03374), a list of asserts (MBPP), or pairs of input and output (APPS).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from rlx.core.component import component
from rlx.core.rewards import Reward, RewardInputs
from rlx.plugins.rewards.sandbox import Limits, run_tests

_FENCE = re.compile(r"```[ \t]*(?:([\w+-]+)[ \t]*)?\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "python", "py", "python3")


@component(example_columns={"test": ["assert True"]})
def code(
    sample: RewardInputs,
    *,
    tests: str = "test",
    entry_point: str = "entry_point",
    prelude: str = "prompt",
    correct: float = 1.0,
    wrong: float = 0.0,
    partial: bool = False,
    timeout: Annotated[float, Field(gt=0)] = 10.0,
    memory_mib: Annotated[int, Field(ge=64)] = 512,
    file_mib: Annotated[int, Field(ge=0)] = 16,
    processes: Annotated[int, Field(ge=0)] = 16,
    site_packages: bool = False,
    require_isolation: bool = False,
) -> Reward:
    """`correct` when the program passes its tests, else `wrong`; the note says why.

    The program is the last fenced Python block of the response, else all of it; when it doesn't
    define the entry point itself, it continues the prelude.

    Args:
        tests: column with the tests: code, a list of asserts, `{"inputs": [], "outputs": []}` or
            `[{"input": "", "output": ""}]`, as such or as JSON.
        entry_point: column with the name of the function under test.
        prelude: column with the code that the program continues.
        correct: score when all tests pass.
        wrong: score when none does, or, without `partial`, not all.
        partial: score by the share of tests that pass.
        timeout: seconds for all tests of one program.
        memory_mib: address space of each of its processes, memory of all of them together.
        file_mib: size of a file that it writes; all together may have four times that.
        processes: threads and processes that it may start.
        site_packages: it may import installed packages, not only the standard library.
        require_isolation: an error where the system doesn't permit to take network and files away.

    Raises `ValueError` for a row without tests or with tests of another form.
    """
    rows, kind = read_tests(sample.task.get(tests), column=tests)
    name = str(sample.task.get(entry_point) or "")
    before = sample.task.get(prelude)
    before = before if isinstance(before, str) else ""
    program = program_of(sample.response, name, before)
    if not program.strip():
        none = {"passed": 0.0, "timed_out": 0.0, "over_limit": 0.0, "no_code": 1.0}
        return Reward(wrong, metrics=none, note="there is no program in the response")
    verdict = run_tests(
        program,
        rows,
        kind=kind,
        limits=Limits(
            timeout=timeout, memory_mib=memory_mib, file_mib=file_mib, processes=processes
        ),
        entry_point=name,
        prelude=before if compiles(before) else "",
        check=kind == "code" and bool(name) and "def check(" in rows[0],
        site_packages=site_packages,
    )
    if not (verdict.isolated and verdict.confined):
        what = "namespaces (network)" if not verdict.isolated else "Landlock (files)"
        if require_isolation:
            raise RuntimeError(f"this system has no {what} to keep programs in, and it is required")
        within = "the network and this user's processes" if not verdict.isolated else "files"
        warnings.warn(
            f"this system has no {what} to keep programs in: those that the reward 'code' runs "
            f"can reach {within}",
            RuntimeWarning,
            stacklevel=2,
        )
    share = verdict.passed / verdict.total
    score = share if partial else float(verdict.passed == verdict.total)
    return Reward(
        wrong + (correct - wrong) * score,
        metrics={
            "passed": share,
            "timed_out": float(verdict.timed_out),
            "over_limit": float(verdict.stopped in ("memory", "processes", "files")),
            "no_code": 0.0,
        },
        note=verdict.detail,
    )


def program_of(response: str, entry_point: str, prelude: str) -> str:
    """Return the program in a response, with the task's own code before it."""
    blocks = [text for language, text in _FENCE.findall(response) if language.lower() in _PYTHON]
    text = blocks[-1] if blocks else response
    if not text.strip():
        return ""
    defines = re.search(
        rf"^(?:async\s+def|def|class)\s+{re.escape(entry_point)}\b"
        rf"|^{re.escape(entry_point)}\s*[:=]",
        text,
        re.MULTILINE,
    )
    if entry_point and not defines:
        return prelude + text  # a continuation, indented as it stands
    # The prelude's imports and helpers; its unfinished function is defined again by the program.
    return f"{prelude}\n\n{text}" if compiles(prelude) else text


def read_tests(value: Any, *, column: str) -> tuple[list[Any], Literal["code", "io"]]:
    """Return a column's tests as a list, and of which kind they are."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
    if isinstance(value, str) and value.strip():
        return [value], "code"
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= set(value):
        pairs = zip(value["inputs"], value["outputs"], strict=True)
        value = [{"input": given, "output": wanted} for given, wanted in pairs]
    rows = list(value) if isinstance(value, (list, tuple)) else []
    if rows and all(isinstance(row, str) for row in rows):
        return rows, "code"
    if rows and all(isinstance(row, Mapping) and {"input", "output"} <= set(row) for row in rows):
        return [{"input": str(row["input"]), "output": str(row["output"])} for row in rows], "io"
    raise ValueError(
        f"the column {column!r} has no tests: it needs code, a list of asserts, or pairs of input "
        f"and output, and holds {value!r:.200}"
    )


def compiles(text: str) -> bool:
    """Whether a text is Python code."""
    try:
        compile(text, "<prompt>", "exec")
    except (SyntaxError, ValueError):
        return False
    return bool(text.strip())
