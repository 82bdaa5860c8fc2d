"""The packages of examples/ that bring environments: installed from the index, tested, trained."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from environment import ENVIRONMENTS, EXAMPLES, ROOT, Environment
from tiny_tokenizer import CHATML
from whole_runs import metrics

pytestmark = [pytest.mark.slow, pytest.mark.engine]

SMALL = (
    "--runtime inline --engine transformers --steps 2 --groups 4 --group-size 4 --lr 1e-3 "
    "--estimator turn_returns --output out "
    "--set logging.rollouts_per_step=16"
).split()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What they need from the index, pinned, and the packages themselves (about 20 s)."""
    folder = tmp_path_factory.mktemp("environments")
    environment = Environment(folder / "venv")
    index = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    lock = str(ROOT / "requirements" / "environments.lock")
    words = ("install", "--quiet", "--no-deps", "-r", lock)
    environment.run("pip", *words, timeout=280, **{**index, "PIP_NO_INDEX": "0"})
    # from copies: building leaves folders beside the sources
    environment.install(*(shutil.copytree(EXAMPLES / n, folder / n) for n in ENVIRONMENTS))
    return environment


def rollouts(run: Path) -> list[dict]:
    lines = (run / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_they_pass_their_own_tests(environment: Environment) -> None:
    """About 40 s."""
    output = environment.run(
        *("pytest", "-q", "--import-mode=importlib", "-c", "/dev/null", "-p", "no:cacheprovider"),
        *(str(EXAMPLES / name / "tests") for name in ENVIRONMENTS),
        cwd=environment.site,
    )
    assert "22 passed" in output, output


def check_accounts(run: Path) -> None:
    """The learner finds the same probability for every action token as the engine."""
    steps = metrics(run)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["mismatch/logprob_abs_max"] < 1e-4
        assert step["policy/grad_norm"] >= 0


def test_a_reasoning_gym_task_trains(environment: Environment, workspace: Path) -> None:
    words = "train --model embedded --data rlx_reasoning_gym:load --reward reasoning_gym".split()
    words += ["--set", "data.params.task=spell_backward", "--set", "data.params.size=64"]
    words += ["--set", "data.params.config={min_word_len: 4, max_word_len: 5}"]
    words += ["--set", "data.prompt=word", "--set", "data.template=reverse {prompt}="]
    words += ["--max-new-tokens", "10"]
    environment.rlx(*words, *SMALL, cwd=workspace)
    check_accounts(workspace / "out")
    first = metrics(workspace / "out")[0]
    assert 0 < first["reward/reasoning_gym"] < 1
    assert "reasoning_gym/solved" in first


def test_a_gymnasium_environment_trains(environment: Environment, workspace: Path) -> None:
    words = "train --model embedded --data rlx_gymnasium:load --agent gymnasium".split()
    words += ["--set", "rewards=[]", "--set", "data.params.env=FrozenLake-v1"]
    words += ["--set", "data.params.actions=[a, b, c, d]", "--set", "data.params.size=16"]
    words += ["--set", "agent.max_turns=4", "--max-new-tokens", "3"]
    environment.rlx(*words, *SMALL, cwd=workspace)
    check_accounts(workspace / "out")
    first = metrics(workspace / "out")[0]
    assert first["rollout/turns_mean"] > 1
    assert "invalid_actions" in first
    kinds = [piece["kind"] for record in rollouts(workspace / "out") for piece in record["episode"]]
    assert "observation" in kinds


@pytest.mark.parametrize("kind", ["again", "tool"])
def test_a_verifiers_environment_trains(
    environment: Environment, workspace: Path, kind: str
) -> None:
    (workspace / "tiny" / "chat_template.jinja").write_text(CHATML)
    words = "train --model tiny --data rlx_verifiers:load --agent verifiers".split()
    words += ["--set", "rewards=[]", "--set", "data.params.env=rlx-verifiers-demo"]
    words += ["--set", f"data.params.kind={kind}", "--max-new-tokens", "4"]
    environment.rlx(*words, *SMALL, cwd=workspace)
    check_accounts(workspace / "out")
    first = metrics(workspace / "out")[0]
    assert "exact" in first
    if kind == "again":
        assert first["rollout/turns_mean"] > 1
