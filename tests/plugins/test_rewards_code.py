"""The `code` reward: right programs pass, wrong ones don't, cheating and harm don't work."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlx.core.rewards import Reward
from rlx.plugins.rewards.code import code, program_of, read_tests
from rlx.plugins.rewards.sandbox import Limits, Verdict, run_tests
from rlx.testing import reward_inputs

DATA = Path(__file__).parents[3] / "shared" / "data"
INCREMENT = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(5) == 6\n"


def score(response: str, **options: Any) -> Reward:
    row = {"prompt": "", "test": INCREMENT, "entry_point": "f", **options.pop("row", {})}
    return code(reward_inputs(response=response, **row), **options)


def run(program: str, *tests: str, **options: Any) -> Verdict:
    limits = Limits(**{"timeout": 5.0, **options.pop("limits", {})})
    return run_tests(program, list(tests), kind="code", limits=limits, **options)


@pytest.fixture(scope="module")
def humaneval() -> list[dict[str, Any]]:
    if not DATA.is_dir():
        pytest.skip(f"no folder {DATA}: the public data sets lie beside the repository")
    lines = (DATA / "humaneval-100.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow  # 200 programs, 20 s on two idle cores
def test_humaneval_solutions_pass_and_empty_ones_do_not(humaneval: list[dict[str, Any]]) -> None:
    def scores(row: dict[str, Any]) -> tuple[str, float | None, float | None]:
        right = code(reward_inputs(response=row["canonical_solution"], **row), timeout=30.0)
        wrong = code(reward_inputs(response="    return None\n", **row), timeout=30.0)
        return row["task_id"], right.score, wrong.score

    assert len(humaneval) == 100
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(scores, humaneval))
    assert [result for result in results if result[1:] != (1.0, 0.0)] == []


def test_humaneval_solution_as_a_chat_model_writes_it(humaneval: list[dict[str, Any]]) -> None:
    row = humaneval[0]
    whole = f"Sure!\n```python\n{row['prompt']}{row['canonical_solution']}```\nIt loops."
    assert code(reward_inputs(response=whole, **row)).score == 1.0
    bare = whole.replace("from typing import List", "")  # what it needs stands in the prompt
    assert code(reward_inputs(response=bare, **row)).score == 1.0


def test_scores_and_metrics() -> None:
    metrics = {"passed": 1.0, "timed_out": 0.0, "over_limit": 0.0, "no_code": 0.0}
    assert score("def f(x):\n    return x + 1\n") == Reward(1.0, metrics=metrics)
    assert score("def f(x): return x\n", wrong=-1.0).score == -1.0
    assert score("  \n").metrics["no_code"] == 1.0


def test_partial_counts_tests_that_pass() -> None:
    tests = ["assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 4", "assert f(0) == 1"]
    program = "def f(x): return x + 1"
    assert score(program, row={"test": tests}, partial=True).score == 0.75
    assert score(program, row={"test": tests}).score == 0.0
    assert score(program, row={"test": json.dumps(tests)}, partial=True).score == 0.75


def test_input_and_output() -> None:
    tests = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
    program = "a, b = map(int, input().split())\nprint(a + b)"
    assert score(program, row={"test": tests, "entry_point": ""}).score == 1.0
    assert score(program + "\nraise SystemExit(1)", row={"test": tests}).score == 0.0
    half = "print(3)"
    assert score(half, row={"test": tests, "entry_point": ""}, partial=True).score == 0.5


def test_row_without_tests_is_an_error() -> None:
    with pytest.raises(ValueError, match="the column 'test' has no tests"):
        score("def f(x): return x", row={"test": None})
    with pytest.raises(ValueError, match="has no tests"):
        read_tests([{"question": 1}], column="test")


def test_program_is_the_last_python_block() -> None:
    text = (
        "```python\ndef f(): return 1\n```\nbetter:\n```py\ndef f(): return 2\n```\n```sh\nls\n```"
    )
    assert program_of(text, "f", "") == "def f(): return 2\n"
    assert program_of("    return 3\n", "f", "def f():\n") == "def f():\n    return 3\n"
    assert program_of("```python\ndef f(): return 4\n", "f", "") == "def f(): return 4\n"


def test_fences_are_found_in_linear_time() -> None:
    start = time.monotonic()
    for text in ("```" + " " * 200_000, "```python\n" * 20_000, "`" * 200_000):
        program_of(text, "f", "")
    assert time.monotonic() - start < 5


def test_programs_see_the_tests_arguments_and_change_them() -> None:
    program = "def f(items, more):\n    items.sort()\n    more['a'] = {1, 2}\n    return None\n"
    test = "x, y = [3, 1, 2], {}\nf(x, y)\nassert x == [1, 2, 3] and y == {'a': {1, 2}}"
    assert run(program, test).passed == 1


def test_values_of_many_types_travel() -> None:
    program = (
        "from collections import namedtuple, Counter, deque\n"
        "from fractions import Fraction\n"
        "P = namedtuple('P', 'x y')\n"
        "def f():\n"
        "    return [P(1, 2.5), float('inf'), None, 'é', b'x', 1j, deque([1]), Fraction(1, 3)]\n"
        "def g(): return Counter('aab')\n"
        "def h():\n    yield from range(3)\n"
        "class Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x); return self\n"
        "    def top(self): return self.items[-1]\n"
        "def i(): raise KeyError('gone')\n"
    )
    verdict = run(
        program,
        "from collections import deque; from fractions import Fraction\n"
        "assert f() == [(1, 2.5), float('inf'), None, 'é', b'x', 1j, deque([1]), Fraction(1, 3)]",
        "assert g() == {'a': 2, 'b': 1}",
        "assert list(h()) == [0, 1, 2]",
        "s = Stack(); s.push(3).push(4); assert s.top() == 4",
        "try: i()\nexcept KeyError as e: assert 'gone' in str(e)\nelse: assert False",
    )
    assert verdict.passed == verdict.total == 5, verdict.detail


def test_helpers_of_the_task_are_not_the_programs_to_replace() -> None:
    prelude = "def poly(x):\n    return x - 3\n\ndef root():\n    '''A zero of poly.'''\n"
    test = "def check(candidate):\n    assert poly(candidate()) == 0\n"
    row = {"prompt": prelude, "test": test, "entry_point": "root"}
    assert score("    return 3\n", row=row).score == 1.0
    cheat = "    return 0\n\ndef poly(x):\n    return 0\n"
    assert score(cheat, row=row).score == 0.0


def test_tests_that_pass_functions_are_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="these tests can't run in the sandbox"):
        run("def f(g): return g(1)", "assert f(lambda x: x) == 1")


def test_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_TEST_SECRET", "token")
    program = "import os\ndef f(): return dict(os.environ)"
    assert run(program, "assert 'token' not in f().values()").passed == 1


def test_folder_is_private_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    make = tempfile.mkdtemp

    def watched(**options: str) -> str:
        kept.append(make(**options))
        return kept[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", watched)
    assert run("import os\ndef f(): return os.listdir()", "assert f() == []").passed == 1
    assert len(kept) == 1
    assert not any(Path(folder).exists() for folder in kept)


def isolated() -> bool:
    return run("", "pass").isolated


def test_no_network_not_even_this_machine() -> None:
    if not isolated():
        pytest.skip("this system permits no namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = (
            "import socket\n"
            "def f(port):\n"
            "    try: socket.create_connection(('127.0.0.1', port), 2); return 'connected'\n"
            "    except OSError: return 'no'\n"
        )
        verdict = run(program, f"assert f({port}) == 'no'")
    assert verdict.passed == 1, verdict.detail


def test_nothing_that_a_program_starts_outlives_it() -> None:
    if not isolated():
        pytest.skip("this system permits no namespaces")
    marker = f"rlx_daemon_{os.getpid()}"
    program = (
        "import os, subprocess, sys\n"
        "def f():\n"
        f"    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{marker}'],\n"
        "                     start_new_session=True)\n"
        "    return True\n"
    )
    assert run(program, "assert f()").passed == 1
    deadline = time.monotonic() + 5
    while any(marker in line for line in command_lines()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(marker in line for line in command_lines())


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


def test_the_users_files_are_out_of_reach(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    program = (
        "def read(path):\n    try: return open(path).read()\n    except OSError: return 'no'\n"
        "def write(path):\n    try: open(path, 'w').write('x')\n    except OSError: return 'no'\n"
    )
    verdict = run(program, f"assert read({str(secret)!r}) == write({str(secret)!r}) == 'no'")
    if not verdict.confined:
        pytest.skip("this system has no Landlock")
    assert verdict.passed == 1, verdict.detail
    assert secret.read_text() == "token"


def test_required_isolation_is_an_error_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = Verdict(passed=1, total=1, detail="", isolated=False)
    monkeypatch.setattr("rlx.plugins.rewards.code.run_tests", lambda *a, **k: verdict)
    with pytest.raises(RuntimeError, match="no namespaces"):
        score("def f(x): return x", require_isolation=True)
    with pytest.warns(RuntimeWarning, match="no namespaces .* can reach the network"):
        assert score("def f(x): return x").score == 1.0


def test_installed_packages_only_on_request() -> None:
    program = "def f():\n    import numpy\n    return int(numpy.arange(3).sum())\n"
    tests = ["assert f() == 3"]
    assert score(program, row={"test": tests}).score == 0.0
    reward = score(program, row={"test": tests}, site_packages=True, memory_mib=4096, timeout=60.0)
    assert reward.score == 1.0
